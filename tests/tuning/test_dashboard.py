"""Studies are plain Optuna studies: they open in optuna-dashboard as they are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.cli import main
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dashboard") / "s.sqlite3"
    problem = fake_family.FakeProblem(tp=1, rows=8)
    ask = TuneRequest(
        fake_family.FAMILY, fake_family.FAULTY, problem, gpu_card("gb300"), "predicted", 10, path, 0,
        Limits(compile_s=2, measure_s=2), "fake_evaluator", fixed={"n": 0},
    )  # fmt: skip
    tune(ask)
    tune(TuneRequest(
        fake_family.FAMILY, fake_family.SMALL, problem, gpu_card("gb300"), "predicted", 12, path.with_name("t.sqlite3"), 0,
        Limits(compile_s=20, measure_s=20), "fake_evaluator",
    ))  # fmt: skip
    return path


def test_optuna_alone_reads_all_of_it(study: Path) -> None:
    """What the dashboard reads: states, values, parameters with their choices, attributes; nothing left running."""
    import optuna

    for path, least in ((study, 1), (study.with_name("t.sqlite3"), 12)):
        found = optuna.load_study(study_name=None, storage=f"sqlite:///{path}")
        assert found.direction == optuna.study.StudyDirection.MINIMIZE
        states = {trial.state for trial in found.trials}
        assert states <= {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL}
        done = [trial for trial in found.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        assert len(done) >= least and all(trial.value and trial.value > 0 for trial in done)
        assert all(set(trial.params) == set(trial.distributions) for trial in found.trials)
        assert all(trial.datetime_complete for trial in found.trials)
        assert found.best_trial.params == min(done, key=lambda trial: trial.value or 0.0).params
        json.dumps(found.user_attrs)
    assert any("reason" in str(trial.user_attrs) for trial in optuna.load_study(study_name=None, storage=f"sqlite:///{study}").trials)  # fmt: skip


def get(app: Any, path: str) -> Any:
    """The answer of a WSGI application."""
    told: list[str] = []
    environ = {
        "REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "", "SERVER_NAME": "x", "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "wsgi.url_scheme": "http",
    }  # fmt: skip
    body = b"".join(app(environ, lambda status, headers, exc=None: told.append(status)))
    assert told[0].startswith("200"), (path, told[0])
    return json.loads(body)


def test_the_dashboard_itself_shows_it(study: Path) -> None:
    import optuna

    dashboard = pytest.importorskip("optuna_dashboard", reason="pip install optuna-dashboard")
    failing = dashboard.wsgi(optuna.storages.RDBStorage(f"sqlite:///{study}"))
    (summary,) = get(failing, "/api/studies")["study_summaries"]
    trials = get(failing, f"/api/studies/{summary['study_id']}")["trials"]
    failed = [trial for trial in trials if trial["state"] == "Fail"]
    assert failed and all(
        any(one["key"] == "reason" or "reason" in one["value"] for one in trial["user_attrs"]) for trial in failed
    )
    app = dashboard.wsgi(optuna.storages.RDBStorage(f"sqlite:///{study.with_name('t.sqlite3')}"))
    (summary,) = get(app, "/api/studies")["study_summaries"]
    assert summary["study_name"] == "fake/small/GB300/predicted"
    detail = get(app, f"/api/studies/{summary['study_id']}")
    assert len(detail["trials"]) == 12 and {trial["state"] for trial in detail["trials"]} == {"Complete"}
    assert {param["name"] for param in detail["trials"][0]["params"]} == {"tile", "deep", "mode"}
    assert any(attribute["key"] == "k3lab:identity" for attribute in detail["user_attrs"])


def test_show_has_table_importance_and_failures_by_reason(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["study", "show", str(study.with_name("t.sqlite3")), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["importance"]) == {"tile", "deep", "mode"} and max(data["importance"].values()) > 0.2
    assert list(data["importance"].values()) == sorted(data["importance"].values(), reverse=True)
    assert len(data["top"]) == 10
    assert main.run(["study", "show", str(study.with_name("t.sqlite3"))]) == 0
    said = capsys.readouterr().out
    assert "best trials" in said and "importance, each alone" in said and "share of the spread" in said
    assert main.run(["study", "show", str(study)]) == 0
    said = capsys.readouterr().out
    assert "failures" in said and "crashed" in said and "compile_timeout" in said
