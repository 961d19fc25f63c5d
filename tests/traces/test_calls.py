"""Calls per step and layer from summaries of ``nsys stats``: every era's header, and what counts cannot tell."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, read_trace
from k3lab.traces.calls import count_calls

NOW = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name"
ROWS = ('60.0,1200,24,50.0,50.0,40,60,1.0,"void gemm<int, (bool)1>(float *, int)"', "30.0,600,12,50.0,50.0,40,60,1.0,norm",
        "10.0,200,3,66.7,66.7,60,70,1.0,lm_head")  # fmt: skip


def write(path, *lines, before=""):
    path.write_text(before + "\n".join(lines) + "\n")
    return path


def test_calls_are_divided_by_steps_and_layers(tmp_path):
    data = count_calls(write(tmp_path / "t.csv", NOW, *ROWS), steps=3, layers=4).to_json()
    assert [(row["kernel"], row["calls"], row["per_step"], row["per_layer"]) for row in data["kernels"]] == [
        ("void gemm<int, (bool)1>(float *, int)", 24, 8, 2), ("norm", 12, 4, 1), ("lm_head", 3, 1, 0.25)
    ]  # fmt: skip
    assert (data["calls"], data["per_step"], data["per_layer"]) == (39, 13, 3.25)
    assert (data["per_layer_of_kernels_in_every_layer"], data["per_step_of_the_others"]) == (3, 1)
    assert "order, times" in data["notes"][0] and len(data["notes"]) == 1


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (NOW, "100.0,1200,24,50.0,50.0,40,60,1.0,k"),
        (NOW.replace("(ns)", "(us)"), "100.0,1.2,24,0.05,0.05,0.04,0.06,0.001,k"),
        (NOW.replace("Time (%)", "Time(%)"), "100.0,1200,24,50.0,50.0,40,60,1.0,k"),
        ("Time(%),Total Time (ns),Instances,Average,Minimum,Maximum,Name", "100.0,1200,24,50.0,40,60,k"),
        ("Time (%),Total Time (ns),Instances,Average (ns),Minimum (ns),Maximum (ns),Name", "100.0,1200,24,50,40,60,k"),
        (
            NOW.replace("Name", "GridXYZ,BlockXYZ,Name"),
            '100.0,1200,24,50.0,50.0,40,60,1.0," 896    1    1"," 128 1 1",k',
        ),
        (NOW, '100.0,"1,200","24",50.0,50.0,40,60,1.0,k'),
    ],
)
def test_headers_of_every_era(tmp_path, header, row):
    found = count_calls(write(tmp_path / "t.csv", header, row), steps=6, layers=2)
    assert [(item.name, item.calls, item.per_layer) for item in found.kernels] == [("k", 24, 2)]


def test_one_kernel_on_several_grids_is_one_kernel(tmp_path):
    header = NOW.replace("Name", "GridXYZ,BlockXYZ,Name")
    rows = ("50.0,600,12,50.0,50.0,40,60,1.0,8 1 1,128 1 1,k", "50.0,600,8,50.0,50.0,40,60,1.0,16 1 1,128 1 1,k")
    assert [
        item.calls for item in count_calls(write(tmp_path / "t.csv", header, *rows), steps=1, layers=1).kernels
    ] == [20]


def test_behind_a_preamble_and_other_reports(tmp_path):
    api = NOW.replace("Instances", "Num Calls")
    text = ("NOTICE: Existing SQLite export found: x.sqlite", "", " ** CUDA API Summary (cuda_api_sum):", "", api,
            "50,100,999,1,1,1,1,0,cudaLaunchKernel", "", " ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):", "", NOW, *ROWS,
            "", "Time (%),Total Time (ns),Count,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Operation",
            "100,5,7,1,1,1,1,0,[CUDA memset]")  # fmt: skip
    found = count_calls(write(tmp_path / "t.csv", *text), steps=3, layers=4)
    assert {item.name: item.calls for item in found.kernels} == {
        "void gemm<int, (bool)1>(float *, int)": 24, "norm": 12, "lm_head": 3
    }  # fmt: skip
    with pytest.raises(TraceError, match="several cuda_gpu_kern_sum reports"):
        count_calls(write(tmp_path / "t.csv", *text, *text), steps=3, layers=4)


def test_counts_that_do_not_fit_the_steps_are_said(tmp_path):
    notes = count_calls(write(tmp_path / "t.csv", NOW, *ROWS), steps=5, layers=4).notes
    assert any("3 of 3 kernels do not run a whole number of times a step" in note for note in notes)


def test_unusable_rows_are_said_and_not_counted_as_nothing(tmp_path):
    bad = (
        "1,1,0,1,1,1,1,0,zero",
        "1,1,-4,1,1,1,1,0,negative",
        f"1,1,{'9' * 50},1,1,1,1,0,huge",
        "1,1,x,1,1,1,1,0,word",
        "1,1",
    )
    found = count_calls(write(tmp_path / "t.csv", NOW, *ROWS, *bad), steps=3, layers=4)
    assert len(found.kernels) == 3 and any(note.startswith("5 rows are not counted") for note in found.notes)
    with pytest.raises(TraceError, match="no usable row"):
        count_calls(write(tmp_path / "t.csv", NOW, *bad), steps=3, layers=4)


def test_a_trace_is_counted_too_and_told_that_more_can_be_said(tmp_path, make):
    path = make.torch(tmp_path / "t.json", make.pdl_events())
    found = count_calls(path, steps=3, layers=4)
    assert {item.name: item.calls for item in found.kernels} == Counter(
        kernel.name for kernel in read_trace(path).kernels
    )
    assert sum(item.per_layer for item in found.kernels) == 13
    assert any("k3lab trace show" in note for note in found.notes)
    with pytest.raises(TraceError, match="no kernel records"):
        count_calls(make.torch(tmp_path / "t.json", [make.host("cpu_op", "x", 1, 1)]), steps=1, layers=1)


def test_encodings_and_truncation(tmp_path):
    path = write(tmp_path / "t.csv", NOW, *ROWS)
    text = path.read_text()
    for data in (b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16")):
        path.write_bytes(data)
        assert sum(item.calls for item in count_calls(path, steps=3, layers=4).kernels) == 39
    for size in range(0, len(text), 7):
        path.write_text(text[:size])
        try:
            assert sum(item.calls for item in count_calls(path, steps=3, layers=4).kernels) <= 39
        except TraceError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_the_command(tmp_path, capsys):
    path = write(tmp_path / "t.csv", NOW, *ROWS)
    assert run(["trace", "calls", str(path), "--steps", "3", "--layers", "4"]) == 0
    out = capsys.readouterr().out
    assert "39 kernel calls, 13 a step and 3.250 a layer on 3 steps of 4 layers" in out
    assert (
        "kernels that come a whole number of times a layer: 3 a layer; the others: " in out
        and "not told by counts" in out
    )
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"norm": "moe_tail"}))
    assert run(["trace", "calls", str(path), "--steps", "3", "--layers", "4", "--plan", str(plan), "--json"]) == 0
    assert {row["kernel"]: row["family"] for row in json.loads(capsys.readouterr().out)["kernels"]}[
        "norm"
    ] == "moe_tail"
    assert run(["trace", "calls", str(path), "--steps", "0", "--layers", "4"]) == 2
    assert run(["trace", "calls", str(path), "--steps", "3"]) == 2
    assert run(["trace", "calls", str(tmp_path / "none.csv"), "--steps", "3", "--layers", "4"]) == 2
    assert run(["trace", "check", str(path)]) == 2
    assert "k3lab trace calls" in capsys.readouterr().err
