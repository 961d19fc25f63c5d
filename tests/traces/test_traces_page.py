"""docs/traces.md: its files are files that are read, and its Python runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from k3lab.traces import parse_budget, synthesize
from k3lab.traces.names_table import load_table
from k3lab.traces.synthetic import Faults

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_files_it_shows_are_read(tmp_path):
    shown = {json.loads(block)["schema"]: block for block in blocks("json")}
    assert set(shown) == {"k3lab.budget/1", "k3lab.names_table/1"}
    assert parse_budget(json.loads(shown["k3lab.budget/1"])).rows == 16
    (tmp_path / "names.json").write_text(shown["k3lab.names_table/1"])
    table = load_table(tmp_path / "names.json")
    assert table.entry("my_moe_gate").family == "experts"
    assert table.entry("my_reduce").family is None


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    synthesize("out/before.json.gz", layers=8, steps=8)
    synthesize("out/slow.json.gz", layers=8, steps=8, faults=Faults(slow=((2, 20_000),)))
    code = next(block for block in blocks("python") if "check_trace" in block)
    exec(compile(code, "docs/traces.md", "exec"), {})
    told = capsys.readouterr().out
    assert told.startswith("fail (")
    assert "[experts] adds" in told
