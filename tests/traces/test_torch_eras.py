"""Chrome traces of every era of the torch profiler, and the ways in which they are not JSON."""

from __future__ import annotations

import json

import pytest
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace

ROW = '{{"ph": "X", "cat": "{cat}", "name": "k", "pid": 0, "tid": 7, "ts": {ts}, "dur": {dur}, "args": {args}}}'


def row(ts="1000.5", dur="2.25", cat="kernel", args="{}"):
    return ROW.format(ts=ts, dur=dur, cat=cat, args=args)


def read(tmp_path, text, name="t.json"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path)


@pytest.mark.parametrize(
    ("ts", "dur", "start", "duration"),
    [("1712867402348628", "4", 1712867402348628000, 4000), ('"1712867402348628.123"', '"0.007"', 1712867402348628123, 7),
     ("5109714026836.849", "3.450", 5109714026836849, 3450), ("1.712867402348628123e15", "4.5E-1", 1712867402348628123, 450),
     ("-1.500", "2", -1500, 2000), ("10.5", "1", 10500, 1000), ("10.1234", "1.0005", 10123, 1000)],
)  # fmt: skip
def test_times_of_every_era_are_exact(tmp_path, ts, dur, start, duration):
    (kernel,) = read(tmp_path, f"[{row(ts, dur)}]").kernels
    assert (kernel.start, kernel.duration) == (start, duration)


@pytest.mark.parametrize("cat", ["kernel", "Kernel"])
def test_both_spellings_of_the_category(tmp_path, cat):
    assert len(read(tmp_path, f"[{row(cat=cat)}]").kernels) == 1


@pytest.mark.parametrize("cat", ["gpu_user_annotation", "ac2g", "Trace", "python_function", "cuda_profiler_range"])
def test_other_rows_on_the_gpu_are_no_kernels(tmp_path, cat):
    assert read(tmp_path, f"[{row(cat=cat)}, {row()}]").kernels[0].start == 1000500
    assert len(read(tmp_path, f"[{row(cat=cat)}, {row()}]").kernels) == 1


@pytest.mark.parametrize(
    ("args", "node"),
    [('{"graph id": 0, "graph node id": 0}', None), ('{"graph id": 3, "graph node id": 9}', 9),
     ('{"graph node id": 9, "source graph node id": 4}', 4), ('{"graph node id": 9, "source_graph_node_id": 4}', 4),
     ('{"graph node id": 9, "source_graph_node_id": 0}', 9), ('{"kind": "Dispatch Kernel"}', None),
     ('{"graph node id": "9"}', 9), ('{"graph node id": 9.5}', None)],
)  # fmt: skip
def test_graph_nodes(tmp_path, args, node):
    assert read(tmp_path, f"[{row(args=args)}]").kernels[0].node == node


def test_rocm_graphs_without_grid_are_bound_by_correlation(tmp_path, make):
    events = make.pdl_events(slow=None)
    for event in events:
        if event["cat"] == "kernel":
            event["args"] = {key: event["args"][key] for key in ("device", "stream", "correlation")}
        else:
            event["name"] = "hipGraphLaunch"
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert (device.counts.source, len(device.layers)) == ("graph launches", 4)


def test_copies_waits_and_overhead(tmp_path):
    args = '{"device": 2, "stream": 9}'
    rows = [row(cat="gpu_memcpy", args=args), row(ts="5", cat="gpu_memset", args=args), row(ts="3", cat="cuda_sync",
            args='{"device": 2, "stream": -1}'), row(ts="1", dur="1", cat="overhead"), row()]  # fmt: skip
    trace = read(tmp_path, f"[{','.join(rows)}]")
    assert [tuple(item)[:5] for item in trace.copy_times] == [
        ("sync", 3000, 5250, 2, None), ("memset", 5000, 7250, 2, 9), ("memcpy", 1000500, 1002750, 2, 9)]  # fmt: skip
    assert (trace.copies, trace.overheads) == ({"memcpy": 1, "memset": 1}, ((1000, 2000),))


@pytest.mark.parametrize(
    ("head", "says", "warns"),
    [({"cupti_version": 130001, "cuda_runtime_version": 13000, "cuda_driver_version": 13000},
      "CUPTI 130001, CUDA runtime 13000, CUDA driver 13000", True), ({"cupti_version": 28}, "CUPTI 28", True),
     ({"cupti_version": 130101}, "CUPTI 130101", False), ({"cuda_driver_version": 13000}, "CUDA driver 13000", False)],
)  # fmt: skip
def test_versions_are_shown_and_warned_of_where_graphs_are(tmp_path, make, head, says, warns):
    notes = read_trace(make.torch(tmp_path / "t.json", make.pdl_events(), **head)).notes
    assert f"recorded with {says}" in notes
    assert any("issue 1165" in note for note in notes) == warns
    eager = read_trace(make.torch(tmp_path / "e.json", [make.kernel("k", 1, 2)], **head)).notes
    assert not any("issue 1165" in note for note in eager)


