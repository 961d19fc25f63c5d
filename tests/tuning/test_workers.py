"""Several processes for one search: the same result whatever their number, and a bad compilation costs its config."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.kernels import InputError
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import tune as tune_module
from k3lab.tuning import workers as workers_module
from k3lab.tuning.outcome import SetupError, Status
from k3lab.tuning.study import TrialRecord, TuningStudy
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune
from k3lab.tuning.workers import Workers

LIMITS = Limits(compile_s=10, measure_s=10)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "require_gpu", lambda gpu: None)


def request(path: Path, engine: fake_family.FakeEngine, trials: int, **changes: object) -> TuneRequest:
    fields = {
        "family": fake_family.FAMILY, "engine": engine, "problem": fake_family.FakeProblem(1, 8), "gpu": gpu_card("gb300"),
        "objective": "measured", "trials": trials, "study": path, "limits": LIMITS, "evaluator": "fake_evaluator", "seed": 7,
    }  # fmt: skip
    return TuneRequest(**{**fields, **changes})  # type: ignore[arg-type]


def trials_of(path: Path) -> list[TrialRecord]:
    with TuningStudy.for_reading(path) as study:
        return study.trials()


def evaluations(log: Path) -> list[tuple[str, str, int]]:
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def gone(pids: set[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("engine", "objective"),
    [
        pytest.param(fake_family.SMALL, "predicted", id="listed-predicted"),
        pytest.param(fake_family.LARGE, "measured", id="sampler-measured"),
        pytest.param(fake_family.SMALL, "measured", id="listed-measured", marks=pytest.mark.slow),
        pytest.param(fake_family.LARGE, "predicted", id="sampler-predicted", marks=pytest.mark.slow),
    ],
)
def test_the_trials_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, engine: fake_family.FakeEngine, objective: str
) -> None:
    found = []
    for jobs in (1, 3):
        path = tmp_path / f"{jobs}.sqlite3"
        result = tune(request(path, engine, 30, objective=objective, jobs=jobs))
        trials = trials_of(path)
        found.append(([(trial.number, trial.config, trial.value) for trial in trials], result.choice))
        assert all(trial.finished and trial.ok for trial in trials)
    assert found[0] == found[1]
    assert len(found[0][0]) == (14 if engine is fake_family.SMALL else 30)


def test_stopping_anywhere_changes_nothing_that_follows_whatever_the_number(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.sqlite3", tmp_path / "parts.sqlite3"
    tune(request(whole, fake_family.LARGE, 27, jobs=3))
    for trials, jobs in ((3, 3), (11, 1), (20, 2), (27, 3)):
        tune(request(parts, fake_family.LARGE, trials, jobs=jobs))
    assert [trial.config for trial in trials_of(parts)] == [trial.config for trial in trials_of(whole)]


def test_others_compile_while_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("FAKE_SECONDS", "0.1")
    tune(request(tmp_path / "s.sqlite3", fake_family.LARGE, 12, jobs=2))
    seen = evaluations(log)
    by_kind = {kind: {pid for one, _, pid in seen if one == kind} for kind, _, _ in seen}
    assert len(by_kind["measure"] | by_kind["retime"]) == 1  # one process has the GPU
    assert len(by_kind["compile"]) == 2
    assert not by_kind["compile"] & by_kind["measure"]
    counts = Counter((kind, digest) for kind, digest, _ in seen if kind != "retime")
    assert max(counts.values()) == 1
    third = [kind for kind, _, _ in seen if kind != "retime"][: [k for k, _, _ in seen].index("measure") + 4]
    assert third.count("compile") > third.count("measure") + 1  # ahead, not beside


def test_what_the_compiler_took_is_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_COMPILE_SECONDS", "0.2")
    tune(request(tmp_path / "s.sqlite3", fake_family.SMALL, 2))
    for trial in trials_of(tmp_path / "s.sqlite3"):
        assert trial.outcome is not None
        assert trial.outcome.seconds["compile"] >= 0.2


@pytest.mark.parametrize("objective", ["measured", "predicted"])
def test_a_compiler_that_dies_or_hangs_costs_its_own_config(tmp_path: Path, objective: str) -> None:
    limits = Limits(compile_s=1.0, measure_s=1.0)
    result = tune(request(tmp_path / "s.sqlite3", fake_family.FAULTY, 40, objective=objective, limits=limits, jobs=3))
    assert result.statuses == fake_family.FAULTY_STATUSES
    assert result.choice is not None
    assert result.choice.config == {"fault": "none", "n": 0}


def test_what_no_config_can_help_ends_the_search(tmp_path: Path) -> None:
    engine = fake_family.FakeEngine("faulty", fake_family.FAULTY.params, (), {"fault": "none", "n": 0})
    ask = request(tmp_path / "s.sqlite3", engine, 1, jobs=2)
    with Workers(LIMITS, measured=True, evaluator="fake_evaluator", jobs=2) as workers:
        job = dataclasses.replace(ask.job("measure", {"fault": "no_tool", "n": 0}), digests=None)
        with pytest.raises(SetupError, match="set K3LAB_CUDA_BIN"):
            workers.result(job)
        good = dataclasses.replace(ask.job("measure", {"fault": "none", "n": 1}), digests=None)
        assert workers.result(good).status is Status.OK  # the others go on
    with Workers(LIMITS, measured=True, evaluator="no_such_evaluator", jobs=1) as broken, pytest.raises(InputError, match="no_such_evaluator"):  # fmt: skip
        broken.result(good)


def test_closing_ends_workers_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    ask = request(tmp_path / "s.sqlite3", fake_family.FAULTY, 1)
    workers = Workers(Limits(compile_s=600, measure_s=600), measured=True, evaluator="fake_evaluator", jobs=2)
    for n in (0, 1):
        workers.submit(ask.job("measure", {"fault": "hang", "n": n}))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not log.exists() or len(log.read_text().splitlines()) < 2):
        time.sleep(0.02)
    pids = {pid for _, _, pid in evaluations(log)}
    assert len(pids) == 2
    begun = time.monotonic()
    workers.close()
    assert time.monotonic() - begun < 10
    assert gone(pids)
    assert not any(thread.is_alive() for thread in workers._threads)
    with pytest.raises(InputError, match="have ended"):
        workers.result(ask.job("measure", {"fault": "none", "n": 0}))


def test_jobs_that_wait_are_dropped_and_put_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    ask = request(tmp_path / "s.sqlite3", fake_family.LARGE, 1, objective="predicted")
    jobs = [ask.job("predict", {"p": p, "q": p, "r": 0, "s": 0}) for p in range(5)]
    with Workers(LIMITS, measured=False, evaluator="fake_evaluator", jobs=1) as workers:
        for job in jobs:
            workers.submit(job, later=1)
        assert workers.result(jobs[4]).status is Status.OK
        workers.forget()
        assert workers.result(jobs[0]).status is Status.OK
    done = [digest for _, digest, _ in evaluations(log)]
    assert len(done) == len(set(done)) <= 3  # the one begun, the one put forward, the one asked for again


def test_default_and_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, jobs in ((1, 1), (2, 1), (6, 5), (64, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cpus=cpus: set(range(cpus)))
        assert workers_module.default_jobs() == jobs
    for jobs in (0, -1, 17):
        with pytest.raises(InputError, match=f"jobs is {jobs}, must be 1 to 16"):
            Workers(measured=False, jobs=jobs)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import json
from pathlib import Path
import fake_family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import tune as module
from k3lab.tuning.supervisor import Limits
module.require_gpu = lambda gpu: None
request = module.TuneRequest(fake_family.FAMILY, fake_family.LARGE, fake_family.FakeProblem(1, 8), gpu_card("gb300"),
                             "measured", 40, Path(sys.argv[2]), 5, Limits(), "fake_evaluator", jobs=4)
print(json.dumps(module.tune(request).to_json()))
"""


