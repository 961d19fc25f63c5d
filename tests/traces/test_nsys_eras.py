"""Every release of Nsight Systems exports the same capture differently: the answer must be the same."""

from __future__ import annotations

import sqlite3

import pytest
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace
from nsys_eras import ERAS, LATEST

PROCESS = 0x1000000_000000 | (0x6F << 24)
RANGES = ("start", "end", "eventType", "globalTid", "textId", "domainId")


def in_era(make, path, era, mode="Node", **shape):
    """A node-mode capture as the release would export it: its tables, its columns, its metadata."""
    file = make.node_mode(path, **shape)
    facts = ("META_DATA_EXPORT", "META_DATA_CAPTURE")
    file.rows = [(table, row) for table, row in file.rows if table not in facts]
    file.tables = era.tables
    if era.export_table:
        file.add(era.export_table, name="EXPORT_PRODUCT_VERSION", value=era.nsys)
        file.add(era.export_table, name="EXPORT_SCHEMA_VERSION", value=era.schema)
    if era.capture_table:
        file.add(era.capture_table, name=f"{era.mode_prefix}CUDA_GRAPH_TRACE_OPTIONS:MODE", value=mode)
    return file


@pytest.fixture(scope="module")
def answer(tmp_path_factory, make):
    path = tmp_path_factory.mktemp("first") / "t.sqlite"
    return [layer.times for layer in inspect_trace(make.node_mode(path).write()).devices[0].layers.layers]


@pytest.mark.parametrize("era", ERAS, ids=lambda era: era.nsys)
def test_every_release_gives_the_same_layers(tmp_path, make, answer, era):
    report = inspect_trace(in_era(make, tmp_path / "t.sqlite", era).write())
    device = report.devices[0].layers
    assert device.method == "NVTX ranges at graph capture"
    assert [layer.times for layer in device.layers] == answer
    assert report.trace.tool == (f"nsys {era.nsys}" if era.schema else None)
    assert report.trace.graph_mode == "node"
    assert not report.trace.incomplete
    assert not any("schema" in note for note in report.notes)


@pytest.mark.parametrize("era", [era for era in ERAS if era.capture_table], ids=lambda era: era.nsys)
def test_the_mode_is_read_where_the_release_writes_it(tmp_path, make, era):
    file = in_era(make, tmp_path / "t.sqlite", era, mode="Graph", replays=0)
    with pytest.raises(TraceError, match="add --cuda-graph-trace=node"):
        check_trace(file.write(), "gb300-tp16")


def test_the_oldest_without_a_kernel_table_says_so(tmp_path, make):
    file = in_era(make, tmp_path / "t.sqlite", ERAS[0], replays=0)
    with pytest.raises(TraceError, match="no kernel table: trace CUDA"):
        check_trace(file.write(), "gb300-tp16")


