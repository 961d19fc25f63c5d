"""Steps that a capture's edge cut off are dropped; a hole anywhere else is lost events, and never a pass."""

from __future__ import annotations

import json

import pytest
from k3lab.traces import check_trace, parse_budget, synthesize
from k3lab.traces.budget import SCHEMA


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    path = synthesize(tmp_path_factory.mktemp("whole") / "t.json", steps=27)
    return json.loads(path.read_text())


def without(events, path, step, places):
    """The trace without those kernels of a step, by their places in launch order."""
    replays: dict[int, list[int]] = {}
    for index, event in enumerate(events["traceEvents"]):
        if event.get("cat") == "kernel":
            replays.setdefault(event["args"]["correlation"], []).append(index)
    order = list(replays.values())[step]
    gone = {order[place] for place in places}
    rows = [event for index, event in enumerate(events["traceEvents"]) if index not in gone]
    path.write_text(json.dumps({**events, "traceEvents": rows}))
    return check_trace(path, "gb300-tp16")


@pytest.mark.parametrize(
    ("step", "places", "cut"),
    [(0, range(40), 1), (0, range(1), 1), (-1, range(-40, 0), 1), (-1, [-1], 1)],
    ids=["beginning", "first kernel", "end", "last kernel"],
)
def test_what_the_edge_cut_off_is_dropped_and_told(events, tmp_path, step, places, cut):
    report = without(events, tmp_path / "t.json", step, places)
    assert report.verdict == "pass"
    assert report.devices[0].layers.counts.cut == cut
    assert any("cut off by the capture were dropped" in note for note in report.notes)


@pytest.mark.parametrize("step", [0, 2, 12, -2, -1])
@pytest.mark.parametrize("places", [[50], range(40, 53)], ids=["kernel", "layer"])
def test_a_hole_is_lost_events(events, tmp_path, step, places):
    report = without(events, tmp_path / "t.json", step, places)
    assert report.verdict == "inconclusive"
    assert any("lost events" in reason for reason in report.reasons)


@pytest.mark.parametrize(("step", "places"), [(0, range(-40, 0)), (-1, range(40)), (1, range(40)), (-2, range(-40, 0))])
def test_what_is_missing_on_the_other_side_is_a_hole(events, tmp_path, step, places):
    assert without(events, tmp_path / "t.json", step, places).verdict == "inconclusive"


@pytest.mark.parametrize("layer", [4, 6, 11, 14, 19])
def test_a_layer_lost_from_the_only_step_breaks_the_turn(tmp_path, layer):
    trace = json.loads(synthesize(tmp_path / "t.json", steps=1, layers=24).read_text())
    begun = 1 + sum(15 if index % 4 == 3 else 13 for index in range(layer))
    without(trace, tmp_path / "t.json", 0, range(begun, begun + (15 if layer % 4 == 3 else 13)))
    counts = parse_budget({
        "schema": SCHEMA, "name": "counts", "gpu": "GB300", "tp": 16, "layers": {"kda": {"kernels": 13}, "mla": {"kernels": 15}},
    })  # fmt: skip
    report = check_trace(tmp_path / "t.json", counts)
    assert report.verdict == "inconclusive"
    assert any("falls out of it: is one lost?" in reason for reason in report.reasons)
    assert check_trace(tmp_path / "t.json", counts, layers=23).verdict == "pass"
