"""What the trace commands print: the answer first, no more than there is room for, and nothing twice."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from k3lab.cli import trace, trace_capture, trace_diff, trace_kernels, trace_ranks
from k3lab.cli.main import run
from k3lab.cli.trace import render
from k3lab.cli.trace_one import with_layer
from k3lab.cli.trace_words import NARROW, line
from k3lab.traces import TraceError, check_ranks, check_trace, diff_traces, inspect_trace, load_budget, synthesize
from k3lab.traces.budget import budget_names
from k3lab.traces.capture import NO_GPU_NOTE
from k3lab.traces.names_table import table_names
from k3lab.traces.synthetic import Faults
from rich.console import Console


def printed(render, data, width=80, terminal=True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, highlight=False)
    render(console, data)
    return console.file.getvalue().splitlines()


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return {
        "good": synthesize(folder / "good.json", layers=12, steps=8),
        "slow": synthesize(folder / "slow.json", layers=12, steps=8, faults=Faults(slow=((2, 20_000),))),
        "many": synthesize(folder / "many.json", layers=40, steps=8, faults=Faults(slow=((31, 3_000), (33, 20_000)))),
    }


@pytest.mark.parametrize("width", [80, 120, NARROW])
@pytest.mark.parametrize("family", [None, "experts", "attention_projection"])
def test_tables_fit_the_terminal_and_cut_no_figure(traces, family, width):
    told = printed(trace.render, check_trace(traces["slow"], "gb300-tp16", rows=8, family=family).to_json(), width)
    assert max(map(len, told)) <= width
    assert not [text for text in told if "…" in text]
    rows = [text for text in told if text.startswith("│ layer ")]
    assert len(rows) == 12  # a row is a line: nothing was folded
    assert " 80." in rows[2]


def test_findings_come_before_the_tables_and_a_reason_is_told_once(traces):
    told = printed(trace.render, check_trace(traces["slow"], "gb300-tp16", rows=8).to_json(), 160, terminal=False)
    assert told[0].startswith("fail slow.json against gb300-tp16: layer 2: completion period")
    finding = next(index for index, text in enumerate(told) if "[experts] adds" in text)
    assert finding < next(index for index, text in enumerate(told) if text.startswith("┏"))
    assert sum("budget 69.0 us" in text for text in told) == 1


def test_of_many_layers_the_worst_are_shown_in_their_order(traces):
    told = printed(trace.render, check_trace(traces["many"], "gb300-tp16", rows=8).to_json(), 160, terminal=False)
    rows = [int(text.split()[2]) for text in told if text.startswith("│ layer ")]
    assert len(rows) == 24
    assert rows == sorted(rows)
    assert {31, 33} <= set(rows)  # 31 is an MLA layer, which the budget does not judge: its class shows it
    assert any("the worst 24 of 40, --json has all" in text for text in told)


def test_a_family_alone_has_its_time_in_each_layer(traces):
    data = check_trace(traces["slow"], "gb300-tp16", rows=8, family="experts").to_json()
    layers = data["devices"][0]["layers"]
    assert layers[2]["family_ns"] - layers[1]["family_ns"] == pytest.approx(20_000, abs=1_000)
    told = printed(trace.render, data)
    assert any(text.startswith("│ layer 2 ") and f"{layers[2]['family_ns'] / 1000:.1f}" in text for text in told)
    assert not any("output_projection" in text for text in told if text.startswith("│"))
    whole = check_trace(traces["slow"], "gb300-tp16", rows=8).to_json()["devices"][0]["layers"]
    assert {layer["family_ns"] for layer in whole} == {None}


def test_one_layer_is_told_kernel_by_kernel_beside_its_peers(traces, capsys):
    words = ["trace", "check", str(traces["slow"]), "--rows", "8", "--layer"]
    assert run([*words, "2", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    kernels = data["devices"][0]["layer_kernels"]
    assert data["layer"] == 2 and len(kernels) == 13
    late = max(kernels, key=lambda row: row["increment_ns"] - row["peers_ns"])
    assert (late["place"], late["family"]) == (9, "experts")
    assert late["increment_ns"] - late["peers_ns"] == pytest.approx(20_000, abs=500)
    told = printed(trace.render, data)
    assert max(map(len, told)) <= 80
    assert any(text.startswith("fail: layer 2 (class A, kda): 80.") for text in told)
    assert any("in its peers (+" in text for text in told)
    assert run([*words, "5"]) == 1  # the trace fails, whichever layer is looked at
    out = capsys.readouterr().out
    assert "pass (synthetic): layer 5 (class A, kda): 60." in out
    assert "no kernel adds a microsecond more than in the layers like it" in out
    assert run(["trace", "show", str(traces["many"]), "--layer", "31"]) == 0  # three of 24 us: no finding
    assert "small, most by kernel 11 k3_experts_synthetic_routed: 3.0 us more than" in capsys.readouterr().out
    assert run([*words, "12"]) == 2
    assert capsys.readouterr().err == "k3lab: slow.json: no layer 12; there are layers 0 to 11\n"
    assert run(["trace", "show", str(traces["slow"]), "--layer", "3"]) == 0
    assert "verdict" not in (out := capsys.readouterr().out) and "layer 3 (class B, mla): 6" in out


@pytest.mark.parametrize("width", [80, 160])
def test_a_pause_before_a_layer_stands_in_its_row(tmp_path, width):
    trace = synthesize(tmp_path / "t.json", layers=8, steps=6, faults=Faults(copy=((3, 20_000),)))
    data = check_trace(trace, "gb300-tp16", rows=8).to_json()
    for layer in data["devices"][0]["layers"]:
        step = layer["typical_step"]
        assert 0 <= step["idle_ns"] <= step["completion_period_ns"]
    idle = data["devices"][0]["layers"][3]["typical_step"]["idle_ns"]
    assert idle == pytest.approx(20_000, abs=2_000)
    told = printed(render, data, width)
    head = next(text for text in told if "p10-p90" in text)
    cells = next(text for text in told if text.startswith("│ layer 3 ")).split("│")
    column = next(at for at, title in enumerate(head.split("┃")) if title.strip() == "idle")
    assert cells[column].strip() == f"{idle / 1000:.1f}"


def test_a_layer_has_what_is_found_of_its_class_and_none_has_a_way_out(traces, make, tmp_path):
    data = with_layer(inspect_trace(traces["good"]), 3)
    data["devices"][0]["findings"] = [
        {"layer": None, "text": f"class {name}: 9.0 us of idle time"} for name in ("A", "B")
    ]
    told = printed(trace.render, data)
    assert "  class B: 9.0 us of idle time" in told
    assert "  class A: 9.0 us of idle time" not in told
    rows = [("a", 0), ("b", 10)]
    path = make.torch(tmp_path / "t.json", [make.kernel(name, 1_000 + at, 5, 7, 1) for name, at in rows])
    assert any(text.startswith("to have layers: ") for text in printed(trace.render, inspect_trace(path).to_json()))
    assert not any(text.startswith("to have layers: ") for text in told)


def test_lines_wrap_on_a_terminal_and_stay_whole_in_a_pipe():
    text = "word " * 60
    assert len(printed(lambda console, data: line(console, data, "  "), text)) > 1
    assert len(printed(lambda console, data: line(console, data, "  "), text, 160, terminal=False)) == 1


def test_diff_prints_only_what_changed(traces):
    told = printed(trace_diff.render, diff_traces(traces["good"], traces["slow"]).to_json())
    assert max(map(len, told)) <= 80
    kernels = [text for text in told if text.startswith("│ k3_")]
    assert len(kernels) == 1 and "experts_synthetic_routed" in kernels[0]
    assert "class A: 12 kernels without a change beyond the spread (--json has all)" in told
    same = printed(trace_diff.render, diff_traces(traces["good"], traces["good"]).to_json())
    assert not [text for text in same if text.startswith("│ k3_")]


def test_ranks_say_why_before_their_tables(traces):
    told = printed(trace_ranks.render, check_ranks([traces["good"], traces["slow"]], "gb300-tp16").to_json())
    assert told[1] == "Reasons"
    assert max(map(len, told)) <= 80


def test_columns_that_nothing_was_measured_for_are_told_in_a_note():
    row = dict.fromkeys([key for _, key, *_ in trace_kernels._COLUMNS])
    data = {"gpus": [], "file": "n.csv", "format": "CSV", "notes": [],
            "launches": [row | {"launch": "0", "name": "k", "family": None, "duration_ns": 6750}]}  # fmt: skip
    told = printed(trace_kernels.render_kernels, data)
    assert any("6.75" in text for text in told)
    assert any("not measured: DRAM read MB" in text for text in told)
    assert not any("registers" in text for text in told if text.startswith("┃"))


def test_calls_tell_instances_of_a_template_apart_and_take_names_tables(tmp_path, capsys):
    one, other = "void k<at::A<(int)4>>(int)", "void k<at::B<(int)8>>(int)"
    (tmp_path / "names.json").write_text(json.dumps(
        {"schema": "k3lab.names_table/1", "name": "mine", "entries": [{"prefix": "mine_", "family": "experts"}]}))  # fmt: skip
    rows = "".join(f'1.0,100,4,25.0,25.0,25,25,0.0,"{name}"\n' for name in (one, other, "mine_gemm"))
    head = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
    (tmp_path / "t.csv").write_text(head + rows)
    words = ["trace", "calls", str(tmp_path / "t.csv"), "--steps", "2", "--layers", "2"]
    assert run([*words, "--names", str(tmp_path / "names.json")]) == 0
    told = capsys.readouterr().out
    assert one in told and other in told
    assert next(text for text in told.splitlines() if "mine_gemm" in text).split()[3] == "experts"


@pytest.mark.parametrize(("width", "command"), [(200, "check"), (200, "ranks"), (200, "figure")])
def test_help_lists_the_budgets_there_are(capsys, monkeypatch, width, command):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["trace", command, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ", ".join(budget_names()) in told
    assert ", ".join(table_names()) in told


def test_budget_lists_shows_and_derives(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "budget"]) == 0
    told = [text.split(":")[0] for text in capsys.readouterr().out.splitlines() if not text.startswith(" ")]
    assert told == list(budget_names())
    assert run(["trace", "budget", "h200-tp8"]) == 0
    assert "Shares of a mla layer" in capsys.readouterr().out
    assert run(["trace", "budget", "--gpu", "h200", "--tp", "8", "--rows", "16", "--out", "new/mine.json"]) == 0
    capsys.readouterr()
    made, known = load_budget("new/mine.json"), load_budget("h200-tp8")
    assert (made.gpu, made.tp, made.rows, made.evidence) == ("H200", 8, 16, "derived")
    assert made.layers["kda"].period_ns > known.layers["kda"].period_ns  # more rows wake more experts
    assert run(["trace", "budget", "--gpu", "H200", "--tp", "8", "--rows", "8", "--json"]) == 0
    same = json.loads(capsys.readouterr().out)["budgets"][0]
    assert same["layers"] == known.to_json()["layers"]  # as the package's own was made


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["nope"], "no budget 'nope'"), (["--gpu", "H200"], "needs --tp, --rows too"),
     (["h200-tp8", "--tp", "8"], "give the name of a budget, or"), (["--out", "x.json"], "--out takes one budget"),
     (["h200-tp8", "--out", "x.txt"], "must end in .json"),
     (["--gpu", "X", "--tp", "8", "--rows", "8"], "unknown GPU 'X'"),
     (["--gpu", "H200", "--tp", "7", "--rows", "8"], "TP 7 does not divide"),
     (["--gpu", "H200", "--tp", "8", "--rows", "0"], "--rows is 0")],
)  # fmt: skip
def test_a_wrong_budget_call_exits_2_with_one_line(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "budget", *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert says in captured.err
    assert not list(tmp_path.iterdir())


def test_reports_are_a_line_in_a_notebook(traces):
    report = check_trace(traces["slow"], "gb300-tp16", rows=8)
    for shown in (report, report.trace, diff_traces(traces["good"], traces["slow"])):
        assert len(repr(shown)) < 300
    assert "fail" in repr(report)


@pytest.mark.parametrize(("notes", "judged"), [(["replays are recorded"], 1), ([NO_GPU_NOTE], 0)])
def test_a_capture_without_a_gpu_is_not_sent_to_the_judge(notes, judged):
    data = {
        "trace": Path("a-long-folder/of-some-run/on-some-host/steps.json.gz"),
        "tool": "torch.profiler",
        "notes": notes,
    }
    told = printed(trace_capture.render, data)
    assert told.count("judge it: k3lab trace check a-long-folder/of-some-run/on-some-host/steps.json.gz") == judged


def test_a_missing_file_is_a_trace_error():
    with pytest.raises(TraceError, match="no such file"):
        check_trace(Path("none.json"), "gb300-tp16")
