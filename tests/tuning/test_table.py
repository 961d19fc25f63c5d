"""A table: anchors first, warm starts, one set of workers, a contest a problem, an end that can be gone on from."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.kernels import InputError, config_digest
from k3lab.tuning import table as table_module
from k3lab.tuning.export import export
from k3lab.tuning.study import TuningStudy
from k3lab.tuning.table import anchor_rows, in_order, near_first, tune_table
from k3lab.tuning.table_rows import as_result
from table_case import ENGINES, problems, request, trials_of

pytestmark = pytest.mark.usefixtures("a_gpu")


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
