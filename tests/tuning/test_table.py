"""A table: anchors first, warm starts, one set of workers, a contest a problem, an end that can be gone on from."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.kernels import InputError, config_digest
from k3lab.kernels.bundle.reader import Bundle, BundleEntry, Miss
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import between as between_module
from k3lab.tuning import table as table_module
from k3lab.tuning import tune as tune_module
from k3lab.tuning.export import export
from k3lab.tuning.study import TrialRecord, TuningStudy
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.table import TableRequest, TableResult, anchor_rows, in_order, near_first, tune_table
from k3lab.tuning.table_rows import as_result, check_results, result_text, winners_of, write_result

ENGINES = (fake_family.SMALL, fake_family.LARGE)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tune_module, table_module):
        monkeypatch.setattr(module, "require_gpu", lambda gpu: None)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def problems(*rows: int, widths: tuple[int, ...] = (64,)) -> tuple[fake_family.FakeProblem, ...]:
    return tuple(fake_family.FakeProblem(1, count, width) for width in widths for count in rows)


def request(folder: Path, *rows: int, **changes: Any) -> TableRequest:
    fields = {
        "family": fake_family.FAMILY, "problems": problems(*rows), "engines": ENGINES, "gpu": gpu_card("h200"),
        "objective": "measured", "trials": 30, "folder": folder, "limits": Limits(compile_s=10, measure_s=10),
        "evaluator": "fake_evaluator", "jobs": 2,
    }  # fmt: skip
    return TableRequest(**{**fields, **changes})


def trials_of(folder: Path, engine: str, rows: int) -> list[TrialRecord]:
    (path,) = folder.glob(f"fake-{engine}-tp1-rows{rows}-*.sqlite3")
    with TuningStudy.for_reading(path) as study:
        return study.trials()


def test_anchors_come_first_and_neighbours_are_near() -> None:
    assert anchor_rows([*range(1, 9), 12, 16, 24, 32, 48, 64]) == [1, 5, 16, 64]
    assert anchor_rows([8]) == [8]
    assert anchor_rows([2, 1]) == [1, 2]
    both = problems(1, 2, 3, 4, 6, 8, widths=(64, 32))
    ordered = in_order(both)
    assert len(ordered) == len(both) == len({problem for problem, _ in ordered})
    firsts = [problem for problem, anchor in ordered if anchor]
    assert ordered[: len(firsts)] == [(problem, True) for problem in firsts]
    assert [problem.rows for problem in firsts] == [1, 3, 4, 8] * 2
    near = near_first(problems(4)[0], problems(1, 3, 5, widths=(32, 64)))
    assert [problems(1, 3, 5, widths=(32, 64))[place].width for place in near] == [64] * 3 + [32] * 3
    assert [problems(1, 3, 5, widths=(32, 64))[place].rows for place in near[:3]] == [5, 3, 1]


def test_one_process_measures_all_and_the_faster_engine_wins(tmp_path: Path, log: Path) -> None:
    said: list[str] = []
    result = tune_table(request(tmp_path / "s", 1, 8), said.append)
    assert (result.ended, result.missing, result.skipped) == ("done", (), {})
    assert [(row.problem.rows, row.engine) for row in result.rows] == [(1, "large"), (8, "large")]
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({pid for kind, _, pid in seen if kind in ("measure", "contest", "chain")}) == 1
    counts = Counter(kind for kind, _, _ in seen)
    assert (counts["contest"], counts["chain"], counts["retime"]) == (2, 2, 0)
    row = result.rows[0]
    assert row.chain is not None
    assert row.chain["hidden_us"] == 3.0
    assert row.to_json()["chain_us"] == pytest.approx(row.us - 3, abs=0.02)
    assert (row.alternatives, row.floor_us) == ({"PyTorch": 33.0}, 4.0)
    assert list(row.engines) == ["large", "small"]
    assert row.engines["small"] == pytest.approx(18, rel=0.02)
    assert "rounds in turn in one process" in row.reason
    assert [line.split(":")[0] for line in said] == [
        "[1/4] tp1-rows1 small", "[2/4] tp1-rows1 large", "tp1-rows1", "[3/4] tp1-rows8 small", "[4/4] tp1-rows8 large", "tp1-rows8",
    ]  # fmt: skip


def test_running_again_does_nothing_twice_and_more_trials_are_compared_anew(tmp_path: Path, log: Path) -> None:
    ask = request(tmp_path / "s", 1, 8)
    first = tune_table(ask)
    count = len(log.read_text().splitlines())
    again = tune_table(ask)
    assert len(log.read_text().splitlines()) == count
    assert [row.to_json() for row in again.rows] == [row.to_json() for row in first.rows]
    assert (first.new_trials, again.new_trials) == (88, 0)
    more = tune_table(dataclasses.replace(ask, trials=32))
    assert more.new_trials == 4  # small has no more
    kinds = Counter(json.loads(line)[0] for line in log.read_text().splitlines()[count:])
    assert kinds["contest"] == 2


def test_later_studies_begin_with_the_winners_of_others(tmp_path: Path) -> None:
    rows = (1, 2, 3, 4, 5, 8)
    result = tune_table(request(tmp_path / "s", *rows, engines=(fake_family.LARGE,), trials=30, later_trials=10))
    counts = {row: len(trials_of(tmp_path / "s", "large", row)) for row in rows}
    assert set(counts.values()) == {30, 10}
    later = [row for row, count in counts.items() if count == 10]
    best = {row: min(trials_of(tmp_path / "s", "large", row), key=lambda t: (t.value, t.digest)) for row in rows}
    anchors = {best[row].digest for row in rows if row not in later}
    for row in later:
        trials = trials_of(tmp_path / "s", "large", row)
        assert trials[0].config == fake_family.LARGE.default
        assert trials[1].digest in anchors
        assert best[row].value <= max(best[anchor].value for anchor in rows if anchor not in later) * 1.01
    assert len(result.rows) == 6


def test_the_budget_ends_it_and_the_same_request_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = request(tmp_path / "s", 1, 8)
    late = iter([False] * 12)
    with monkeypatch.context() as patch:
        patch.setattr(table_module.Stop, "late", property(lambda self: next(late, True)))
        result = tune_table(dataclasses.replace(ask, budget_s=1000))
    assert (result.ended, result.rows) == ("budget", ())
    assert [line.split(":")[0] for line in result.missing] == ["tp1-rows1", "tp1-rows8"]
    assert "is not tuned to its end" in result.missing[0]
    begun = len(trials_of(tmp_path / "s", "small", 1))
    assert 1 <= begun < 14
    assert all(trial.finished for trial in trials_of(tmp_path / "s", "small", 1))
    done = tune_table(ask)
    assert (done.ended, done.missing, len(done.rows)) == ("done", (), 2)
    assert done.new_trials == 88 - begun
    with monkeypatch.context() as patch:  # what is whole is told, however late
        patch.setattr(table_module.Stop, "late", property(lambda self: True))
        assert len(tune_table(dataclasses.replace(ask, budget_s=1)).rows) == 2


def test_engines_that_refuse_or_fail_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake_family.FakeEngine, "refuses", lambda self, problem, arch: "rows 8 is too many" if (self.name, problem.rows) == ("large", 8) else None,
    )  # fmt: skip
    bad = fake_family.FakeEngine("faulty", fake_family.FAULTY.params[:1], (), {"fault": "wrong"})
    only = dataclasses.replace(request(tmp_path / "s", 1, 8), engines=(*ENGINES, bad), trials=1)
    result = tune_table(only)
    assert [(row.problem.rows, row.engine) for row in result.rows] == [(1, "small"), (8, "small")]
    assert result.skipped["large: rows 8 is too many"] == ["tp1-rows8"]
    assert result.skipped["faulty: no config ended ok, as `k3lab study show` tells"] == ["tp1-rows1", "tp1-rows8"]
    none = tune_table(dataclasses.replace(only, engines=(bad,)))
    assert none.rows == ()
    assert none.missing[0] == "tp1-rows1: no engine has a config that ended ok"


def test_a_contestant_that_ends_the_process_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking = config_digest({"tile": 4, "deep": True, "mode": "a"})
    monkeypatch.setenv("FAKE_BREAKS", breaking)
    result = tune_table(request(tmp_path / "s", 1, engines=(fake_family.SMALL,)))
    (row,) = result.rows
    assert row.config == {"tile": 4, "deep": True, "mode": "b"}
    (path,) = (tmp_path / "s").glob("*.sqlite3")
    with TuningStudy.for_reading(path) as study:
        assert "crashed" in study.note("finals")[breaking]["failed"]
    every = " ".join(config_digest(c) for c in fake_family.SMALL.space(row.problem, None).legal)
    monkeypatch.setenv("FAKE_BREAKS", every)
    result = tune_table(request(tmp_path / "t", 1, engines=(fake_family.SMALL,)))
    assert result.rows == ()
    assert "the contest of tp1-rows1 ended as crashed" in result.missing[0]


def choice_of(folder: Path, engine: str) -> dict[str, Any]:
    (path,) = folder.glob(f"fake-{engine}-*.sqlite3")
    with TuningStudy.for_reading(path) as study:
        return study.note("choice")


def test_what_wins_alone_but_not_in_the_chain_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    alone = tune_table(request(tmp_path / "alone", 1)).rows[0]
    slow = {config_digest(alone.config): alone.us + 5}
    monkeypatch.setenv("FAKE_CHAIN", json.dumps(slow))
    (row,) = tune_table(request(folder, 1)).rows
    assert (row.engine, alone.engine) == ("large", "large")
    assert row.config != alone.config
    assert row.us > alone.us  # isolated, as it is
    assert "is dropped in the chain" in row.config_reason
    choice = choice_of(folder, "large")
    assert choice["config"] == row.config
    assert choice["chain"] == row.chain
    figures = {one["digest"]: (one["value_us"], one["chain"]) for one in choice["finalists"]}
    assert figures[config_digest(alone.config)][1]["chain_us"] == alone.us + 5
    (entry,) = export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator").entries
    assert entry.config == row.config
    assert "is dropped in the chain" in entry.choice.reason
    assert [one.to_json() for one in tune_table(request(folder, 1)).rows] == [row.to_json()]


def test_who_fails_in_the_chain_is_out_and_a_chain_that_cannot_be_timed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = request(tmp_path / "alone", 1)
    alone = tune_table(ask).rows[0]
    for what, words in (("lost edges", "in a chain: lost edges"), ("dies", "in a chain: crashed")):
        monkeypatch.setenv("FAKE_CHAIN", json.dumps({config_digest(alone.config): what}))
        folder = tmp_path / what.replace(" ", "-")
        (row,) = tune_table(dataclasses.replace(ask, folder=folder)).rows
        assert row.config != alone.config
        (path,) = folder.glob("fake-large-*.sqlite3")
        with TuningStudy.for_reading(path) as study:
            assert words in study.note("finals")[config_digest(alone.config)]["failed"]
    monkeypatch.setenv("FAKE_CHAIN", '{"all": "die"}')
    (row,) = tune_table(dataclasses.replace(ask, folder=tmp_path / "none")).rows
    assert row.config == alone.config
    assert row.chain is None
    assert row.to_json()["chain_us"] is None
    assert row.notes == ("not confirmed in a chain: the chain of tp1-rows1 ended as crashed: worker exited with code 4 while timing",)  # fmt: skip


def test_a_table_becomes_a_bundle_that_serves_the_rows_between(tmp_path: Path) -> None:
    folder, out = tmp_path / "s", tmp_path / "bundle"
    table = tune_table(request(folder, 2, 8, 32))
    (folder / "notes.txt").write_text("mine")
    result = export([folder], out, family=fake_family.FAMILY, evaluator="fake_evaluator")
    assert [(entry.rows, entry.engine) for entry in result.entries] == [(2, "large"), (8, "large"), (32, "large")]
    for entry, row in zip(result.entries, table.rows, strict=True):
        assert entry.config == row.config
        assert entry.choice.value_us == pytest.approx(row.us, abs=1e-4)
        assert entry.choice.reason.endswith(f"; between engines: {row.reason}")
    assert sum("loses to large" in line for line in result.passed_over) == 3
    bundle = Bundle.load(out)
    for rows, serving in ((1, 2), (2, 2), (3, 8), (8, 8), (9, 32), (32, 32)):
        found = bundle.find(fake_family.FAMILY, fake_family.FakeProblem(1, rows), "H200")
        assert isinstance(found, BundleEntry)
        assert found.rows == serving
        compiled = found.compiled("sm_90a", fake_family.FakeProblem(1, rows))
        here = fake_family.LARGE.compile(fake_family.FakeProblem(1, serving), found.model.config, "sm_90a")
        assert [one.cubin for one in compiled.launches] == [one.cubin for one in here.launches]
    assert isinstance(bundle.find(fake_family.FAMILY, fake_family.FakeProblem(1, 33), "H200"), Miss)


def test_what_was_measured_apart_is_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    ask = request(folder, 1)
    for engine in ENGINES:
        tune_module.tune(ask.request(problems(1)[0], engine, 30))
    with pytest.raises(InputError, match=r"were measured apart: `k3lab tune-table` compares engines in one process"):
        export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator")
    (small,) = folder.glob("fake-small-*.sqlite3")
    assert (
        export([small], tmp_path / "one", family=fake_family.FAMILY, evaluator="fake_evaluator").entries[0].engine
        == "small"
    )
    assert tune_table(ask).new_trials == 0  # the studies are taken as they are
    (entry,) = export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator").entries
    assert entry.engine == "large"
    tune_module.tune(ask.request(problems(1)[0], fake_family.LARGE, 33))  # trials that the contest has not seen
    with pytest.raises(InputError, match="measured apart"):
        export([folder], tmp_path / "c", family=fake_family.FAMILY, evaluator="fake_evaluator")


def test_studies_in_part_are_passed_over_and_other_files_are_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    tune_table(request(folder, 1))
    with monkeypatch.context() as patch:
        patch.setattr(table_module, "hold", lambda *_: (_ for _ in ()).throw(InputError("the power went out")))
        assert tune_table(request(folder, 8)).missing == ("tp1-rows8: the power went out",)
    tune_module.tune(dataclasses.replace(
        request(folder, 1).request(problems(1)[0], fake_family.SMALL, 3), study=folder / "held.sqlite3", fixed={"tile": 8}
    ))  # fmt: skip
    result = export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator")
    assert [entry.rows for entry in result.entries] == [1]
    assert sum("stopped before its finals" in line for line in result.passed_over) == 2
    assert any("held.sqlite3: holds tile" in line for line in result.passed_over)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no study"):
        export([tmp_path / "empty"], tmp_path / "c", family=fake_family.FAMILY)


def test_changed_kernels_begin_anew_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    ask = request(folder, 1, engines=(fake_family.SMALL,), objective="predicted", gpu=gpu_card("gb300"))
    tune_table(ask)
    (path,) = folder.glob("*.sqlite3")
    with sqlite3.connect(path) as connection:
        text = connection.execute("SELECT value_json FROM study_user_attributes WHERE key='k3lab:identity'").fetchone()[
            0
        ]
        other = json.dumps({**json.loads(text), "source_digest": "f" * 16})
        connection.execute("UPDATE study_user_attributes SET value_json=? WHERE key='k3lab:identity'", (other,))
    with pytest.raises(InputError, match="another source_digest"):
        tune_table(ask)
    assert tune_table(dataclasses.replace(ask, fresh=True)).new_trials == 14
    assert len(list(folder.glob("*-old1.sqlite3"))) == 1
    assert tune_table(dataclasses.replace(ask, fresh=True)).new_trials == 0


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


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    ask = request(tmp_path / "s", 1)
    for changes, words in (
        ({"problems": ()}, "at least one problem"), ({"engines": ()}, "one engine"), ({"trials": 0}, "trials is 0"),
        ({"later_trials": -1}, "later trials is -1"), ({"later_trials": 0}, "later trials is 0"), ({"budget_s": 0.0}, "the budget is 0 s"), ({"jobs": 99}, "jobs is 99"),
        ({"budget_s": float("nan")}, "the budget is nan"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            tune_table(dataclasses.replace(ask, **changes))
    assert not (tmp_path / "s").exists()


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


def test_a_parameter_held_at_one_value_makes_studies_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    free = tune_table(request(folder, 4))
    held = tune_table(request(folder, 4, fixed={"mode": "b"}))
    assert list(held.skipped) == ["large: unknown parameter 'mode'; the space has " + ", ".join(sorted("pqrs"))]
    (row,) = held.rows
    assert (row.engine, row.config["mode"]) == ("small", "b")
    (path,) = folder.glob("*mode_is_b*.sqlite3")
    with TuningStudy.for_reading(path) as study:
        assert {trial.config["mode"] for trial in study.trials()} == {"b"}
    assert as_result(held)["fixed"] == {"mode": "b"}
    assert "fixed" not in as_result(free)
    none = tune_table(request(folder, 4, fixed={"mode": "z"}))
    assert none.rows == () and "no engine has a config" in none.missing[0]
