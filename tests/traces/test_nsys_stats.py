"""CSV reports of ``nsys stats``: headers of every era, units, what is printed around them, damage."""

from __future__ import annotations

import gzip
from decimal import Decimal

import pytest
from damage import outcome
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace

NOW = ("Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
       "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name")  # fmt: skip
OLD = NOW.replace("MB/s", "MBps").replace("GreenCtx,", "")
KERN_SUM = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name"
API_SUM = KERN_SUM.replace("Instances", "Num Calls")
PROJECTED = ("Name,Projected Start (ns),Projected Duration (ns),Orig Start (ns),Orig Duration (ns),Style,PID,TID,"
             "NumGPUOps,Lvl,NumChild,RangeId,ParentId,RangeStack")  # fmt: skip
PREAMBLE = """
NOTICE: Existing SQLite export found: x.sqlite
        It is assumed file was previously exported from: x.nsys-rep
        Consider using --force-export=true if needed.

Processing [x.sqlite] with [/opt/reports/cuda_gpu_trace.py]...

 ** CUDA GPU Trace (cuda_gpu_trace):

"""
GEMM = '1000,400,1,148,1,1,128,1,1,64,0.000,0.101,,,,,NVIDIA GB300 (0),1,,7,"void gemm<int, (bool)1>(float *, int)"'
NORM = "1350,400,2,148,1,1,128,1,1,64,0.000,0.101,,,,,NVIDIA GB300 (0),1,,7,norm"
COPY = "1800,90,3,,,,,,,,,,4.194,6337.593,Pinned,Device,NVIDIA GB300 (0),1,,7,[CUDA memcpy Host-to-Device]"
FILL = "1900,9,4,,,,,,,,,,0.001,6.5,,Device,NVIDIA GB300 (0),1,,7,[CUDA memset]"


def write(path, *lines, before=""):
    path.write_text(before + "\n".join(lines) + "\n")
    return path


def test_a_gpu_trace_among_what_the_tool_prints(tmp_path):
    trace = read_trace(write(tmp_path / "t.csv", NOW, GEMM, NORM, COPY, FILL, before=PREAMBLE))
    assert [(kernel.name, kernel.start, kernel.end, kernel.correlation) for kernel in trace.kernels] == [
        ("void gemm<int, (bool)1>(float *, int)", 1000, 1400, 1), ("norm", 1350, 1750, 2)
    ]  # fmt: skip
    first = trace.kernels[0]
    assert (first.grid, first.block, first.stream, first.device) == ((148, 1, 1), (128, 1, 1), 7, 0)
    assert trace.copies == {"memcpy": 1, "memset": 1}
    assert [(item.kind, item.start, item.end) for item in trace.copy_times] == [
        ("memcpy", 1800, 1890), ("memset", 1900, 1909)
    ]  # fmt: skip
    assert trace.gpus == {0: "NVIDIA GB300"}
    assert not trace.rejected and not trace.incomplete


def test_an_older_header_and_another_order_of_columns(tmp_path):
    old = read_trace(write(tmp_path / "old.csv", OLD, GEMM.replace("1,,7,", "1,7,"), NORM.replace("1,,7,", "1,7,")))
    turned = "Name,Strm,Device,Duration (ns),Start (ns),CorrId"
    rows = (
        '"void gemm<int, (bool)1>(float *, int)",7,NVIDIA GB300 (0),400,1000,1',
        "norm,7,NVIDIA GB300 (0),400,1350,2",
    )
    other = read_trace(write(tmp_path / "turned.csv", turned, *rows))
    for found, wanted in zip(other.kernels, old.kernels, strict=True):
        assert found == wanted._replace(grid=(), block=())
    assert other.gpus == old.gpus == {0: "NVIDIA GB300"}


@pytest.mark.parametrize("unit", ["ns", "us", "ms", "s"])
def test_units_are_those_of_the_header_and_exact(tmp_path, make, unit):
    events = [make.kernel("a", "7.001", "5.002", correlation=1), make.kernel("b", "12.5", "4.999", correlation=2)]
    trace = read_trace(make.gpu_trace(tmp_path / "t.csv", events, unit=unit))
    assert [(kernel.start, kernel.end) for kernel in trace.kernels] == [(7001, 12003), (12500, 17499)]


def test_edges_below_a_nanosecond_are_rounded_alike(tmp_path):
    header, row = "Start (us),Duration (us),CorrId,Strm,Name", "1.0004,0.0004,1,7,a"
    kernel = read_trace(write(tmp_path / "t.csv", header, row)).kernels[0]
    assert (kernel.start, kernel.end) == (1000, 1001)


def test_an_unknown_unit_is_refused_by_name(tmp_path):
    for unit in ("min", "", "h"):
        path = write(
            tmp_path / "t.csv", NOW.replace("Duration (ns)", f"Duration ({unit})" if unit else "Duration"), GEMM
        )
        with pytest.raises(TraceError, match=r"unit of column 'Duration.*' is not known.*--timeunit ns"):
            read_trace(path)


