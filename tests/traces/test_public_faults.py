"""Faults that other readers of traces were reported to have; each test is named after one and holds the right answer."""

from __future__ import annotations

import json
import re

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace, synthesize
from k3lab.traces.capture import nsys_command
from nsys_eras import LATEST

PROCESS = 0x1000000_000000 | (0x6F << 24)
HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
LAYERS = [61_000, 60_500, 60_500, 60_500]


def periods(report):
    return [layer.period for layer in report.devices[0].layers.layers]


def verdict(make, path, events):
    return check_trace(make.torch(path, events, **HEAD), "gb300-tp16")


@pytest.fixture
def clean(make):
    return make.pdl_events(slow=None, bubble=None)


def test_flameox_339_ranges_without_an_end(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    before = inspect_trace(file.write()).devices[0].layers
    for kind in (75, 59, 60, 34, 33):
        file.range("layer_1", 1_000_100, None, kind=kind, domain=3)
    assert inspect_trace(file.write()).devices[0].layers.layers == before.layers


def test_nsys_ai_236_graph_kernels_belong_to_their_node_and_a_launch_counts_once(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite", replays=3)
    device = inspect_trace(file.write()).devices[0].layers
    assert [layer.name for layer in device.layers] == ["layer_0", "layer_1", "layer_2"]
    assert (device.counts.found, device.counts.outside) == (3, 0)
    step = max(row["end"] for table, row in file.rows if row.get("correlationId") == 900 and "KERNEL" in table)
    assert sum(layer.times[0].completion_period for layer in device.layers) == step - 50_000_000


@pytest.mark.parametrize("empty", [True, False])
def test_nsys_ai_493_an_empty_window_is_not_healthy(tmp_path, make, empty, capsys):
    file = make.nsys(tmp_path / "t.sqlite")
    file.api("cudaMalloc_v3020", 5, 9, 1)
    file.empty_tables |= {"CUPTI_ACTIVITY_KIND_KERNEL"} if empty else set()
    assert run(["trace", "check", str(file.write())]) == 2
    assert "no kernel" in capsys.readouterr().err


def test_tracy_1330_graph_kernels_have_no_api_row_of_their_own(tmp_path, make):
    """They share the launch's correlation; without any API row they still are a group."""
    file = make.node_mode(tmp_path / "t.sqlite")
    whole = inspect_trace(file.write()).devices[0].layers
    file.rows = [(table, row) for table, row in file.rows if "RUNTIME" not in table]
    without = inspect_trace(file.write())
    assert len(without.trace.kernels) == 78
    assert [layer.times for layer in without.devices[0].layers.layers] == [layer.times for layer in whole.layers]


@pytest.mark.parametrize("kind", ["json", "sqlite"])
def test_kineto_1062_conditional_graphs_make_counts_a_lower_bound(tmp_path, make, clean, kind):
    if kind == "json":
        clean.append(make.host("cuda_runtime", "cudaGraphConditionalHandleCreate", 10, 5, correlation=77))
        report = verdict(make, tmp_path / "t.json", clean)
    else:
        file = make.node_mode(tmp_path / "t.sqlite")
        file.api("cudaGraphConditionalHandleCreate_v12030", 10, 15, 77)
        report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert any("lower bound" in reason for reason in report.reasons)


def test_kineto_1165_versions_are_shown_and_old_ones_warned_of(tmp_path, make, clean):
    notes = inspect_trace(make.torch(tmp_path / "t.json", clean, cupti_version=130001, cuda_driver_version=13000)).notes
    assert "recorded with CUPTI 130001, CUDA driver 13000" in notes
    assert any("13.1 Update 1" in note for note in notes)


def test_kineto_105_infinity_for_an_empty_copy(tmp_path, make, clean):
    copy = make.kernel("Memcpy", 5, 1) | {"cat": "gpu_memcpy"}
    text = json.dumps({**HEAD, "traceEvents": [*clean, copy | {"args": {"memory bandwidth (GB/s)": 12345}}]})
    for word in ("inf", "Infinity", "nan"):
        (tmp_path / "t.json").write_text(text.replace("12345", word))
        report = check_trace(tmp_path / "t.json", "gb300-tp16")
        assert report.verdict == "pass"
        assert "1 numbers are NaN or infinite and were read as missing" in report.notes


@pytest.mark.parametrize("damage", [('"k05"', '"k05'), ('"k05"', '"k"05"'), ('"k05"', '"k\\x05"')])
def test_pytorch_33961_invalid_json_is_told_by_offset_and_text(tmp_path, make, clean, damage):
    text = json.dumps({**HEAD, "traceEvents": clean}).replace(*damage, 1)
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=r"not valid JSON at byte \d+: .* near \"") as caught:
        check_trace(tmp_path / "t.json", "gb300-tp16")
    offset = int(re.search(r"at byte (\d+)", str(caught.value))[1])
    assert abs(offset - text.index(damage[1])) < 40


def test_pytorch_130622_control_characters_are_forgiven_and_said(tmp_path, make, clean):
    text = json.dumps({**HEAD, "traceEvents": clean}).replace("k05", "k0\x01")
    (tmp_path / "t.json").write_text(text)
    report = check_trace(tmp_path / "t.json", "gb300-tp16")
    assert report.verdict == "pass"
    assert any(note.startswith("control characters inside strings (first at byte") for note in report.notes)


def test_pytorch_192021_kernels_lost_at_the_start(tmp_path, make):
    """The first step is dropped when it is short; a second short one forbids a pass."""
    events = make.pdl_events(steps=6, slow=None, bubble=None)
    lose = {10: 20, 11: 3}
    cut = []
    for event in events:
        group = event["args"]["correlation"]
        if event["cat"] == "kernel" and lose.get(group, 0):
            lose[group] -= 1
        else:
            cut.append(event)
    assert verdict(make, tmp_path / "t.json", cut).verdict == "inconclusive"
    first = [event for event in events if event["args"]["correlation"] != 10 or event in cut]
    report = verdict(make, tmp_path / "t.json", first)
    assert (report.verdict, report.devices[0].layers.counts.cut) == ("pass", 1)


def test_hta_317_edges_are_never_rounded_apart(tmp_path, make):
    events = [
        make.kernel(f"k{i}", f"{1790857026000000 + i}.{i % 10}99", f"0.{i % 7 + 1:03}", correlation=i)
        for i in range(99)
    ]
    kernels = read_trace(make.torch(tmp_path / "t.json", events)).kernels
    assert [kernel.duration for kernel in kernels] == [i % 7 + 1 for i in range(99)]
    assert [kernel.start for kernel in kernels] == [
        (1790857026000000 + i) * 1000 + i % 10 * 100 + 99 for i in range(99)
    ]


def test_hta_325_a_duration_of_centuries_is_rejected_by_name(tmp_path, make, clean):
    whole = verdict(make, tmp_path / "t.json", clean)
    broken = [*clean, make.kernel("corrupt", 1200.0, 7.4e15, correlation=999)]
    report = verdict(make, tmp_path / "u.json", broken)
    assert periods(report) == periods(whole)
    assert report.devices[0].layers.step_ns == whole.devices[0].layers.step_ns
    assert (whole.verdict, report.verdict) == ("pass", "inconclusive")
    assert any("corrupt" in note and "seven days" in note for note in report.notes)


def test_hta_59_kernels_without_their_launch_are_a_class_of_their_own(tmp_path, make, clean):
    alone = make.kernel("alone", 3.5, 2.0, correlation=4242)
    report = verdict(make, tmp_path / "t.json", [*clean, alone])
    assert report.devices[0].layers.counts.outside == 1
    assert any("1 kernels are in no step" in note for note in report.notes)
    assert periods(report) == LAYERS


def test_perfetto_6421_overlapping_kernels_all_count(tmp_path, make):
    events = make.pdl_events(steps=4, slow=None, bubble=None, overlap=4.0)
    report = inspect_trace(make.torch(tmp_path / "t.json", events))
    assert len(report.trace.kernels) == 4 * 4 * 13
    assert all(times.overlap > 0 for layer in report.devices[0].layers.layers for times in layer.times)


def test_rocm_1568_overlap_is_not_repaired(tmp_path, make):
    rows = [(10.0, 50.0), (12.0, 3.0), (12.5, 100.0), (40.0, 1.0)]
    events = [make.kernel(f"k{i}", start, length, correlation=i) for i, (start, length) in enumerate(rows)]
    kernels = read_trace(make.torch(tmp_path / "t.json", events)).kernels
    assert [(kernel.start, kernel.duration) for kernel in kernels] == [(int(s * 1000), int(d * 1000)) for s, d in rows]


def test_ascend_133_times_as_strings_are_exact(tmp_path, make):
    event = make.kernel("k", "1790857026000123.457", "2.048")
    (kernel,) = read_trace(make.torch(tmp_path / "t.json", [event])).kernels
    assert (kernel.start, kernel.duration) == (1790857026000123457, 2048)


def test_vllm_5132_worker_processes_without_kernels_get_the_hint(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    for index in range(4):
        file.add("PROCESSES", globalPid=PROCESS + (index << 24), pid=0x6F + index, name="python3")
    file.add("PROCESSES", globalPid=PROCESS + (9 << 24), pid=0x78, name="gcc")
    notes = inspect_trace(file.write()).notes
    assert any(
        "1 processes have kernels and 3 of the same name have none" in n and "fork-before-exec" in n for n in notes
    )
    file.rows = [(table, row) for table, row in file.rows if "KERNEL" not in table and "RUNTIME" not in table]
    with pytest.raises(TraceError, match=r"5 processes were seen: .*--trace-fork-before-exec=true"):
        check_trace(file.write(), "gb300-tp16")


def test_sglang_31545_replayed_kernels_are_bound_by_correlation(tmp_path, make, clean):
    """All kernels run long after the marks of their steps, in one burst."""
    launches = [event for event in clean if event["cat"] == "cuda_runtime"]
    for index, launch in enumerate(launches):
        launch["ts"] = 100.5 + 10 * index
        launch["dur"] = 2.0
        clean.append(make.host("user_annotation", f"step[DECODE bs=8] {index}", launch["ts"] - 2, 6.0))
    report = verdict(make, tmp_path / "t.json", clean)
    counts = report.devices[0].layers.counts
    assert (counts.source, counts.found, counts.requests) == ("graph launches under step marks", 3, 8)
    assert periods(report) == LAYERS


def test_tracelens_973_graphs_without_kernels_say_what_to_switch_on(tmp_path, make, clean):
    launches = [event for event in clean if event["cat"] == "cuda_runtime"]
    with pytest.raises(TraceError, match=r"3 of 3 graph launches have no kernels .* when the graphs are captured"):
        check_trace(make.torch(tmp_path / "t.json", launches), "gb300-tp16")


def test_tritonbench_468_a_capture_range_begins_for_plain_strings_too(tmp_path):
    words = nsys_command("nsys", tmp_path / "r.nsys-rep", ["python", "x.py"], "decode step", False)
    assert "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0" in words[: words.index("python")]


def test_colibri_431_host_time_is_never_added_to_device_time(tmp_path, make, clean):
    before = verdict(make, tmp_path / "t.json", clean)
    for index in range(200):
        call = make.host("cuda_runtime", "cudaEventSynchronize", 900.5 + index, 54_000.0, correlation=5_000 + index)
        clean.append(call | {"tid": index})
    after = verdict(make, tmp_path / "u.json", clean)
    assert periods(after) == periods(before)
    assert after.devices[0].layers.step_ns == before.devices[0].layers.step_ns


def test_lucebox_431_what_was_not_measured_is_not_zero(tmp_path, make, clean):
    path = make.torch(tmp_path / "t.json", clean)
    device = inspect_trace(path).to_json()["devices"][0]
    assert device["layers"][-1]["typical_step"]["start_period_ns"] is None
    assert (device["steps"]["requests"], device["steps"]["rows"]) == (None, None)
    file = make.nsys(tmp_path / "t.sqlite")
    file.add(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=6_400_001, deviceId=0, correlationId=1, globalPid=1, graphId=5
    )
    data = check_trace(file.write(), "gb300-tp16").to_json()
    assert (data["devices"], data["verdict"]) == ([], "inconclusive")


def test_jax_toolbox_patch_duplicate_range_ids_mean_nothing(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    before = inspect_trace(file.write()).devices[0].layers.layers
    file.tables = LATEST.tables
    for table, row in [*file.rows]:
        if table == "NVTX_EVENTS":
            row["rangeId"] = 1
            file.add(table, **row)
    assert inspect_trace(file.write()).devices[0].layers.layers == before


def test_kineto_fmtts_a_negative_time_in_two_parts(tmp_path, make, clean):
    text = json.dumps({**HEAD, "traceEvents": clean}).replace(str(clean[5]["ts"]), "-1.-500", 1)
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=r"at byte \d+: -1\.-500 is how kineto prints a negative time"):
        check_trace(tmp_path / "t.json", "gb300-tp16")


def test_a_synthetic_trace_passes_beside_all_of_these(tmp_path):
    assert check_trace(synthesize(tmp_path / "t.json"), "gb300-tp16").verdict == "pass"
