"""A result that is marked stale says so wherever its figures are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3lab.cli import main
from k3lab.cli.page_data import load_table, record_section
from k3lab.cli.recorded import evidence_of
from k3lab.cli.study_data import layer_basis
from k3lab.cli.table_data import recorded_rows

TABLE = Path(__file__).resolve().parents[2] / "results" / "gb300" / "attention_projection_table.json"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with one table of which the winner of some rows is stale."""
    data = json.loads(TABLE.read_text())
    engine = data["rows"][0]["engine"]
    path = tmp_path / "results" / "gb300" / TABLE.name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**data, "stale": {engine: "another kernel"}}))
    return tmp_path / "results"


def test_every_table_carries_the_word(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = evidence_of("attention_projection", results)
    assert one["evidence"] == "stale predicted"
    rows = recorded_rows(results)
    engine = json.loads((results / "gb300" / TABLE.name).read_text())["rows"][0]["engine"]
    assert {row["evidence"] for row in rows if row["engine"] == engine} == {"stale predicted"}
    assert {row["evidence"] for row in rows if row["engine"] != engine} <= {"predicted"}
    assert record_section(load_table(results / "gb300" / TABLE.name), "link")[0].startswith("Stale predicted for GB300")
    assert main.run(["kernels", "--results", str(results)]) == 0
    assert "GB300: stale predicted" in capsys.readouterr().out


def test_a_layer_s_sum_says_what_of_it_is_stale() -> None:
    parts = [{"evidence": "measured"}, {"evidence": "stale measured"}, {"evidence": "floor"}]
    word, basis = layer_basis(parts)
    assert word == "partly measured and stale measured"
    assert "1 measured and 1 stale measured winners" in basis
