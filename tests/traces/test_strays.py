"""Kernels that no mark or launch reaches must not make a layer look short, and long captures must not hang."""

from __future__ import annotations

import time

import pytest
from k3lab.traces import check_trace
from k3lab.traces.marks import enclosing, layer_number
from k3lab.traces.model import HostRange
from k3lab.traces.recurrence import Abstain, find_layers

HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
STEPS, LAYERS = 4, 6


def steps_of(make, body, *, step_mark=None, pause=20.0):
    """Steps one after another; ``body(layer, clock, correlation)`` gives a layer's events and its length in us."""
    events, clock, correlation = [], 1000.003, 1
    for step in range(STEPS):
        begin = clock
        for layer in range(LAYERS):
            made, length, used = body(layer, clock, correlation)
            events.extend(made)
            clock += length
            correlation += used
        if step_mark:
            events.append(make.host("user_annotation", f"{step_mark} {step}", begin - 15, clock - begin + 10))
        clock += pause
    return events


def judged(make, path, events, **more):
    return check_trace(make.torch(path, events, **HEAD), "gb300-tp16", tp=16, rows=8, **more)


@pytest.mark.parametrize(("eager", "verdict"), [(3, "pass"), (4, "fail")])
def test_eager_kernels_between_piecewise_graphs_count(tmp_path, make, eager, verdict):
    def layer(_layer, clock, correlation):
        events = [make.host("cuda_runtime", "cudaGraphLaunch", clock - 10, 1.0, correlation=correlation)]
        events += [make.kernel(f"k{i:02}", clock + 3 * i, 3.001, correlation=correlation) for i in range(10)]
        for i in range(eager):
            at, own = clock + 30 + 3 * i, correlation + 1 + i
            events.append(make.host("cuda_runtime", "cudaLaunchKernel", at - 10, 1.0, correlation=own))
            events.append(make.kernel(f"kda_{i}", at, 3.001, correlation=own))
        return events, 3.0 * (10 + eager), 1 + eager

    report = judged(make, tmp_path / "t.json", steps_of(make, layer, pause=3.0))
    assert report.verdict == verdict, report.reasons
    assert {len(one.kernels) for one in report.devices[0].layers.layers[:-1]} == {10 + eager}


@pytest.mark.parametrize(("side", "verdict"), [(0, "pass"), (1, "inconclusive")])
def test_kernels_launched_from_elsewhere_during_a_step(tmp_path, make, side, verdict):
    def layer(_layer, clock, correlation):
        events = []
        for i in range(13 + side):
            own, at = correlation + i, clock + 3 * min(i, 12)
            call = make.host("cuda_runtime", "cudaLaunchKernel", at - 10, 1.0, correlation=own)
            if i >= 13:
                call["tid"] = 5  # a thread without marks
            events += [call, make.kernel(f"kda_{i:02}", at, 3.001, stream=7 if i < 13 else 9, correlation=own)]
        return events, 39.0, 13 + side

    report = judged(make, tmp_path / "t.json", steps_of(make, layer, step_mark="decode step"))
    assert report.verdict == verdict, report.reasons
    assert any("belong to none" in reason for reason in report.reasons) == bool(side)


def test_halves_in_turn_are_no_pass_until_the_number_of_layers_is_told(tmp_path, make):
    def layer(index, clock, correlation):
        names = [f"half{index % 2}_kda", *(f"k{i:02}" for i in range(12))]
        events = []
        for i, name in enumerate(names):
            events.append(make.host("cuda_runtime", "cudaLaunchKernel", clock + 3 * i - 10, 1.0, correlation + i))
            events.append(make.kernel(name, clock + 3 * i, 3.001, correlation=correlation + i))
        return events, 39.0, 13

    events = steps_of(make, layer, step_mark="decode step")
    report = judged(make, tmp_path / "t.json", events)
    assert report.verdict == "inconclusive"
    assert any("--layers N" in reason for reason in report.reasons)
    assert judged(make, tmp_path / "t.json", events, layers=LAYERS).verdict == "pass"


