"""A table as a result file: what it says once, what it may replace, and another table that begins with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.kernels import InputError
from k3lab.tuning import between as between_module
from k3lab.tuning.table import TableResult, tune_table
from k3lab.tuning.table_rows import as_result, check_results, joined, result_text, winners_of, write_result
from table_case import request, trials_of

pytestmark = pytest.mark.usefixtures("a_gpu")


def test_a_result_says_once_what_all_rows_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"gpu": {"name": "NVIDIA H200", "driver": "1"}, "commit": "aaa"}
    monkeypatch.setattr(between_module, "environment", lambda device: dict(place))
    table = tune_table(request(tmp_path / "s", 1, 8))
    path = tmp_path / "new" / "fake_table.json"
    check_results(path)
    write_result(path, table)
    check_results(path)
    data = json.loads(path.read_text())
    assert data == json.loads(json.dumps(as_result(table)))
    assert (data["family"], data["gpu"], data["evidence"]) == ("fake", "H200", "measured")
    assert (data["environment"], data["policy"]) == ({**place}, {"samples": 3})
    assert data["problem"] == {"tp": 1, "width": 64}
    assert [row["problem"] for row in data["rows"]] == [{"rows": 1}, {"rows": 8}]
    assert data["sources"]["large"]["source"] == fake_family.LARGE.source_digest()
    for row, told in zip(table.rows, data["rows"], strict=True):
        assert (told["us"], told["engine"], told["floor_us"]) == (round(row.us, 3), row.engine, 4.0)
        assert told["alternatives"] == {"PyTorch": 33.0}
    # 84 problems with a config of ten parameters stay below 150 KB
    line = max(len(text) for text in path.read_text().splitlines())
    assert 84 * (line + 200) < 150_000
    elsewhere = dataclasses.replace(
        table.rows[1], environment={"gpu": {"name": "NVIDIA H200", "driver": "2"}, "commit": "aaa"}
    )
    with pytest.raises(InputError, match="different environments"):
        as_result(dataclasses.replace(table, rows=(table.rows[0], elsewhere)))
    later = dataclasses.replace(table.rows[1], environment={**place, "commit": "bbb"})
    assert as_result(dataclasses.replace(table, rows=(table.rows[0], later)))["environment"]["commit"] == "aaa, bbb"


def test_a_table_is_added_to_one_that_was_measured_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"gpu": {"name": "NVIDIA H200", "driver": "1"}, "commit": "aaa"}
    monkeypatch.setattr(between_module, "environment", lambda device: dict(place))
    path = tmp_path / "t.json"
    write_result(path, tune_table(request(tmp_path / "s", 1, 8)), add=True)
    first = json.loads(path.read_text())
    place["commit"] = "bbb"
    more = tune_table(request(tmp_path / "later", 8, 16, trials=2))
    write_result(path, more, add=True)
    data = json.loads(path.read_text())
    assert [row["problem"]["rows"] for row in data["rows"]] == [1, 8, 16]
    assert data["rows"][0] == first["rows"][0] and data["environment"]["commit"] == "aaa, bbb"
    assert data["trials"]["anchors"] == 2 and data["problem"] == {"tp": 1, "width": 64}
    assert [one.problem.rows for one in winners_of(path, fake_family.FAMILY)] == [1, 8, 16]
    new = as_result(more)
    engine = next(iter(new["sources"]))
    for change, what in (
        ({"policy": {"samples": 4}}, "another policy"),
        ({"environment": {**data["environment"], "gpu": {}}}, "another environment"),
        ({"fixed": {"k_order": "invariant"}}, "another fixed"),
        ({"sources": {engine: {"source": "other", "glue": "other"}}}, f"another source of {engine}"),
    ):
        with pytest.raises(InputError, match=what):
            joined(new, {**data, **change})
    write_result(path, more)
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_wrong_result_files_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"my": "data"}')
    for path, words in (
        (tmp_path / "x.txt", "is a .json file"), (tmp_path / "mine.json", "is no table"), (Path("/proc/none/t.json"), "cannot be written"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            check_results(path)
    empty = TableResult(request(tmp_path, 1), "budget", (), ("tp1-rows1: nothing",), {}, 0)
    with pytest.raises(InputError, match="no row to keep: tp1-rows1"):
        write_result(tmp_path / "t.json", empty)
    assert result_text({"a": 1, "rows": [{"b": 2}]}).count("\n") == 6


def test_a_table_begins_with_the_winners_of_another(tmp_path: Path) -> None:
    first = tune_table(request(tmp_path / "s", 4, engines=(fake_family.LARGE,)))
    write_result(tmp_path / "first.json", first)
    known = winners_of(tmp_path / "first.json", fake_family.FAMILY)
    assert [(one.problem, one.engine, dict(one.config)) for one in known] == [
        (row.problem, row.engine, dict(row.config)) for row in first.rows
    ]
    tune_table(request(tmp_path / "t", 8, engines=(fake_family.LARGE,), trials=2, known=known))
    assert known[0].config in [dict(trial.config) for trial in trials_of(tmp_path / "t", "large", 8)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "is no table"),
        ({"schema": 9}, "has schema 9, this version reads 1"),
        ({"family": "router"}, "is a table of router, not of fake"),
        ({"rows": [{"problem": {}}]}, "has a row that cannot be read"),
        ({"rows": [7]}, "has a row that cannot be read"),
    ],
)
def test_what_is_no_table_is_no_beginning(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    data = {"format": "k3lab-table", "schema": 1, "family": "fake", "problem": {}, "rows": []}
    (tmp_path / "t.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(InputError, match=reason):
        winners_of(tmp_path / "t.json", fake_family.FAMILY)
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as a table"):
        winners_of(tmp_path / "t.json", fake_family.FAMILY)
