"""The Nsight Systems reader: tables and columns that come and go, graph modes, and what must never be read."""

from __future__ import annotations

import os
import sqlite3

import pytest
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace

SECRET = "TOKEN=hunter2-must-never-appear"


def test_node_mode_layers_come_from_capture_time_ranges(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    device = report.devices[0].layers
    assert device.method == "NVTX ranges at graph capture"
    assert [layer.name for layer in device.layers] == ["layer_0", "layer_1", "layer_2"]  # layer_1 by textId
    assert [layer.period for layer in device.layers] == [62_900, 62_400, 62_400]
    assert [layer.typical.total for layer in device.layers] == [68_900] * 3
    assert (report.trace.graph_mode, report.trace.tool) == ("node", "nsys 2026.2.1.210")
    assert report.verdict == "pass"


def test_a_sum_over_the_budget_does_not_fail_what_the_period_keeps(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite", step_ns=4900)
    for _, row in file.rows:
        if "demangledName" in row:
            row["end"] += 100
    layer = check_trace(file.write(), "gb300-tp16", gpu="GB300").devices[0].layers.layers[0]
    assert layer.typical.total == 70_200 > 69_000
    assert layer.period == 64_200
    assert check_trace(file.path, "gb300-tp16", gpu="GB300").verdict == "pass"


def test_clone_chains_are_followed_and_cycles_end(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    for _, row in file.rows:
        if row.get("originalGraphNodeId"):
            node, original = row["graphNodeId"], row["originalGraphNodeId"]
            row["originalGraphNodeId"] = node + 50_000
            file.node(2_000_000, node + 50_000, original=original)
            break
    file.node(3_000_000, 777, original=778)
    file.node(3_000_000, 778, original=777)
    file.kernel("cyclic", 60_000_000, 60_001_000, 901, node=777)
    trace = read_trace(file.write())
    assert len(trace.node_origins) == 39
    assert inspect_trace(file.path).devices[0].layers.method == "NVTX ranges at graph capture"


def test_row_order_means_nothing(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite", extra_in=1)
    first = check_trace(file.write(), "gb300-tp16", gpu="GB300").to_json()
    assert check_trace(file.write(rows=file.rows[::-1]), "gb300-tp16", gpu="GB300").to_json() == first
    assert first["verdict"] == "fail"
    assert any("split_k_reduce" in item["text"] for item in first["devices"][0]["findings"])


def test_a_shift_of_all_times_means_nothing(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    first = check_trace(file.write(), "gb300-tp16", gpu="GB300").to_json()
    for _, row in file.rows:
        for key in ("start", "end"):
            if key in row:
                row[key] += 2**50
    assert check_trace(file.write(), "gb300-tp16", gpu="GB300").to_json() == first


def test_graph_mode_abstains_with_the_command_that_helps(tmp_path, make):
    file = make.nsys(tmp_path / "t.sqlite")
    file.add("META_DATA_CAPTURE", name="PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE", value="Graph")
    for replay in range(5):
        file.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=10_000_000 * replay, end=10_000_000 * replay + 6_400_000,
                 deviceId=0, streamId=7, correlationId=replay, globalPid=1, graphId=5)  # fmt: skip
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert "--cuda-graph-trace=node" in report.reasons[0]
    assert "5 graph replays (median 6400.0 us)" in report.reasons[0]
    assert report.to_json()["devices"] == []


def test_replays_traced_as_a_whole_beside_kernels_forbid_a_pass(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1, end=2, deviceId=0, streamId=7, correlationId=1, globalPid=1,
             graphId=5)  # fmt: skip
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert any("traced as a whole" in reason for reason in report.reasons)


@pytest.mark.parametrize(("empty", "says"), [(True, "kernel table is empty"), (False, "no kernel table")])
def test_no_kernels_is_an_error_with_its_hint(tmp_path, make, empty, says):
    file = make.nsys(tmp_path / "t.sqlite")
    file.add("META_DATA_CAPTURE", name="CUDA_GRAPH_TRACE_OPTIONS:MODE", value="Graph")
    file.api("cudaMalloc_v3020", 5, 9, 1)
    if empty:
        file.empty_tables.add("CUPTI_ACTIVITY_KIND_KERNEL")
    with pytest.raises(TraceError, match=says):
        check_trace(file.write(), "gb300-tp16")


def test_lost_graph_kernels_get_the_recapture_command(tmp_path, make):
    file = make.nsys(tmp_path / "t.sqlite")
    file.api("cudaGraphLaunch_v10000", 5, 9, 1)
    with pytest.raises(TraceError, match="--cuda-graph-trace=node"):
        check_trace(file.write(), "gb300-tp16")


def test_optional_columns_may_be_missing(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.drop_columns = {"globalPid", "contextId", "graphNodeId", "gridX", "domainId", "shortName"}
    trace = read_trace(file.write())
    assert len(trace.kernels) == 78
    assert {kernel.grid for kernel in trace.kernels} == {()}
    assert len(trace.apis) == 2  # the launch is found although the kernels name no process
    assert len(inspect_trace(file.path).devices[0].layers.layers) == 3


def test_a_missing_string_does_not_drop_the_kernel(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    number = file.strings.pop("kern_03")
    trace = read_trace(file.write())
    assert len(trace.kernels) == 78
    assert f"<missing string {number}>" in {kernel.name for kernel in trace.kernels}


def test_correlations_are_per_process(tmp_path, make):
    """Two processes use the same correlation: a launch must not own the other's kernels."""
    file = make.nsys(tmp_path / "t.sqlite")
    one, two = 0x1000000_000000 | (0x6F << 24), 0x1000000_000000 | (0x70 << 24)
    file.api("cudaGraphLaunch_v10000", 10, 20, 5, thread=one | 0x6F)
    file.api("cudaLaunchKernel", 11, 21, 5, thread=two | 0x70)
    file.kernel("a", 100, 200, 5, process=one)
    file.kernel("b", 100, 200, 5, process=two, device=1)
    trace = read_trace(file.write())
    by_name = {kernel.name: trace.api(kernel) for kernel in trace.kernels}
    assert by_name["a"].is_graph_launch
    assert not by_name["b"].is_graph_launch


def test_marks_categories_domains_and_library_ranges_are_no_layers(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.range("layer_9", 1_000_000, None, kind=34)
    file.range("NCCL", 0, None, kind=75, domain=4)
    file.range("layer_77", 1_000_500, 1_020_000, domain=4)
    layers = inspect_trace(file.write()).devices[0].layers.layers
    assert [layer.number for layer in layers] == [0, 1, 2]


def test_bad_intervals_are_named_and_forbid_a_pass(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.kernel("backwards", 70_000_000, 69_000_000, 901)
    file.kernel("centuries", 70_000_000, 2**62, 901)
    file.kernel("text", "soon", 71_000_000, 901)
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert {row.name for row in report.trace.rejected} == {"backwards", "centuries", "text"}
    assert report.verdict == "inconclusive"


def test_the_environment_of_the_profiled_process_never_comes_out(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=SECRET)
    file.add("META_DATA_CAPTURE", name="CUDA_GRAPH_TRACE_OPTIONS:MODE", value=SECRET)
    file.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value=SECRET)
    file.add("META_DATA_EXPORT", name="EXPORT_USER", value=SECRET)
    file.add("DIAGNOSTIC_EVENT", severity=3, text=SECRET)
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert "hunter2" not in repr(report)
    assert "hunter2" not in str(report.to_json())
    assert any("DIAGNOSTIC_EVENT" in note for note in report.notes)


def test_nothing_is_written_beside_the_input(tmp_path, make):
    path = make.node_mode(tmp_path / "a b#?.sqlite").write()
    before = path.read_bytes()
    path.chmod(0o444)
    check_trace(path, "gb300-tp16")
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


def test_other_databases_and_damaged_ones_give_one_line(tmp_path, make):
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE t (a)")
    database.close()
    with pytest.raises(TraceError, match="not one of nsys export"):
        read_trace(other)
    good = make.node_mode(tmp_path / "t.sqlite").write().read_bytes()
    for size in (20, 100, 5000, len(good) // 2):
        cut = tmp_path / "cut.sqlite"
        cut.write_bytes(good[:size])
        with pytest.raises(TraceError, match="SQLite"):
            read_trace(cut)


def test_graphs_whose_kernels_are_missing_forbid_a_pass(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite", replays=8)
    file.api("cudaGraphLaunch_v10000", 80_000_000, 80_001_000, 5000)
    assert check_trace(file.write(), "gb300-tp16", gpu="GB300").verdict == "inconclusive"
    file = make.node_mode(tmp_path / "t.sqlite", replays=12)
    file.api("cudaGraphLaunch_v10000", 80_000_000, 80_001_000, 5000)  # one launch at the edge of the capture
    assert check_trace(file.write(), "gb300-tp16", gpu="GB300").verdict == "pass"


def test_rows_still_in_a_journal_are_no_pass(tmp_path, make):
    path = tmp_path / "t.sqlite"
    file = make.node_mode(path)
    file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
    file.write()
    assert check_trace(path, "gb300-tp16").verdict == "pass"
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA wal_autocheckpoint = 0")
    database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
    database.commit()
    before = {item.name: item.stat().st_mtime_ns for item in tmp_path.iterdir()}
    report = check_trace(path, "gb300-tp16")
    assert {item.name: item.stat().st_mtime_ns for item in tmp_path.iterdir()} == before
    database.close()
    assert report.verdict == "inconclusive"
    assert any("journal" in reason for reason in report.reasons)


def test_a_view_in_place_of_a_table_is_not_run(tmp_path, make):
    path = make.node_mode(tmp_path / "t.sqlite").write()
    database = sqlite3.connect(path)
    database.execute("DROP TABLE NVTX_EVENTS")
    # a view may compute for ever
    database.execute("CREATE VIEW NVTX_EVENTS AS SELECT 1 AS start, 2 AS end, 'layer 1' AS text")
    database.commit()
    database.close()
    assert read_trace(path).ranges == ()