def start(path: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "FAKE_SECONDS": str(seconds),
        "FAKE_COMPILE_SECONDS": str(seconds),
        "FAKE_LOG": str(log),
    }
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, here, str(path)], env=environment, stdout=subprocess.PIPE, text=True
    )


def wait_for(log: Path, kind: str, count: int, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        if log.exists() and log.read_text().count(f'"{kind}"') >= count:
            return
        time.sleep(0.01)


def test_a_signal_ends_it_after_the_running_trial_and_leaves_no_process(tmp_path: Path) -> None:
    path, log = tmp_path / "s.sqlite3", tmp_path / "log"
    child = start(path, log, 0.1)
    wait_for(log, "measure", 3, child)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    result: dict[str, Any] = json.loads(output)
    assert (child.returncode, result["ended"]) == (0, "interrupted")
    trials = trials_of(path)
    assert 1 <= len(trials) < 40
    assert all(trial.finished for trial in trials)
    assert gone({pid for _, _, pid in evaluations(log)})


def test_killed_with_many_processes_it_goes_on_as_it_would_have(tmp_path: Path) -> None:
    path, log, whole = tmp_path / "s.sqlite3", tmp_path / "log", tmp_path / "whole.sqlite3"
    for count in (3, 12):
        child = start(path, log, 0.05)
        wait_for(log, "measure", count, child)
        child.kill()
        child.communicate(timeout=30)
    pids = {pid for _, _, pid in evaluations(log)}
    child = start(path, log, 0.0)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    assert json.loads(output)["trials"] == 40
    assert gone(pids)
    tune(request(whole, fake_family.LARGE, 40, seed=5))
    assert [trial.config for trial in trials_of(path)] == [trial.config for trial in trials_of(whole)]
