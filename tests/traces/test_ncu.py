"""Nsight Compute: both forms of its CSV, its reports, what was not measured, and that it is never layer time."""

from __future__ import annotations

import gzip
import json

import pytest
from damage import outcome
from k3lab.cli.main import run
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace
from k3lab.traces.readers.ncu_report import read_ncu_report
from k3lab.traces.readers.opening import read_ncu

LONG = ('"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
        '"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"')  # fmt: skip
GEMM, NORM = "void gemm<int, (bool)1>(float *, int)", "k3_moe_tail_triton_norm"


def row(launch, kernel, metric, unit, value, section="Command line profiler metrics", tail=","):
    return (f'"{launch}","17","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(148, 1, 1)","0","10.3","{section}",'
            f'"{metric}","{unit}","{value}"{tail}')  # fmt: skip


DETAILS = (
    row(0, GEMM, "dram__bytes_read.sum", "Mbyte", "2.33"),
    row(0, GEMM, "dram__bytes_write.sum", "byte", "0"),
    row(0, GEMM, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "19.66"),
    row(0, GEMM, "flop_count_hp.sum", "", "n/a"),
    row(0, GEMM, "Duration", "us", "6.75", "GPU Speed Of Light Throughput"),
    row(0, GEMM, "Memory Throughput", "%", "19.66", "GPU Speed Of Light Throughput"),
    row(0, GEMM, "Memory Throughput", "Gbyte/s", "1,345.14", "Memory Workload Analysis"),
    row(0, GEMM, "Registers Per Thread", "register/thread", "64", "Launch Statistics"),
    row(0, GEMM, "Static Shared Memory Per Block", "Kbyte/block", "4.1", "Launch Statistics"),
    row(0, GEMM, "Dynamic Shared Memory Per Block", "byte/block", "0", "Launch Statistics"),
    row(0, GEMM, "", "", "", "SpeedOfLight", ',"SOLBottleneck","OPT","This kernel, small as it is, does little"'),
    row(1, NORM, "gpu__time_duration.sum", "nsecond", "2,570"),
    row(1, NORM, "launch__registers_per_thread", "", ""),
    row(1, NORM, "dram__bytes_read.sum", "byte", "nan"),
)
SAID = '==PROF== Connected to process 17 (/usr/bin/python3)\n==PROF== Profiling "gemm" - 0: 0%....100% - 3 passes\nloss: 1, 2, 3\n'


def write(path, *lines, before=""):
    path.write_text(before + "\n".join(lines) + "\n")
    return path


def test_details_with_blank_values_and_ragged_rows(tmp_path):
    report = read_ncu(write(tmp_path / "t.csv", LONG, *DETAILS, before=SAID))
    gemm, norm = report.launches
    assert (gemm.launch, gemm.name, gemm.grid, gemm.block) == ("0", GEMM, "(148, 1, 1)", "(128, 1, 1)")
    assert (gemm.duration_ns, gemm.dram_read_bytes, gemm.dram_written_bytes, gemm.dram_bytes) == (
        6750,
        2330000,
        0,
        2330000,
    )
    assert (gemm.dram_percent, gemm.dram_bytes_per_s) == (19.66, 1_345_140_000_000)
    assert (gemm.registers, gemm.shared_static_bytes, gemm.shared_dynamic_bytes) == (64, 4100, 0)
    assert (norm.duration_ns, norm.registers, norm.dram_read_bytes, norm.dram_bytes) == (2570, None, None, None)
    assert not report.notes


