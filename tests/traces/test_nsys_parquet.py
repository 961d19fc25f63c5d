"""Folders of nsys export --type parquetdir: read by the same code as SQLite exports, and found equal to them."""

from __future__ import annotations

import sqlite3
import sys

import pytest
from damage import flipped, outcome
from k3lab.traces import TraceError, check_trace, read_trace

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def to_parquet(database, folder):
    """Every table of an SQLite file as a Parquet file, as nsys lays them out."""
    folder.mkdir()
    connection = sqlite3.connect(database)
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        cursor = connection.execute(f'SELECT * FROM "{table}"')
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchall()
        columns = {name: pa.array([row[index] for row in rows]) for index, name in enumerate(names)}
        parquet.write_table(pa.table(columns), folder / f"{table}.parquet")
    connection.close()
    return folder


@pytest.fixture
def both(tmp_path, make):
    """An export in both forms: kernels of graph nodes, registered strings, a missing one, a GPU, an environment."""
    file = make.node_mode(tmp_path / "t.sqlite", replays=7)
    file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
    file.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value="SECRET=hunter2")
    file.kernel("lonely", 90_000_000, 90_005_000, 7777)
    file.rows[-1][1]["demangledName"] = 5_000_000
    database = file.write()
    return database, to_parquet(database, tmp_path / "export")


def test_the_same_trace_as_from_sqlite(both):
    database, folder = both
    wanted, found = read_trace(database), read_trace(folder)
    for field in ("kernels", "apis", "ranges", "node_origins", "copies", "rejected", "gpus", "graph_mode",
                  "graph_replays", "tool", "notes", "incomplete"):  # fmt: skip
        assert getattr(found, field) == getattr(wanted, field), field
    assert found.format == "Nsight Systems parquetdir" and found.path == "export"
    assert found.kernels[-1].name == "<missing string 5000000>"
    assert "hunter2" not in repr(found)


def test_the_same_verdict_as_from_sqlite(both):
    database, folder = both
    reports = [check_trace(path, "gb300-tp16").to_json() for path in (database, folder)]
    assert reports[0]["verdict"] == reports[1]["verdict"]
    assert reports[0]["devices"] == reports[1]["devices"] and len(reports[0]["devices"][0]["layers"]) == 3


def test_optional_tables_and_columns(both):
    _, folder = both
    for table in ("NVTX_EVENTS", "CUDA_GRAPH_NODE_EVENTS", "META_DATA_CAPTURE", "CUPTI_ACTIVITY_KIND_RUNTIME"):
        (folder / f"{table}.parquet").unlink()
    path = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    table = parquet.read_table(path).drop_columns(["globalPid", "graphNodeId", "gridZ", "contextId"])
    parquet.write_table(table, path)
    trace = read_trace(folder)
    assert len(trace.kernels) == 274 and not trace.rejected
    assert {(kernel.process, kernel.node, kernel.grid) for kernel in trace.kernels} == {(0, None, ())}


def test_without_a_kernel_table_and_with_an_empty_one(both):
    _, folder = both
    path = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    parquet.write_table(parquet.read_table(path).slice(0, 0), path)
    with pytest.raises(TraceError, match="no kernel records"):
        check_trace(folder, "gb300-tp16")
    path.unlink()
    with pytest.raises(TraceError, match="no kernel records"):
        check_trace(folder, "gb300-tp16")


def test_strings_as_bytes_and_as_a_dictionary(both):
    database, folder = both
    path = folder / "StringIds.parquet"
    strings = parquet.read_table(path)
    for values in (strings["value"].cast(pa.binary()), strings["value"].dictionary_encode()):
        parquet.write_table(pa.table({"id": strings["id"], "value": values}), path)
        assert read_trace(folder).kernels == read_trace(database).kernels


def test_a_folder_of_other_tables(tmp_path):
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "report.parquet")
    with pytest.raises(TraceError, match="parquetdir, but not one of nsys export --type parquetdir"):
        read_trace(tmp_path)


def test_damaged_files_give_one_line_that_names_the_table(both):
    _, folder = both
    path = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    data = path.read_bytes()
    for size in (0, 3, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(TraceError, match=r"CUPTI_ACTIVITY_KIND_KERNEL.parquet is damaged") as caught:
            read_trace(folder)
        assert "\n" not in str(caught.value)


def test_flipped_bytes(both):
    _, folder = both
    path = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    data = path.read_bytes()
    seen = set()
    for broken in flipped(data, 11, 60):
        path.write_bytes(broken)
        seen.add(outcome(folder, read_trace))
    assert "refused" in seen and "several lines" not in seen


def test_huge_and_odd_numbers_are_rejected_rows(both):
    _, folder = both
    path = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    table = parquet.read_table(path)
    ends = table["end"].to_pylist()
    ends[0], ends[1], ends[2] = 2**62, None, -5
    parquet.write_table(table.set_column(table.schema.get_field_index("end"), "end", pa.array(ends)), path)
    reasons = sorted(row.reason for row in read_trace(folder).rejected)
    assert reasons == ["duration over seven days", "negative duration", "time is not a whole number of ns"]
    floats = pa.array([float(value) for value in table["start"].to_pylist()])
    parquet.write_table(table.set_column(table.schema.get_field_index("start"), "start", floats), path)
    trace = read_trace(folder)
    assert not trace.kernels and {row.reason for row in trace.rejected} == {"time is not a whole number of ns"}


def test_without_pyarrow_one_line_names_the_extra(both, monkeypatch):
    _, folder = both
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"pip install 'k3lab\[parquet\]'; or export with nsys export --type sqlite"):
        read_trace(folder)


def test_nothing_is_written_into_the_folder(both):
    _, folder = both
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    read_trace(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