def test_long_capture_without_marks_is_searched_in_seconds():
    layer = [f"k{i:02}" for i in range(13)]
    mla = [*layer[:2], "mla", *layer[2:]]
    step = ["embed", *layer[:7], "dense", *(name for n in range(92) for name in (mla if n % 4 == 2 else layer)), "head"]
    began = time.monotonic()
    found = find_layers(step * 12)
    assert time.monotonic() - began < 15
    assert not isinstance(found, Abstain)
    assert found.kernels == 13


def test_search_of_irregular_kernels_is_given_up(monkeypatch):
    from k3lab.traces import recurrence

    monkeypatch.setattr(recurrence, "_EFFORT", 1000)
    found = find_layers([f"k{i * i % 23}" for i in range(400)] + ["a", "b", "c"] * 20)
    assert isinstance(found, Abstain)
    assert "irregularly" in found.reason


def test_thousands_of_open_marks_do_not_hang():
    thread = (1, 1)
    ranges = [HostRange(f"layer {n}", n, 10**9, thread) for n in range(20_000)]
    began = time.monotonic()
    found = enclosing(
        ranges, [(thread, 30_000 + n) for n in range(20_000)], lambda item: layer_number(item.name) is not None
    )
    assert time.monotonic() - began < 10
    assert all(len(marks) <= 200 and marks[-1].name == "layer 19999" for marks in found)


@pytest.mark.parametrize(
    ("name", "verdict", "says"),
    [
        ("execute_context_0(0)_generation_1(8)", "pass", None),
        ("execute_context_0(0)_generation_1(1)", "inconclusive", "1 rows by its mark"),
        (
            "execute_9_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk5sqsq5sqsk5)",
            "inconclusive",
            "32 rows by its mark",
        ),
        ("step[DECODE bs=1]", "pass", None),
        ("step[DECODE bs=9]", "inconclusive", "9 requests by its mark"),
    ],
)
def test_rows_that_a_step_mark_tells_count(tmp_path, make, name, verdict, says):
    def layer(_layer, clock, correlation):
        calls = [
            make.host("cuda_runtime", "cudaLaunchKernel", clock + 3 * i - 10, 1.0, correlation + i) for i in range(13)
        ]
        rows = [make.kernel(f"kda_{i:02}", clock + 3 * i, 3.001, correlation=correlation + i) for i in range(13)]
        return [*calls, *rows], 39.0, 13

    events = steps_of(make, layer, step_mark=name)
    for told in (8, None):
        path = make.torch(tmp_path / "t.json", events, **HEAD)
        report = check_trace(path, "gb300-tp16", tp=16, rows=told)
        assert report.verdict == verdict, report.reasons
        assert says is None or any(says in reason for reason in report.reasons)
    assert any("8 rows" in note for note in report.notes) == name.startswith("step")


def test_a_tp_that_cannot_be_is_not_believed(tmp_path, make):
    events = make.pdl_events(slow=None, bubble=None)
    verdicts = {}
    for ranks in (8, 16, 32):
        head = HEAD | {"distributedInfo": {"world_size": ranks, "rank": 0}}
        verdicts[ranks] = check_trace(make.torch(tmp_path / "t.json", events, **head), "gb300-tp16", tp=16).verdict
    assert verdicts == {8: "inconclusive", 16: "pass", 32: "pass"}


def test_a_range_encloses_from_its_start_to_its_end_and_no_longer():
    thread = (1, 1)
    spans = {"step": (0, 100), "a": (10, 20), "inner": (12, 18), "b": (30, 40), "across": (35, 60), "late": (200, 210)}
    ranges = [HostRange(name, start, end, thread) for name, (start, end) in spans.items()]
    times = [*range(0, 220, 5), 11, 12, 18, 19, 20, 21]
    found = enclosing(ranges, [(thread, at) for at in times], lambda item: True)
    for at, marks in zip(times, found, strict=True):
        assert {mark.name for mark in marks} == {name for name, (start, end) in spans.items() if start <= at <= end}
    assert enclosing(ranges, [((1, 2), 15)], lambda item: True) == [()]