@pytest.mark.parametrize(("marks", "count"), [("NaN", 1), ("Infinity", 1), ("-Infinity", 1), ("[NaN, 1, Infinity]", 2)])
def test_not_a_number_reads_as_missing_and_is_counted(tmp_path, marks, count):
    trace = read(tmp_path, f"[{row(args=chr(123) + chr(34) + 'bandwidth' + chr(34) + ': ' + marks + '}')}]")
    assert len(trace.kernels) == 1
    assert f"{count} numbers are NaN or infinite and were read as missing" in trace.notes


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "-nan", "+inf", "INF", "infinity", "-infinity"])
def test_infinities_printed_by_c_are_forgiven(tmp_path, word):
    text = f"[{row(args=chr(123) + chr(34) + 'inf, nan' + chr(34) + ': ' + word + '}')}, {row()}]"
    trace = read(tmp_path, text)
    assert len(trace.kernels) == 2
    assert any("bare inf and nan" in note for note in trace.notes)
    (rejected,) = read(tmp_path, f"[{row(dur=word)}, {row()}]").rejected
    assert "infinite" in rejected.reason or "NaN" in rejected.reason


def test_a_million_infinities_take_no_longer_than_one(tmp_path):
    values = ", ".join(["inf"] * 300_000)
    args = '{"values": [' + values + "]}"
    assert len(read(tmp_path, f"[{row(args=args)}]").kernels) == 1


@pytest.mark.parametrize(
    ("damaged", "what"),
    [('{"name": "a "quoted" kernel"}', "delimiter"), ('{"name": "x}', "Unterminated|control|delimiter"), ('{"name" 1}', "delimiter"),
     ('{"a": 1,, "b": 2}', "double quotes"), ("{a: 1}", "double quotes"), ("[1 2]", "delimiter")],
)  # fmt: skip
def test_damage_is_told_by_byte_and_text(tmp_path, damaged, what):
    good = row(args='{"note": "\u00e4\u00e4\u00e4"}')
    text = f"[{good}, {damaged}, {good}]"
    with pytest.raises(TraceError, match=what) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    offset = int(message.split("at byte ")[1].split(":")[0])
    near = json.loads(message.split(" near ")[1].split(" (the file")[0].split("; copy")[0])
    data = text.encode()
    assert near in text
    assert len(data[:offset].decode()) - 24 == text.index(near) or text.index(near) == 0
    assert "\n" not in message


def test_a_byte_order_mark_counts_in_the_offset(tmp_path):
    with pytest.raises(TraceError, match="at byte 4:"):
        read(tmp_path, b"\xef\xbb\xbf[!]")
    assert len(read(tmp_path, b"\xef\xbb\xbf[" + row().encode() + b"]").kernels) == 1


@pytest.mark.parametrize("number", ["-1.-500", "-0.-007", "12.-345"])
def test_negative_times_printed_in_two_parts(tmp_path, number):
    text = f"[{row()}, {row(ts=number)}]"
    with pytest.raises(TraceError, match="is how kineto prints a negative time") as caught:
        read(tmp_path, text)
    assert number in str(caught.value)
    assert f"at byte {text.index(number) + number.index('.')}:" in str(caught.value)


@pytest.mark.parametrize("keep", [-1, -2, -20, -60, 40, 1])
def test_a_cut_file_says_so(tmp_path, keep):
    text = f'{{"traceEvents": [{row()}, {row()}]}}'
    with pytest.raises(TraceError, match="cut short"):
        read(tmp_path, text[:keep])


@pytest.mark.parametrize(
    "text", ['{"traceEvents": []} x', "[1],", '{"traceEvents": [1,]}', '{"a": 1,}', '{"a" 1}', "{1: 2}"]
)
def test_what_is_nearly_json_is_refused(tmp_path, text):
    with pytest.raises(TraceError, match="not valid JSON at byte"):
        read(tmp_path, text)


def test_the_list_may_stand_anywhere_in_the_object(tmp_path):
    head = '"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]'
    for text in (f'{{{head}, "traceEvents": [{row()}]}}', f'{{"traceEvents": [{row()}], {head}}}'):
        trace = read(tmp_path, text)
        assert (len(trace.kernels), trace.gpu(0)) == (1, "NVIDIA GB300")


def test_graphs_without_their_kernels_are_no_pass(tmp_path, make):
    events = make.pdl_events(slow=None)
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
    assert check_trace(make.torch(tmp_path / "t.json", events, **head), "gb300-tp16").verdict == "pass"
    events.append(make.host("cuda_runtime", "cudaGraphLaunch", 9000, 5, correlation=99))
    report = check_trace(make.torch(tmp_path / "t.json", events, **head), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert any("1 of 4 graph launches have no kernels" in reason for reason in report.reasons)