def test_the_raw_page_with_units_in_a_row_of_their_own(tmp_path):
    header = ("ID,Process ID,Kernel Name,Block Size,Grid Size,device__attribute_display_name,gpu__time_duration.sum,"
              "dram__bytes.sum,dram__bytes.sum.per_second,launch__registers_per_thread,launch__shared_mem_per_block_dynamic")  # fmt: skip
    units = ",,,,,,ms,Mbyte,Tbyte/s,register/thread,Kbyte/block"
    rows = ('0,17,"void gemm<int, (bool)1>(float *, int)","(128, 1, 1)","(148, 1, 1)",NVIDIA GB300,0.25,1.5,6.1,158,5.12',
            '1,17,norm,"(64, 1, 1)","(8, 1, 1)",NVIDIA GB300,0.0032,,0.5,32')  # fmt: skip
    report = read_ncu(write(tmp_path / "t.csv", header, units, *rows))
    gemm, norm = report.launches
    assert (gemm.name, gemm.duration_ns, gemm.dram_bytes, gemm.registers) == (GEMM, 250_000, 1_500_000, 158)
    assert (gemm.dram_bytes_per_s, gemm.shared_dynamic_bytes) == (6_100_000_000_000, 5120)
    assert (norm.duration_ns, norm.dram_bytes, norm.registers, norm.shared_dynamic_bytes) == (3200, None, 32, None)
    assert report.gpus == ("NVIDIA GB300",)


def test_rows_without_an_id_and_ids_of_several_runs(tmp_path):
    header = "Kernel Name,gpu__time_duration.sum"
    report = read_ncu(write(tmp_path / "t.csv", header, ",us", "k,1", "k,2"))
    assert [item.duration_ns for item in report.launches] == [1000, 2000]
    twice = write(tmp_path / "t.csv", LONG, *DETAILS, SAID, LONG, row(0, NORM, "Duration", "us", "9"))
    assert [(item.name, item.duration_ns) for item in read_ncu(twice).launches] == [
        (GEMM, 6750),
        (NORM, 2570),
        (NORM, 9000),
    ]


def test_unknown_units_and_odd_numbers_are_not_measured(tmp_path):
    rows = (row(0, NORM, "Duration", "fortnight", "1"), row(0, NORM, "dram__bytes_read.sum", "byte", "1e99999999"),
            row(0, NORM, "dram__bytes_write.sum", "byte", "-1"), row(0, NORM, "Registers Per Thread", "", "9" * 300))  # fmt: skip
    report = read_ncu(write(tmp_path / "t.csv", LONG, *rows))
    (launch,) = report.launches
    assert launch.duration_ns is launch.dram_read_bytes is launch.dram_written_bytes is launch.registers is None
    assert report.notes == ("not used, the unit is not known: Duration in fortnight",)


def test_it_is_never_layer_time(tmp_path):
    table = write(tmp_path / "t.csv", LONG, *DETAILS)
    (tmp_path / "t.ncu-rep").write_bytes(b"NVR\x00" + bytes(100))
    for path in (table, tmp_path / "t.ncu-rep"):
        for judge in (lambda path=path: check_trace(path, "gb300-tp16"), lambda path=path: inspect_trace(path)):
            with pytest.raises(
                TraceError, match=r"kernels one by one: no layer time; see k3lab trace kernels FILE"
            ) as caught:
                judge()
            assert "\n" not in str(caught.value)


