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
from k3lab.tuning import environment as environment_module
from k3lab.tuning.table import TableResult, tune_table
from k3lab.tuning.table_file import check_results, joined, write_result
from k3lab.tuning.table_rows import as_result, result_text, winners_of
from table_case import request, trials_of

pytestmark = pytest.mark.usefixtures("a_gpu")


def test_a_result_says_once_what_all_rows_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"gpu": {"name": "NVIDIA H200", "driver": "1"}, "commit": "aaa"}
    monkeypatch.setattr(between_module, "environment", lambda device: dict(place))
    table = tune_table(request(tmp_path / "s", 1, 8))
    path = tmp_path / "new" / "fake_table.json"
    check_results(path, request(tmp_path / "s", 1, 8))
    write_result(path, table)
    check_results(path, request(tmp_path / "s", 1, 8))
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
            joined(new, {**data, **change}, fake_family.FAMILY)
    write_result(path, more)
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_wrong_result_files_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"my": "data"}')
    for path, words in (
        (tmp_path / "x.txt", "is a .json file"), (tmp_path / "mine.json", "is no table"), (Path("/proc/none/t.json"), "cannot be written"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            check_results(path, request(tmp_path, 1))
    empty = TableResult(request(tmp_path, 1), "budget", (), ("tp1-rows1: nothing",), {}, 0)
    with pytest.raises(InputError, match="no row to keep: tp1-rows1"):
        write_result(tmp_path / "t.json", empty)
    assert result_text({"a": 1, "rows": [{"b": 2}]}).count("\n") == 6


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The environment here, before the work and of its contests; a test may change it."""
    here = {"gpu": {"name": "NVIDIA H200", "driver": "1"}, "commit": "aaa"}
    for module in (between_module, environment_module):
        monkeypatch.setattr(module, "environment", lambda device: dict(here))
    return here


def damaged(text: str, **changes: Any) -> str:
    return json.dumps({name: value for name, value in {**json.loads(text), **changes}.items() if value is not None})


def test_what_cannot_be_added_to_is_refused_before_the_work(tmp_path: Path, place: dict[str, Any]) -> None:
    path, more = tmp_path / "t.json", request(tmp_path / "more", 2)
    write_result(path, tune_table(request(tmp_path / "s", 1)))
    text = path.read_text()
    check_results(path, more, add=True)
    rows = json.loads(text)["rows"]
    source = {"small": {"source": "other", "glue": "other"}}
    for changes, words in (
        ({"rows": None}, "is no table"), ({"rows": [7]}, "has a row that cannot be read"), ({"rows": [{**rows[0], "problem": 3}]}, "has a row that cannot be read"),
        ({"rows": [{**rows[0], "engines": None}]}, "commit or engines cannot be read"), ({"schema": 9}, "has schema 9"),
        ({"environment": None}, "its environment cannot be read"), ({"environment": {"gpu": None}}, "commit or engines"), ({"sources": []}, "its sources cannot be read"),
        ({"trials": None}, "its trials cannot be read"), ({"skipped": None}, "its skipped cannot be read"), ({"family": "router"}, "is a table of router, not of fake"),
        ({"gpu": "GB300"}, "another gpu"), ({"evidence": "predicted"}, "another evidence"), ({"fixed": {"p": 1}}, "another fixed"),
        ({"sources": source}, "another source of small"), ({"compilers": {"triton": "0"}}, "another compiler of triton"),
    ):  # fmt: skip
        path.write_text(damaged(text, **changes))
        with pytest.raises(InputError, match=words):
            check_results(path, more, add=True)
    path.write_text(text)
    place["gpu"] = {"name": "NVIDIA H200", "driver": "2"}
    with pytest.raises(InputError, match="made in another environment"):
        check_results(path, more, add=True)
    check_results(path, request(tmp_path / "s", 1), add=True)  # nothing is left to be measured here
    with pytest.raises(InputError, match="compared in another environment"):
        check_results(path, request(tmp_path / "s", 1, 2))


def test_a_table_replaces_only_one_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_result(path, tune_table(request(tmp_path / "s", 1)))
    text = path.read_text()
    for changes, words in (
        ({"family": "router"}, "another family"), ({"gpu": "GB300"}, "another gpu"), ({"evidence": "predicted"}, "another evidence"), ({"fixed": {"p": 1}}, "another fixed"),
    ):  # fmt: skip
        path.write_text(damaged(text, **changes))
        with pytest.raises(InputError, match=words):
            check_results(path, request(tmp_path / "more", 2))
    path.write_text(damaged(text, sources={"small": {"source": "older"}}))
    check_results(path, request(tmp_path / "more", 2))


def test_an_added_table_says_what_holds_for_all_its_rows(tmp_path: Path, place: dict[str, Any]) -> None:
    path = tmp_path / "t.json"
    both = request(tmp_path / "s", 1, 8)
    write_result(path, tune_table(both))
    path.write_text(
        damaged(
            path.read_text(), missing=["tp1-rows4-width64: old", "tp1-rows2: old"], skipped={"small: no": ["tp1-rows4-width64", "tp1-rows2"]},
            sources={**json.loads(path.read_text())["sources"], "gone": {"source": "of no row"}},
        )
    )  # fmt: skip
    label = both.problems[0].label
    assert label == "tp1-rows1"
    later = dataclasses.replace(request(tmp_path / "later", 2, 8), seed=5)
    table = tune_table(later)
    part = dataclasses.replace(table, rows=table.rows[:1], missing=("tp1-rows8: its engines are not compared",))
    write_result(path, part, add=True)
    data = json.loads(path.read_text())
    assert [row["problem"]["rows"] for row in data["rows"]] == [1, 2, 8]
    assert data["missing"] == ["tp1-rows4-width64: old"], "a row that is kept is not missing, nor one that is new"
    assert data["skipped"] == {"small: no": ["tp1-rows4-width64"]}
    assert (data["trials"]["seed"], "gone" in data["sources"]) == ([0, 5], False)
    write_result(path, part, add=True)
    assert json.loads(path.read_text()) == data


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
