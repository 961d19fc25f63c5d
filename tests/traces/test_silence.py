"""Steps, layers and graph launches whose kernels a capture lost: told, and no pass."""

from __future__ import annotations

import random

import pytest
from k3lab.traces import check_trace, read_trace
from k3lab.traces.model import Kernel, in_order
from k3lab.traces.readers.lost import lost_launches, told

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}


def without(file, gone):
    """The rows of an export less the kernels for which ``gone(row, index among kernels)``."""
    kept, index = [], 0
    for table, row in file.rows:
        lost = table == KERNELS and gone(row, index)
        index += table == KERNELS
        if not lost:
            kept.append((table, row))
    return kept


def judged(file, rows=None):
    return check_trace(file.write(rows=rows), "gb300-tp16", gpu="GB300")


@pytest.mark.parametrize(
    ("owns", "found"),
    [
        ("yyy", (3, 0, 0)),
        ("yny", (3, 1, 0)),
        ("nyyn", (4, 0, 2)),
        ("nynny", (5, 2, 1)),
        ("nn", (2, 0, 2)),
        ("", (0, 0, 0)),
    ],
)
def test_launches_lost_inside_and_at_the_edges(owns, found):
    launches = [(start, word == "y") for start, word in enumerate(owns)]
    random.Random(1).shuffle(launches)
    assert lost_launches(launches) == found


def test_one_launch_in_ten_may_be_cut_at_the_edges_and_none_inside():
    edge = [(start, start < 19) for start in range(20)]
    assert told(edge, "cure") == ([], ["1 of 20 graph launches have no kernels in the file: cut off by the capture"])
    inside = [(start, start != 9) for start in range(20)]
    assert told(inside, "cure") == (["1 of 20 graph launches have no kernels in the file; cure"], [])
    assert told([(0, True)], "cure") == ([], [])


@pytest.mark.parametrize(("replay", "verdict"), [(12, "inconclusive"), (0, "pass"), (24, "pass")])
def test_a_replay_without_kernels_in_the_middle_forbids_a_pass(tmp_path, make, replay, verdict):
    file = make.node_mode(tmp_path / "t.sqlite", replays=25)
    report = judged(file, without(file, lambda row, _: row["correlationId"] == 900 + replay))
    assert report.verdict == verdict
    words = (*report.trace.incomplete, *report.notes)
    assert any("1 of 25 graph launches have no kernels" in line for line in words)


@pytest.mark.parametrize(("replay", "verdict"), [(12, "inconclusive"), (0, "pass"), (24, "pass")])
def test_a_step_mark_without_kernels_in_the_middle_forbids_a_pass(tmp_path, make, replay, verdict):
    """Its launch is lost, too: only the mark tells that there was a step."""
    file = make.node_mode(tmp_path / "t.sqlite", replays=25)
    rows = without(file, lambda row, _: row["correlationId"] == 900 + replay)
    rows = [(table, row) for table, row in rows if table == KERNELS or row.get("correlationId") != 900 + replay]
    report = judged(file, rows)
    assert report.verdict == verdict
    assert any("1 step marks have no kernels" in line for line in (*report.reasons, *report.notes))


def test_marks_of_prefill_inside_steps_and_on_other_threads_are_no_lost_steps(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite", replays=6)
    for at, name in (
        (51_500_000, "execute_context_1(8)_generation_0(0)"),
        (51_965_000, "execute_context_0(0)_generation_8(8) x"),
    ):
        file.range(name, at, at + 5_000)
    file.range(
        "execute_context_0(0)_generation_8(8) #7", 51_500_000, 51_600_000, thread=0x1000000_000000 | (0x6F << 24) | 1
    )
    assert judged(file).verdict == "pass"


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_layer_without_kernels_in_every_step_forbids_a_pass(tmp_path, make, layer):
    file = make.node_mode(tmp_path / "t.sqlite", layers=4)
    assert judged(file).verdict == "pass"
    report = judged(file, without(file, lambda _, index: index % 52 // 13 == layer))
    # the next layer seems to have taken the time of the lost one, which fails it
    assert report.verdict == ("fail" if layer == 1 else "inconclusive")
    assert any(f"layers are marked that have no kernels ({layer})" in note for note in report.notes)


def test_layers_of_another_name_are_not_missed(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.range("vision.blocks.7", 900_000, 950_000)
    assert judged(file).verdict == "pass"


def test_a_graph_of_copies_alone_has_lost_nothing(tmp_path, make):
    events = make.pdl_events(slow=None, bubble=None)
    events.append(make.host("cuda_runtime", "cudaGraphLaunch", 1400.5, 5, correlation=77))
    events.append(make.kernel("Memcpy DtoD", 1420.5, 2, correlation=77) | {"cat": "gpu_memcpy"})
    assert check_trace(make.torch(tmp_path / "t.json", events, **HEAD), "gb300-tp16").verdict == "pass"
    assert check_trace(make.torch(tmp_path / "t.json", events[:-1], **HEAD), "gb300-tp16").verdict == "inconclusive"


def test_kernels_of_one_start_stand_in_an_order_of_their_own():
    kernels = [Kernel(f"k{i % 7}", 100 + i // 20, 200 + i % 3, i % 2, i % 4, i % 5, i) for i in range(100)]
    wanted = sorted(kernels, key=lambda item: (item.order, item.process, item.device))
    for seed in range(5):
        mixed = kernels[:]
        random.Random(seed).shuffle(mixed)
        in_order(mixed)
        assert mixed == wanted


def test_kernels_without_a_length_are_rejected(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.kernel("zero", 70_000_000, 70_000_000, 901)
    assert [(row.name, row.reason) for row in read_trace(file.write()).rejected] == [("zero", "zero duration")]