def test_encodings_and_truncation(tmp_path):
    path = write(tmp_path / "t.csv", LONG, *DETAILS)
    text = path.read_text()
    for data in (b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"), gzip.compress(text.encode())):
        path.write_bytes(data)
        assert len(read_ncu(path).launches) == 2
    for size in range(0, len(text), 53):
        path.write_text(text[:size])
        assert outcome(path, read_ncu) in ("refused", "read")


def test_a_table_without_launches_and_other_files(tmp_path, make):
    with pytest.raises(TraceError, match="without a kernel launch"):
        read_ncu(write(tmp_path / "t.csv", LONG))
    with pytest.raises(TraceError, match=r"a torch.profiler trace, not of Nsight Compute; see k3lab trace show"):
        read_ncu(make.torch(tmp_path / "t.json", make.pdl_events()))
    with pytest.raises(TraceError, match="make it with --csv"):
        read_trace(write(tmp_path / "t.txt", "==PROF== Disconnected", "  gemm (1, 1, 1)x(32, 1, 1), Context 1"))


FAKE = """
class Metric:
    def __init__(self, unit, value): self._unit, self._value = unit, value
    def unit(self): return self._unit
    def value(self): return self._value
    def has_value(self): return self._value is not None
class Action:
    NameBase_DEMANGLED = 1
    def __init__(self, name, **metrics): self._name, self._metrics = name, {k.replace("___", "."): v for k, v in metrics.items()}
    def name(self, base=0): return self._name + ("(int)" if base else "")
    def metric_names(self): return tuple(self._metrics)
    def metric_by_name(self, name): return Metric(*self._metrics[name]) if name in self._metrics else None
class Range:
    def num_actions(self): return 2
    def action_by_idx(self, index):
        if index: return Action("norm", gpu__time_duration___sum=("ns", None))
        return Action("gemm", gpu__time_duration___sum=("ns", 84480.0), launch__registers_per_thread=("register/thread", 16),
                      launch__grid_dim_x=("", 148.0), launch__grid_dim_y=("", 1.0), launch__grid_dim_z=("", 1.0),
                      device__attribute_display_name=("", "NVIDIA GB300"),
                      launch__shared_mem_per_block_static=("byte/block", 0.0), dram__bytes_read___sum=("byte", 3e6))
class Context:
    def __init__(self, count): self._count = count
    def num_ranges(self): return self._count
    def range_by_idx(self, index): return Range()
def load_report(path):
    data = open(path, "rb").read()
    if b"hang" in data:
        import time
        time.sleep(600)
    if b"crash" in data:
        import os
        os.abort()
    return Context(1 if b"good" in data else 0)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ncu_report that stands in for NVIDIA's, for the process that reads reports."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "ncu_report.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "ncu_report.py"


def report_file(tmp_path, word):
    path = tmp_path / "t.ncu-rep"
    path.write_bytes(b"NVR\x00" + word)
    return path


def test_a_report_through_the_package(tmp_path, package):
    report = read_ncu(report_file(tmp_path, b"good"))
    gemm, norm = report.launches
    assert (gemm.name, gemm.duration_ns, gemm.registers, gemm.grid) == ("gemm(int)", 84480, 16, "(148, 1, 1)")
    assert (gemm.shared_static_bytes, gemm.shared_dynamic_bytes, gemm.dram_read_bytes) == (0, None, 3_000_000)
    assert norm.duration_ns is None
    assert report.gpus == ("NVIDIA GB300",)


@pytest.mark.parametrize("word", [b"no ranges", b"crash"])
def test_a_report_without_ranges_or_that_crashes_the_package(tmp_path, package, word):
    with pytest.raises(TraceError, match="finds no kernel launch in it: damaged, or newer") as caught:
        read_ncu(report_file(tmp_path, word))
    assert "\n" not in str(caught.value)


def test_a_report_that_hangs_the_package(tmp_path, package):
    with pytest.raises(TraceError, match="took over 3 s"):
        read_ncu_report(report_file(tmp_path, b"hang"), seconds=3)


def test_without_the_package_one_line_names_the_extra(tmp_path, package):
    package.write_text("raise ImportError('not here')")
    with pytest.raises(TraceError, match=r"pip install 'k3lab\[ncu\]'; or give the output of ncu --import FILE --csv"):
        read_ncu(report_file(tmp_path, b"good"))


def test_garbage_in_the_real_package(tmp_path):
    pytest.importorskip("ncu_report")
    for word in (b"", bytes(range(256)) * 40):
        with pytest.raises(TraceError, match="finds no kernel launch"):
            read_ncu(report_file(tmp_path, word))


def test_the_command(tmp_path, capsys):
    path = write(tmp_path / "t.csv", LONG, *DETAILS)
    assert run(["trace", "kernels", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 launches" in out and "6.75" in out and "not measured" in out and "are no layer time" in out
    assert run(["trace", "kernels", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(item["family"], item["registers"], item["dram_written_bytes"]) for item in data["launches"]] == [
        (None, 64, 0), ("moe_tail", None, None)
    ]  # fmt: skip
    assert run(["trace", "check", str(path)]) == 2
    assert run(["trace", "kernels", str(tmp_path / "none.csv")]) == 2