def test_thousands_separators_and_tabs(tmp_path):
    row = '"12,345,678","1,000","1,024","1,480",1,1,128,1,1,64,0,0,,,,,NVIDIA GB300 (0),1,,7,a'
    kernel = read_trace(write(tmp_path / "t.csv", NOW, row)).kernels[0]
    assert (kernel.start, kernel.duration, kernel.correlation, kernel.grid) == (12345678, 1000, 1024, (1480, 1, 1))
    tabs = read_trace(write(tmp_path / "t.tsv", NOW.replace(",", "\t"), NORM.replace(",", "\t")))
    assert [kernel.name for kernel in tabs.kernels] == ["norm"]
    half = NORM.replace("1350", '"1350,5"')
    assert "not a number" in read_trace(write(tmp_path / "t.csv", NOW, GEMM, half)).rejected[0].reason


def test_the_same_kernels_get_the_same_verdict_as_in_json(tmp_path, make):
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
    for slow, verdict in ((None, "pass"), ((2, 9, 12.0), "fail")):
        events = make.pdl_events(slow=slow)
        table = check_trace(make.gpu_trace(tmp_path / "t.csv", events), "gb300-tp16")
        whole = check_trace(make.torch(tmp_path / "t.json", events, **head), "gb300-tp16")
        assert table.verdict == whole.verdict == verdict
        periods = [[layer.period for layer in report.devices[0].layers.layers] for report in (table, whole)]
        assert periods[0] == periods[1] and len(periods[0]) == 4
    assert any("no processes, graph nodes and NVTX" in note for note in table.notes)


def test_rows_in_any_order_far_from_zero_and_packed_say_the_same(tmp_path, make):
    events = [event for event in make.pdl_events() if event["cat"] == "kernel"]
    path = make.gpu_trace(tmp_path / "t.csv", events)
    wanted = inspect_trace(path).devices[0].layers
    far = [event | {"ts": Decimal(str(event["ts"])) + Decimal(2**50) / 1000} for event in reversed(events)]
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(make.gpu_trace(tmp_path / "far.csv", far, eol="\r\n").read_bytes()))
    found = inspect_trace(packed).devices[0].layers
    assert [layer.period for layer in found.layers] == [layer.period for layer in wanted.layers]
    assert [layer.kernels for layer in found.layers] == [layer.kernels for layer in wanted.layers]


