"""Steps that are no steady run of one kind must not pass by their median."""

from __future__ import annotations

import pytest
from k3lab.traces import check_trace, inspect_trace
from k3lab.traces.marks import layer_number, step_mark

HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}], "distributedInfo": {"rank": 0, "world_size": 16}}
LAYERS, STEPS = 6, 9


def run(make, path, *, body=LAYERS * 13, length=4.001, pause=60.0, mark=None, before=(), after=(), head=HEAD, **more):
    """Graph replays of layers of 13 kernels; ``length`` and ``mark`` by step; ``before`` and ``after`` the layers."""
    events, clock = [], 1000.123
    names = [*before, *(f"kda_{index % 13:02}" for index in range(body)), *after]
    for step in range(STEPS):
        own = length(step) if callable(length) else length
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", clock - 20, 8.0, correlation=10 + step))
        if mark:
            events.append(make.host("user_annotation", mark(step), clock - 25, 16.0))
        events += [
            make.kernel(name, round(clock + own * i, 3), own, correlation=10 + step) for i, name in enumerate(names)
        ]
        clock += own * len(names) + pause
    return check_trace(make.torch(path / "t.json", events, **head), "gb300-tp16", **more)


def test_the_same_steps_one_after_another_pass(make, tmp_path):
    assert run(make, tmp_path).verdict == "pass"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("execute_context_0(0)_generation_{0}({0})", "rows: 1, 8"),
        ("step[DECODE bs={0}]", "requests: 1, 8"),
    ],
)
def test_steps_of_several_sizes_are_no_pass(make, tmp_path, name, says):
    """Most steps are of one row and fast; those of the budget's eight are over it."""
    sizes = [8 if step % 3 == 0 else 1 for step in range(STEPS)]
    report = run(
        make,
        tmp_path,
        mark=lambda step: name.format(sizes[step]),
        length=lambda step: 7.001 if sizes[step] == 8 else 4.001,
    )
    assert report.verdict == "inconclusive"
    assert any(says in reason for reason in report.reasons)
    assert run(make, tmp_path, mark=lambda step: name.format(8)).verdict == "pass"


@pytest.mark.parametrize(("pause", "verdict"), [(-5.0, "pass"), (-100.0, "inconclusive")])
def test_steps_at_the_same_time_are_no_pass(make, tmp_path, pause, verdict):
    report = run(make, tmp_path, pause=pause)
    assert report.verdict == verdict
    assert any("run while another does" in reason for reason in report.reasons) == (verdict != "pass")


@pytest.mark.parametrize("where", ["before", "after"])
def test_kernels_enough_for_a_layer_beside_the_layers_are_no_pass_until_their_number_is_told(make, tmp_path, where):
    other = [f"dense_{index}" for index in range(13)]
    report = run(make, tmp_path, **{where: other})
    assert report.verdict == "inconclusive"
    assert any("13 kernels" in reason and "--layers" in reason for reason in report.reasons)
    assert run(make, tmp_path, **{where: other[:12]}).verdict == "pass"
    assert run(make, tmp_path, **{where: other}, layers=LAYERS).verdict == "pass"
    assert run(make, tmp_path, **{where: other}, layers=LAYERS + 1).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("key", "value"), [("world_size", 0), ("world_size", -16), ("world_size", 10**9), ("rank", -1)]
)
def test_a_damaged_place_in_the_world_is_no_pass(make, tmp_path, key, value):
    head = HEAD | {"distributedInfo": HEAD["distributedInfo"] | {key: value}}
    report = run(make, tmp_path, head=head, tp=16)
    assert report.verdict == "inconclusive"
    assert any(f"its {key} is {value}" in reason for reason in report.reasons)


@pytest.mark.parametrize(("lost", "where"), [(0, "before the first layer"), (5, "after the last layer")])
def test_a_layer_at_the_edge_whose_mark_is_lost_is_not_passed_over(make, tmp_path, lost, where):
    """Its kernels would count as those of the embedding or of sampling, however slow they are."""
    file = make.node_mode(tmp_path / "t.sqlite", layers=6, replays=3)
    file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
    assert check_trace(file.write(), "gb300-tp16").verdict == "pass"
    file.rows = [(table, row) for table, row in file.rows if row.get("text") != f"layer_{lost}"]
    report = check_trace(file.write(), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert any(where in reason for reason in report.reasons)


def test_kernels_of_a_category_that_is_not_known_are_no_pass(make, tmp_path):
    events = make.pdl_events(slow=None, bubble=None)
    assert check_trace(make.torch(tmp_path / "t.json", events, **HEAD), "gb300-tp16").verdict == "pass"
    odd = [event | {"cat": "gpu_op"} if event["name"] == "k05" else event for event in events]
    report = check_trace(make.torch(tmp_path / "t.json", odd, **HEAD), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert any("12 rows of the unknown category 'gpu_op'" in reason for reason in report.reasons)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["layer" + " " * 60_000, "layer =" + " " * 60_000 + "x", "layers" * 20_000, "step[" + " " * 60_000]
)
def test_long_names_of_marks_do_not_hang(name):
    assert layer_number(name) is None
    assert step_mark(name) is None or name.startswith("step[")


def test_brackets_in_brackets_without_end_do_not_hang(make, tmp_path):
    deep = "(" * 60_000 + ")" * 60_000
    events = [make.kernel(deep + str(index % 3), 10.0 * index, 5.001) for index in range(12)]
    assert inspect_trace(make.torch(tmp_path / "t.json", events)).to_json()["kernels"] == 12
