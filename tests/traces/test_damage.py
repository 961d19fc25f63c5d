"""Damaged files: never a traceback, never a pass for a trace that fails."""

from __future__ import annotations

import copy
import gzip
import json
import random

import pytest
from damage import flipped, outcome
from k3lab.traces import check_trace

ODD = [None, True, -1, 0, 10**30, -(10**30), 1.5e300, "", "x", "NaN", [], {}, [None], {"a": 1}]


@pytest.fixture(scope="module")
def failing(tmp_path_factory, make):
    """Files of which every layer of every step has 14 kernels on a GB300."""
    folder = tmp_path_factory.mktemp("failing")
    events = make.pdl_events(slow=None, bubble=None)
    for extra in [event for event in events if event["name"] == "k06"]:
        events.append(extra | {"name": "extra", "ts": extra["ts"] + 0.25,
                               "args": extra["args"] | {"graph node id": 0}})  # fmt: skip
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
    plain = make.torch(folder / "t.json", events, **head)
    packed = make.torch(folder / "t.json.gz", events, **head)
    file = make.node_mode(folder / "t.sqlite", kernels=14)
    file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
    return {"json": plain, "gz": packed, "sqlite": file.write()}


@pytest.mark.parametrize("kind", ["json", "gz", "sqlite"])
def test_the_undamaged_files_fail(failing, kind):
    assert outcome(failing[kind]) == "fail"


@pytest.mark.parametrize("kind", ["json", "gz", "sqlite"])
def test_truncated_files(tmp_path, failing, kind):
    data = failing[kind].read_bytes()
    rng = random.Random(3)
    sizes = [0, 1, 15, 16, 100, len(data) - 1, len(data) // 2, *(rng.randrange(len(data)) for _ in range(40))]
    path = tmp_path / failing[kind].name
    for size in sizes:
        path.write_bytes(data[:size])
        assert outcome(path) in ("refused", "fail", "inconclusive"), size


@pytest.mark.parametrize("kind", ["json", "gz", "sqlite"])
def test_flipped_bytes(tmp_path, failing, kind):
    data = failing[kind].read_bytes()
    path = tmp_path / failing[kind].name
    seen = set()
    for broken in flipped(data, 5, 250):
        path.write_bytes(broken)
        seen.add(outcome(path))
    assert not seen & {"pass", "several lines"}
    assert "refused" in seen


def test_odd_values_anywhere_in_the_json(tmp_path, failing):
    original = json.loads(gzip.decompress(failing["gz"].read_bytes()))
    rng = random.Random(7)
    path = tmp_path / "t.json"
    seen = set()
    for _ in range(150):
        data = copy.deepcopy(original)
        events = data["traceEvents"]
        for _ in range(rng.choice((1, 5, 50))):
            place = rng.choice((data, *rng.sample(events, 3)))
            if isinstance(place.get("args"), dict) and rng.random() < 0.5:
                place = place["args"]
            keys = [key for key in place if key != "traceEvents"]
            place[rng.choice(keys or ["x"])] = copy.deepcopy(rng.choice(ODD))
        path.write_text(json.dumps(data))
        seen.add(outcome(path))
    for odd in ODD:
        path.write_text(json.dumps(original | {"traceEvents": odd}))
        assert outcome(path) == "refused"
    assert not seen & {"pass", "several lines"}
    assert {"fail", "inconclusive"} <= seen


def test_odd_values_anywhere_in_the_tables(tmp_path, make):
    rng = random.Random(9)
    seen = set()
    for _ in range(120):
        file = make.node_mode(tmp_path / "t.sqlite", kernels=14)
        file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
        for _ in range(rng.choice((1, 5, 60))):
            _, row = rng.choice(file.rows)
            row[rng.choice(list(row))] = rng.choice([None, -1, 0, 2**62, -(2**62), 1.5, "x", b"\xff\x00", ""])
        seen.add(outcome(file.write()))
    assert not seen & {"pass", "several lines"}
    assert "fail" in seen


def test_a_passing_trace_with_unusable_rows_does_not_pass(tmp_path, make):
    events = make.pdl_events(slow=None)
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
    assert check_trace(make.torch(tmp_path / "t.json", events, **head), "gb300-tp16").verdict == "pass"
    events[30] = events[30] | {"dur": -1}
    report = check_trace(make.torch(tmp_path / "t.json", events, **head), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert any("rejected kernel row" in note and "negative duration" in note for note in report.notes)
