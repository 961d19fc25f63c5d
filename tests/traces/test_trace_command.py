"""``k3lab trace``: exit codes, the word of the verdict, one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from k3lab.cli.main import run
from k3lab.traces import synthesize
from k3lab.traces.synthetic import Faults


def test_a_pass_exits_0_and_says_that_it_is_synthetic(tmp_path, capsys):
    path = synthesize(tmp_path / "t.json.gz", steps=4, layers=8)
    assert run(["trace", "check", str(path), "--budget", "gb300-tp16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("pass (synthetic) t.json.gz against gb300-tp16")
    assert out.count("pass") == out.count("pass (synthetic)") == 10  # the whole, a class, six layers, two families
    assert "synthetic: made by a generator" in out


def test_a_failure_exits_1_and_names_the_kernel(tmp_path, capsys):
    path = synthesize(tmp_path / "t.json", steps=4, layers=8, faults=Faults(slow=((1, 15_000),)))
    assert run(["trace", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("fail t.json")
    assert "k3_experts_synthetic_routed [experts]" in out


def test_inconclusive_exits_1_and_says_the_word(tmp_path, capsys):
    path = synthesize(tmp_path / "t.json", steps=4, layers=8, gpu=None)
    assert run(["trace", "check", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "inconclusive"
    assert run(["trace", "check", str(path)]) == 1
    assert capsys.readouterr().out.startswith("inconclusive t.json")
    assert run(["trace", "check", str(path), "--gpu", "gb300"]) == 0


def test_synthesize_writes_what_check_judges(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["trace", "synthesize", "new/t.json.gz", "--layers", "8", "--steps", "6", "--slow-layer", "1"]
    assert run([*words, "--slow-us", "15"]) == 0
    assert capsys.readouterr().out == "wrote new/t.json.gz: synthetic, 6 steps of 8 layers, layer 1 slow by 15 us\n"
    assert run(["trace", "check", "new/t.json.gz"]) == 1
    assert capsys.readouterr().out.startswith("fail t.json.gz against gb300-tp16: layer 1: ")


def test_what_is_planted_is_what_check_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plants = ["copy:2:20", "exposed:4:6", "cast:5", "no-overlap:6"]
    words = [word for plant in plants for word in ("--plant", plant)]
    assert run(["trace", "synthesize", "t.json", "--steps", "8", "--graphs", "2", "--pause-us", "900", *words]) == 0
    assert capsys.readouterr().out.endswith(", planted copy:2:20, exposed:4:6, cast:5, no-overlap:6\n")
    assert run(["trace", "check", "t.json", "--json", "--step-us", "1500"]) == 1
    found = json.loads(capsys.readouterr().out)["devices"][0]["findings"]
    told = {(item["kind"], item["layer"], item["cause"]) for item in found}
    assert told >= {("gap", 2, "copy"), ("side", 4, "side stream"), ("extra", 5, "cast or copy"),
                    ("overlap", 6, "lost overlap"), ("graphs", None, "piecewise graphs"),
                    ("between", None, "host-bound"), ("profiler", None, "profiler")}  # fmt: skip
    assert run(["trace", "show", "t.json", "--step-us", "1500"]) == 0
    assert "the untraced 1500.0 us" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["synthesize", "t.json", "--plant", "copy:2"], "--plant copy:2 is not understood; give WORD:LAYER:US with slow,"),
     (["synthesize", "t.json", "--plant", "cast:2:5"], "--plant cast:2:5 is not understood"),
     (["synthesize", "t.json", "--plant", "cast:12"], "layers are 0 to 11"),
     (["synthesize", "t.json", "--plant", "copy:2:nan"], "the time is 2 to 1000000 us"),
     (["synthesize", "t.json", "--graphs", "13"], "--graphs is 13; a step of 12 layers has 1 to 12"),
     (["synthesize", "t.json", "--slow-layer", "12"], "--slow-layer is 12, layers are 0 to 11"),
     (["synthesize", "t.sqlite"], "ends in .json or .json.gz"),
     (["synthesize", "good.json/t.json"], "cannot write good.json/t.json"),
     (["check", "none.json"], "no such file"), (["show", "none.json"], "no such file"),
     (["check", "page.sqlite"], "web page"), (["check", "good.json", "--budget", "x"], "no budget"),
     (["check", "good.json", "--layers", "0"], "layers must be 1 or more"),
     (["check", "good.json", "--plan", "none.json"], "plan")],
)  # fmt: skip
def test_bad_input_exits_2_with_one_line(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.sqlite").write_text("<html>")
    synthesize(tmp_path / "good.json", steps=2, layers=4)
    assert run(["trace", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_show_lists_layers_without_a_verdict(tmp_path, capsys):
    path = synthesize(tmp_path / "t.json", steps=3, layers=8)
    assert run(["trace", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "layer 7" in out
    assert "verdict" not in out
    assert run(["trace", "show", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["budget"]) == ("not judged", None)


def test_names_in_a_trace_are_not_taken_for_markup(tmp_path, make, capsys):
    events = make.pdl_events()
    for event in events:
        if event["name"] == "k09":
            event["name"] = "gemm[/red][bold]x"
    assert run(["trace", "check", str(make.torch(tmp_path / "t.json", events)), "--gpu", "gb300"]) == 1
    assert "gemm[/red][bold]x" in capsys.readouterr().out


def test_the_package_needs_only_the_standard_library():
    code = (
        "import sys, time; begin = time.process_time()\n"
        "import csv, dataclasses, gzip, json, pathlib, sqlite3, statistics, typing; first = time.process_time()\n"
        "import k3lab.traces; spent = time.process_time() - first\n"
        "ours = [n for n in sys.modules if n.startswith('k3lab.') and not n.startswith('k3lab.traces')]\n"
        "outside = {n.split('.')[0] for n in sys.modules} & {'torch', 'numpy', 'pydantic', 'rich', 'typer', 'triton'}\n"
        "assert not ours and not outside, (ours, outside)\n"
        "print(first - begin, spent)\n"
    )
    tries = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
        ).stdout.split()
        for _ in range(3)
    ]
    base, spent = (min(float(one[place]) for one in tries) for place in (0, 1))
    # where the CPU is a slow one, what Python's own modules take says how slow: some 20 ms on a usual one
    assert spent < max(0.3, 15 * base), (base, spent)
