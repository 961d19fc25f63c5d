"""The torch.profiler reader: exact times, both eras, odd rows, odd files."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3lab.traces import TraceError, read_trace
from k3lab.traces.readers.stamps import BadStamp, microseconds_to_ns


@given(st.integers(min_value=-(10**19), max_value=10**19))
def test_three_decimals_convert_exactly(ns):
    sign, size = ("-" if ns < 0 else ""), abs(ns)
    text = f"{sign}{size // 1000}.{size % 1000:03d}"
    assert microseconds_to_ns(text) == ns
    assert microseconds_to_ns(Decimal(text)) == ns


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "no time"), (True, "not a number"), ("x", "not a number"), (Decimal("NaN"), "NaN"), ([], "not a number"),
     (Decimal("-Infinity"), "infinite"), (10**30, "range"), (Decimal("1e999999"), "range"), (1.5, "not a number")],
)  # fmt: skip
def test_bad_stamps_are_named(value, reason):
    with pytest.raises(BadStamp, match=reason):
        microseconds_to_ns(value)


def write(path, text):
    path.write_text(text)
    return path


EVENT = '{{"ph": "X", "cat": "kernel", "name": "{}", "pid": 0, "tid": 7, "ts": {}, "dur": {}, "args": {{}}}}'


@pytest.mark.parametrize("start", ["1790857026000123.457", "5109714030721.457", "1000.457", '"1790857026000123.457"'])
def test_both_time_eras_are_exact_to_the_nanosecond(tmp_path, start):
    """A float holds 1790857026000123.457 us only to a quarter of a microsecond."""
    rows = ",".join([EVENT.format("a", start, "2.048"), EVENT.format("b", start, "0.001")])
    trace = read_trace(write(tmp_path / "t.json", f"[{rows}]"))
    b, a = trace.kernels
    assert a.start == b.start == int(start.strip('"').replace(".", ""))
    assert (a.duration, b.duration) == (2048, 1)


def test_nan_and_infinity_are_counted_and_named(tmp_path):
    rows = [EVENT.format("a", 100.0, 10.0), EVENT.format("nan_ts", "NaN", 5.0), EVENT.format("inf", 130, "Infinity")]
    trace = read_trace(write(tmp_path / "t.json", f'{{"traceEvents": [{",".join(rows)}]}}'))
    assert [kernel.name for kernel in trace.kernels] == ["a"]
    assert {(row.name, row.reason) for row in trace.rejected} == {
        ("nan_ts", "start is NaN"), ("inf", "duration is infinite")}  # fmt: skip


def test_negative_zero_huge_and_missing_durations_are_rejected(tmp_path, make):
    events = [make.kernel("good", 100.0, 10.0), make.kernel("neg", 115.0, -3.0), make.kernel("zero", 120.0, 0.0),
              make.kernel("huge", 130.0, 7.4e15), make.kernel("none", 140.0, 1)]  # fmt: skip
    del events[-1]["dur"]
    trace = read_trace(make.torch(tmp_path / "t.json", events))
    assert [kernel.name for kernel in trace.kernels] == ["good"]
    assert [row.name for row in trace.rejected] == ["huge", "neg", "none", "zero"]
    assert {row.name: row.reason for row in trace.rejected}["huge"] == "duration over seven days"


def test_gzip_is_known_by_its_magic_and_reads_the_same(tmp_path, make):
    events = make.pdl_events()
    plain = read_trace(make.torch(tmp_path / "t.json", events))
    packed = tmp_path / "misnamed.json"
    packed.write_bytes(gzip.compress((tmp_path / "t.json").read_bytes()))
    assert read_trace(packed).kernels == plain.kernels
    assert len(plain.kernels) == 156


def test_annotations_on_the_gpu_and_copies_are_not_kernels(tmp_path, make):
    hull = make.kernel("step", 0, 100) | {"cat": "gpu_user_annotation"}
    copy = make.kernel("Memcpy HtoD", 0, 3) | {"cat": "gpu_memcpy"}
    trace = read_trace(make.torch(tmp_path / "t.json", [hull, copy, copy, make.kernel("k", 1, 2)]))
    assert len(trace.kernels) == 1
    assert trace.copies == {"memcpy": 2}


def test_rows_without_grid_and_graph_ids_are_read(tmp_path, make):
    trace = read_trace(make.torch(tmp_path / "t.json", [make.kernel("k", 1, 2, grid=None)]))
    assert (trace.kernels[0].grid, trace.kernels[0].node) == ((), None)


def test_facts_of_the_file_head(tmp_path, make):
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}], "distributedInfo": {"rank": 3, "world_size": 16}}
    trace = read_trace(make.torch(tmp_path / "t.json", [make.kernel("k", 1, 2)], **head))
    assert (trace.gpu(0), trace.rank, trace.world_size, trace.synthetic) == ("NVIDIA GB300", 3, 16, False)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"  \n", "not a trace"),
        (b"<html></html>", "web page"),
        (b'{"a": 1}', "traceEvents"),
        (b'{"traceEvents": 3}', "traceEvents"),
        (b'{"traceEvents": [{"name": "ab', "not valid JSON at byte 26"),
        (b"[" * 100_000, "nested too deep"),
        (b"[" + b"1" * 6000 + b"]", "too long"),
        (b"\x1f\x8b\x08\x00broken", "gzip"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "gzip"),
        (gzip.compress(b"", mtime=0), "empty"),
        (gzip.compress(bytes(257) + b"ustar" + bytes(300), mtime=0), "tar"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        (b"NVIDIA Tegra Profiler", "nsys export --type sqlite"),
        (b"Time (%),Total Time (ns),Instances\n", "nsys stats"),
        (b'"ID","Kernel Name","Metric Name"\n', "Nsight Compute"),
        (b"\x00\x01\x02", "not a trace"),
    ],
)
def test_files_that_are_no_trace_give_one_plain_line(tmp_path, data, says):
    path = tmp_path / "file.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    for path, reason in ((tmp_path / "none.json", "no such file"), (tmp_path, "a folder without Parquet tables")):
        with pytest.raises(TraceError, match=reason):
            read_trace(path)


def test_events_that_are_not_events_are_counted(tmp_path, make):
    trace = read_trace(make.torch(tmp_path / "t.json", [1, None, "x", make.kernel("k", 1, 2)]))
    assert len(trace.kernels) == 1
    assert any("3 entries" in note for note in trace.notes)


def test_control_characters_in_names_are_accepted_and_said(tmp_path):
    text = json.dumps({"traceEvents": [{"cat": "kernel", "name": "aQb", "ts": 1, "dur": 1}]}).replace("Q", "\t")
    trace = read_trace(write(tmp_path / "t.json", text))
    assert trace.kernels[0].name == "a\tb"
    assert any("control characters" in note for note in trace.notes)


def test_whole_microseconds_are_seen(tmp_path, make):
    whole = [make.kernel("a", 1, 3), make.kernel("b", 5, 7)]
    assert read_trace(make.torch(tmp_path / "t.json", whole)).resolution_ns == 1000
    assert read_trace(make.torch(tmp_path / "u.json", [*whole, make.kernel("c", 20.25, 3)])).resolution_ns == 250


def test_a_grid_of_an_impossible_size_is_no_grid(tmp_path, make):
    for size in ("1E999999999", "-9E+9999999", "1E-99999999"):
        path = make.torch(tmp_path / "t.json", [make.kernel("k", 1.0, 2.0, grid=(1, 1, 1))])
        path.write_text(path.read_text().replace('"grid": [1,', f'"grid": [{size},'))
        assert read_trace(path).kernels[0].grid == ()