def test_without_correlation_groups_nothing_marks_the_steps(tmp_path, make):
    events = [event for event in make.pdl_events(slow=None) if event["cat"] == "kernel"]
    alone = [event | {"args": event["args"] | {"correlation": 100 + index}} for index, event in enumerate(events)]
    report = check_trace(make.gpu_trace(tmp_path / "t.csv", alone), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert any(
        "no two kernels share a correlation" in note and "--cuda-graph-trace=node" in note for note in report.notes
    )


def test_two_devices_and_devices_without_a_number(tmp_path):
    rows = (GEMM, NORM.replace("(0)", "(3)"))
    trace = read_trace(write(tmp_path / "t.csv", NOW, *rows))
    assert [kernel.device for kernel in trace.kernels] == [0, 3]
    plain = [row.replace("NVIDIA GB300 (0)", "GPU") for row in rows]
    assert read_trace(write(tmp_path / "t.csv", NOW, plain[0])).gpus == {0: "GPU"}
    unnamed = read_trace(write(tmp_path / "t.csv", NOW, GEMM.replace("NVIDIA GB300 (0)", "")))
    assert unnamed.gpus == {} and len(unnamed.kernels) == 1


def test_several_reports_after_each_other(tmp_path):
    text = "\n".join([NOW, GEMM, NORM, "", "Processing [x.sqlite] with [cuda_gpu_kern_sum.py]...", "", KERN_SUM,
                      '90.0,800,2,400.0,400.0,400,400,0.0,"void gemm<int>(float *)"'])  # fmt: skip
    trace = read_trace(write(tmp_path / "t.csv", text, before=PREAMBLE))
    assert len(trace.kernels) == 2 and not trace.rejected
    assert any("cuda_gpu_kern_sum" in note for note in trace.notes)
    with pytest.raises(TraceError, match="several cuda_gpu_trace reports"):
        read_trace(write(tmp_path / "t.csv", text, "", NOW, GEMM))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1000,-5,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "negative duration"),
        ("1000,0,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "zero duration"),
        ("1000,7400000000000000000,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "over seven days"),
        ("1e999999999,5,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "out of range"),
        (f"{'9' * 100},5,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "out of range"),
        ("nan,5,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "NaN"),
        ("1000,inf,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "infinite"),
        (",5,1,148,1,1,128,1,1,64,0,0,,,,,G (0),1,,7,bad", "no start"),
        ("1000,4", "2 cells, the header has 21"),
        ('1000,400,1,148,1,1,128,1,1,64,0.000,0.101,,,,,G (0),1,,7,"bad', "cut off inside quotes"),
    ],
)
def test_unusable_rows_are_counted_and_keep_a_trace_from_passing(tmp_path, make, row, reason):
    path = make.gpu_trace(tmp_path / "t.csv", make.pdl_events(slow=None))
    assert check_trace(path, "gb300-tp16").verdict == "pass"
    with path.open("a") as file:
        file.write(row)
    report = check_trace(path, "gb300-tp16")
    assert report.verdict == "inconclusive"
    (found,) = report.trace.rejected
    assert reason in found.reason


def test_a_quote_that_swallows_rows_is_damage(tmp_path, make):
    path = make.gpu_trace(tmp_path / "t.csv", make.pdl_events(slow=None))
    path.write_text(path.read_text().replace('"k05"', '"k05', 1))
    report = check_trace(path, "gb300-tp16")
    assert report.verdict == "inconclusive" and report.trace.rejected


def test_graph_rows_are_replays_traced_as_a_whole(tmp_path):
    rows = [f"{start},6400000,{start},,,,,,,,,,,,,,NVIDIA GB300 (0),1,,7,[CUDA Graph 4]" for start in (1000, 8_000_000)]
    report = check_trace(write(tmp_path / "t.csv", NOW, *rows), "gb300-tp16")
    assert report.verdict == "inconclusive" and "--cuda-graph-trace=node" in report.reasons[0]


def test_a_table_without_kernels_is_not_a_healthy_one(tmp_path):
    for rows in ((), (COPY,)):
        with pytest.raises(TraceError, match=r"no kernel records; .*--cuda-graph-trace=node"):
            check_trace(write(tmp_path / "t.csv", NOW, *rows), "gb300-tp16")


def test_projected_ranges_cannot_be_judged_and_say_what_they_show(tmp_path):
    root = ",0,99000000,0,1,PushPop,1,2,500,0,2,1,,:1"
    rows = (
        root,
        ":layer_0,1000,61000,10,20,PushPop,1,2,13,1,0,2,1,:1:2",
        ":layer_1,62000,72500,30,20,PushPop,1,2,13,1,0,3,1,:1:3",
    )
    path = write(tmp_path / "t.csv", PROJECTED, *rows)
    assert read_trace(path).kernels == ()
    for judge in (lambda: check_trace(path, "gb300-tp16"), lambda: inspect_trace(path)):
        with pytest.raises(
            TraceError, match=r"no layer can be judged \(2 ranges, the longest layer_1 with 72.5 us\)"
        ) as caught:
            judge()
        assert "nsys export --type sqlite" in str(caught.value) and "\n" not in str(caught.value)


def test_a_kernel_summary_has_no_layers(tmp_path):
    path = write(tmp_path / "t.csv", KERN_SUM, "90.0,800,2,400.0,400.0,400,400,0.0,k")
    with pytest.raises(TraceError, match=r"neither order nor times.*k3lab trace calls FILE --steps N --layers M"):
        check_trace(path, "gb300-tp16")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (API_SUM, "cuda_api_sum"),
        ("Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name", "cuda_api_trace"),
        ("API Start (ns),API Dur (ns),Queue Start (ns),Queue Dur (ns),Kernel Start (ns),Kernel Dur (ns),Total Dur (ns),"
         "PID,TID,DevId,API Function,GridXYZ,BlockXYZ,Kernel Name", "cuda_kern_exec_trace"),
        ("Time (%),Total Time (ns),Count,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Operation", "copies"),
        ("Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range", "NVTX"),
        ("Start (ns),Duration (ns),Colour,Taste", "unknown report with columns Start .ns., Duration .ns., Colour, Taste"),
    ],
)  # fmt: skip
def test_other_reports_are_refused_by_name(tmp_path, header, says):
    path = write(tmp_path / "t.csv", header, ",".join("1" * len(header.split(","))))
    with pytest.raises(TraceError, match=f"{says}.*shows no kernels in order"):
        read_trace(path)


def test_a_table_for_people_is_told_from_csv(tmp_path):
    text = " Start (ns)  Duration (ns)  CorrId  Name\n ----------  -------------  ------  ----\n      1,000            400       1  norm\n"
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(TraceError, match="text table of nsys stats; make it with --format csv"):
        read_trace(tmp_path / "t.txt")


def test_encodings(tmp_path, make):
    path = make.gpu_trace(tmp_path / "t.csv", make.pdl_events(slow=None), before=PREAMBLE)
    text = path.read_text()
    for data in (b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"), b"\xfe\xff" + text.encode("utf-16-be")):
        path.write_bytes(data)
        assert check_trace(path, "gb300-tp16").verdict == "pass"
    path.write_bytes(text.replace("k03", "k\xe9").encode("latin-1"))
    assert any("\ufffd" in kernel.name for kernel in read_trace(path).kernels)


def test_truncation_never_passes_what_fails(tmp_path, make):
    data = make.gpu_trace(tmp_path / "t.csv", make.pdl_events()).read_bytes()
    path = tmp_path / "cut.csv"
    seen = set()
    for size in range(0, len(data), 397):
        path.write_bytes(data[:size])
        seen.add(outcome(path))
    assert seen == {"refused", "inconclusive", "fail"}