def test_another_major_schema_is_read_and_warned_of(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    for _, row in file.rows:
        if row.get("name") == "EXPORT_SCHEMA_VERSION":
            row["value"] = "4.0.1"
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert report.verdict == "pass"
    assert any("schema 4.0.1" in note for note in report.notes)


def test_names_come_from_whichever_name_column_there_is(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.drop_columns = {"demangledName"}
    assert {kernel.name for kernel in read_trace(file.write()).kernels} == {f"kern_{i:02}" for i in range(13)}
    file.drop_columns = {"demangledName", "shortName"}
    assert {kernel.name for kernel in read_trace(file.write()).kernels} == {"<unnamed>"}


def test_text_forms_and_registered_strings_of_ranges(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    for kind in (59, 60, 70, 71):
        file.range(f"text {kind}", 10, 20, kind=kind)
        file.range(f"registered {kind}", 10, 20, kind=kind, registered=True)
    for kind in (33, 34, 39, 75, 76, 97):
        file.range(f"none {kind}", 10, 20, kind=kind)
    file.range("open", 10, None)
    names = {item.name for item in read_trace(file.write()).ranges if item.start == 10}
    assert names == {f"{word} {kind}" for word in ("text", "registered") for kind in (59, 60, 70, 71)}


def test_a_range_that_another_thread_ends_holds_for_both(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite", replays=0)
    file.tables = LATEST.tables
    other = PROCESS | 0x70
    file.range("decode step 1", 100, 10_000, kind=60)
    file.rows[-1][1]["endGlobalTid"] = other
    for thread, correlation in ((PROCESS | 0x6F, 1), (other, 2), (PROCESS | 0x71, 3)):
        file.api("cudaLaunchKernel_v7000", 200 * correlation, 200 * correlation + 50, correlation, thread=thread)
        file.kernel(f"k{correlation}", 2_000 * correlation, 2_000 * correlation + 900, correlation)
    counts = inspect_trace(file.write()).devices[0].layers.counts
    assert (counts.source, counts.found, counts.outside) == ("step marks", 1, 1)


@pytest.mark.parametrize("domain", ["NCCL", "CCCL", "cuBLAS"])
def test_ranges_of_libraries_are_left_out_in_their_process_only(tmp_path, make, domain):
    file = make.node_mode(tmp_path / "t.sqlite")
    elsewhere = (PROCESS + (1 << 24)) | 0x70
    file.range(domain, 1, None, kind=75, domain=9, registered=True)
    file.range("layer_5", 30, 40, domain=9)
    file.range("layer_6", 30, 40, domain=9, thread=elsewhere)
    assert [item.name for item in read_trace(file.write()).ranges if item.start == 30] == ["layer_6"]


def test_nodes_are_followed_in_their_own_process(tmp_path, make):
    """Two processes number their nodes alike; a chain must not cross over."""
    file = make.nsys(tmp_path / "t.sqlite")
    other = PROCESS + (1 << 24)
    for process, created in ((PROCESS, 1_000), (other, 2_000)):
        file.node(created, 5, thread=process | 1)
        file.node(created + 100, 6, original=5, thread=process | 1)
        file.kernel("k", 50_000, 51_000, 1, node=6, process=process)
    file.node(9_000, 7, original=8, thread=other | 1)
    file.node(9_000, 8, original=7, thread=other | 1)
    file.kernel("k", 60_000, 61_000, 2, node=7, process=other)
    origins = read_trace(file.write()).node_origins
    assert {key: origin.created for key, origin in origins.items()} == {(PROCESS, 6): 1_000, (other, 6): 2_000}


def test_replays_without_times_and_from_the_host(tmp_path, make):
    file = make.nsys(tmp_path / "t.sqlite")
    row = {"deviceId": 0x7FFFFFFF, "streamId": 7, "correlationId": 1, "globalPid": PROCESS, "graphId": 5}
    file.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=0, end=0, **row)
    with pytest.raises(TraceError, match="--cuda-graph-trace=node"):
        check_trace(file.write(), "gb300-tp16")
    file.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1_000, end=6_000, **row)
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert report.trace.graph_replays == ((1_000, 6_000),)
    assert any("2 graph replays began on the host" in note for note in report.notes)
    assert any("1 graph replays" in line and "without times" in line for line in report.trace.incomplete)


@pytest.mark.parametrize(
    ("severity", "text", "verdict"),
    [(3, "Events were dropped because buffers ran out of space", "inconclusive"), (2, "Clock is not stable", "pass"),
     (1, "Some events were lost", "pass"), (None, "lost", "pass")],
)  # fmt: skip
def test_warnings_of_nsys_on_lost_events_forbid_a_pass(tmp_path, make, severity, text, verdict):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.add("DIAGNOSTIC_EVENT", severity=severity, text=text)
    report = check_trace(file.write(), "gb300-tp16", gpu="GB300")
    assert report.verdict == verdict
    assert any("DIAGNOSTIC_EVENT" in note for note in report.notes) == (severity in (2, 3))


def test_copies_waits_and_the_profilers_own_work(tmp_path, make):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.tables = LATEST.tables
    place = {"deviceId": 1, "contextId": 1, "streamId": 13, "correlationId": 3, "globalPid": PROCESS}
    file.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=40, end=60, **place)
    file.add("CUPTI_ACTIVITY_KIND_MEMSET", start=20, end=30, **place)
    file.add("CUPTI_ACTIVITY_KIND_MEMSET", start=30, end=20, **place)
    file.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=5, end=9, **place)
    file.add("CUPTI_ACTIVITY_KIND_OVERHEAD", start=70, end=80)
    file.add("PROFILER_OVERHEAD", start=50, end=55)
    file.add("PROFILER_OVERHEAD", start=50, end=None)
    trace = read_trace(file.write())
    assert trace.copies == {"memcpy": 1, "memset": 2}
    assert [tuple(item) for item in trace.copy_times] == [
        ("sync", 5, 9, 1, 13, PROCESS), ("memset", 20, 30, 1, 13, PROCESS), ("memcpy", 40, 60, 1, 13, PROCESS)]  # fmt: skip
    assert trace.overheads == ((50, 55), (70, 80))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("NORMALIZE", "true", "normalised"), ("NORMALIZE", "false", None), ("SHIFT", "-500", "shifted by -500 ns"),
     ("SHIFT", "0", None), ("SHIFT", "SECRET=1", None)],
)  # fmt: skip
@pytest.mark.parametrize("table", ["META_DATA_EXPORT", "EXPORT_META_DATA"])
def test_moved_clocks_are_told(tmp_path, make, table, name, value, says):
    file = make.node_mode(tmp_path / "t.sqlite")
    file.tables = LATEST.tables | {"EXPORT_META_DATA": "name, value"}
    file.add(table, name=f"EXPORT_PARAM_TIME_{name}", value=value)
    notes = [note for note in inspect_trace(file.write()).notes if "export changed its times" in note]
    assert bool(notes) == bool(says)
    assert says is None or says in notes[0]


def test_cells_of_another_type_and_text_that_is_no_utf8(tmp_path, make):
    path = make.node_mode(tmp_path / "t.sqlite").write()
    database = sqlite3.connect(path)
    database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = 7.0, gridX = 'x' WHERE graphNodeId % 2 = 0")
    database.execute("UPDATE StringIds SET value = CAST(x'6bff' AS TEXT) WHERE value = 'kern_02'")
    database.commit()
    database.close()
    kernels = read_trace(path).kernels
    assert {kernel.stream for kernel in kernels} == {7}
    assert {kernel.grid for kernel in kernels} == {(148, 1, 1), ()}
    assert "k\ufffd" in {kernel.name for kernel in kernels}
