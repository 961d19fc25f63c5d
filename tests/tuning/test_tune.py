"""The search: default first, no config twice, resumable at any moment, interruptible."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import fake_evaluator
import fake_family
import pytest
from k3lab.kernels import InputError, config_digest
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import tune as tune_module
from k3lab.tuning.study import TrialRecord, TuningStudy
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune

PROBLEM = fake_family.FakeProblem(tp=1, rows=8)


def request(path: Path, engine: fake_family.FakeEngine, trials: int, **changes: object) -> TuneRequest:
    fields = {
        "family": fake_family.FAMILY,
        "engine": engine,
        "problem": PROBLEM,
        "gpu": gpu_card("gb300"),
        "objective": "predicted",
        "trials": trials,
        "study": path,
        "limits": Limits(compile_s=10, measure_s=10),
        "evaluator": "fake_evaluator",
    }
    return TuneRequest(**{**fields, **changes})  # type: ignore[arg-type]


def trials_of(path: Path) -> list[TrialRecord]:
    with TuningStudy.for_reading(path) as study:
        return study.trials()


def assert_whole(trials: list[TrialRecord], count: int) -> None:
    """Exactly that many ended trials, numbered in order, the default first, no config twice."""
    assert [trial.number for trial in trials] == list(range(count))
    assert all(trial.finished and trial.outcome for trial in trials)
    assert max(Counter(trial.digest for trial in trials).values()) == 1


class Told:
    """Keeps what a search reports."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.messages: list[str] = []
        self.totals: list[int] = []

    def begin(self, title: str, trials: object, total: int) -> None:
        self.totals.append(total)

    def trial(self, trial: TrialRecord, best: TrialRecord | None) -> None:
        self.numbers.append(trial.number)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def end(self) -> None:
        self.messages.append("end")


def test_a_small_space_is_taken_whole_and_ends_early(tmp_path: Path) -> None:
    path, told = tmp_path / "s.sqlite3", Told()
    result = tune(request(path, fake_family.SMALL, 40), told)
    space = fake_family.SMALL.space(PROBLEM, None)
    trials = trials_of(path)
    assert_whole(trials, len(space.legal))
    assert {trial.digest for trial in trials} == {config_digest(config) for config in space.legal}
    assert trials[0].config == space.default
    assert (result.ended, result.new_trials, result.statuses) == ("exhausted", 14, {"ok": 14})
    assert told.totals == [14]
    assert told.messages == ["no config is left to try after 14 trials", "end"]
    assert result.choice is not None
    assert result.choice.config == {"tile": 4, "deep": True, "mode": "a"}
    again = tune(request(path, fake_family.SMALL, 40))
    assert (again.ended, again.new_trials, again.choice) == ("exhausted", 0, result.choice)


def test_a_large_space_is_sampled_better_than_at_random(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    result = tune(request(path, fake_family.LARGE, 40))
    trials = trials_of(path)
    assert_whole(trials, 40)
    assert trials[0].config == fake_family.LARGE.default
    space = fake_family.LARGE.space(PROBLEM, None)
    assert all(space.illegal(trial.config) is None for trial in trials)
    assert result.ended == "trials"
    drawn = [
        min(fake_evaluator.latency_us("large", c) for c in random.Random(s).sample(space.legal, 39)) for s in range(99)
    ]
    assert min(trial.value for trial in trials) < sorted(drawn)[49]


def test_stopping_anywhere_changes_nothing_that_follows(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.sqlite3", tmp_path / "parts.sqlite3"
    tune(request(whole, fake_family.LARGE, 16, seed=3))
    for trials in (1, 12, 16):
        tune(request(parts, fake_family.LARGE, trials, seed=3))
    assert [trial.config for trial in trials_of(parts)] == [trial.config for trial in trials_of(whole)]
    other = tmp_path / "other.sqlite3"
    tune(request(other, fake_family.LARGE, 16, seed=4))
    assert [trial.config for trial in trials_of(other)] != [trial.config for trial in trials_of(whole)]


def test_faults_cost_their_own_trials(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    result = tune(request(path, fake_family.FAULTY, 40, limits=Limits(compile_s=0.5, measure_s=0.5)))
    assert_whole(trials_of(path), 30)
    assert result.statuses == fake_family.FAULTY_STATUSES
    assert result.choice is not None
    assert result.choice.config == {"fault": "none", "n": 0}


def test_a_search_in_which_all_fail_has_no_choice(tmp_path: Path) -> None:
    space = fake_family.FAULTY.space(PROBLEM, None)
    bad = fake_family.FakeEngine("faulty", fake_family.FAULTY.params[:1], (), {"fault": "wrong"})
    assert bad.default != space.default
    path = tmp_path / "s.sqlite3"
    # the worker knows the engine by its name, so the config decides; n is missing there and never read
    result = tune(request(path, bad, 1))
    assert (result.statuses, result.choice) == ({"wrong": 1}, None)
    assert result.to_json()["choice"] is None


def test_a_trial_left_before_its_outcome_is_evaluated_and_one_left_before_the_tell_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna

    path, log = tmp_path / "s.sqlite3", tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    tune(request(path, fake_family.LARGE, 4))

    class Dead(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Dead

    with monkeypatch.context() as patch:  # dies between the stored outcome and the tell
        patch.setattr(optuna.Study, "tell", die)
        with pytest.raises(Dead):
            tune(request(path, fake_family.LARGE, 40))
    (left,) = [trial for trial in trials_of(path) if not trial.finished]
    assert left.outcome is not None
    evaluated = log.read_text().count(left.digest)
    assert evaluated == 1
    with monkeypatch.context() as patch:  # dies before the outcome is stored
        patch.setattr(TuningStudy, "finish", die)
        with pytest.raises(Dead):
            tune(request(path, fake_family.LARGE, 40))
    told = Told()
    tune(request(path, fake_family.LARGE, 8), told)
    assert_whole(trials_of(path), 8)
    assert log.read_text().count(left.digest) == 1
    assert [left.number] == [trial.number for trial in trials_of(path) if trial.digest == left.digest]
    assert sum("left running" in message for message in told.messages) == 1
    with TuningStudy.for_reading(path) as study:
        assert study.trials()[left.number].value == left.value


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import json, os
from pathlib import Path
import fake_family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune
request = TuneRequest(fake_family.FAMILY, fake_family.LARGE, fake_family.FakeProblem(1, 8), gpu_card("gb300"), "predicted",
                      40, Path(sys.argv[2]), 5, Limits(), "fake_evaluator")
print(json.dumps(tune(request).to_json()))
"""


def start(path: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "FAKE_SECONDS": str(seconds), "FAKE_LOG": str(log), "OMP_NUM_THREADS": "1"}
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, here, str(path)], env=environment, stdout=subprocess.PIPE, text=True
    )


def count(path: Path) -> int:
    """Trials in the file, read as any other process would."""
    if not path.exists():
        return 0
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
        try:
            return connection.execute("SELECT COUNT(*) FROM trials").fetchone()[0]
        finally:
            connection.close()
    except sqlite3.OperationalError:  # locked, or a journal of the killed writer waits for the next one
        return -1


def test_killed_again_and_again_it_ends_with_every_trial_once(tmp_path: Path) -> None:
    """``kill -9`` at random moments: 40 ended trials, no config twice, none running, and no worker left."""
    path, log = tmp_path / "s.sqlite3", tmp_path / "log"
    rng = random.Random(20)
    kills = 0
    for target in (0, 3, 9, 15, 24, 33):  # 0: while the file is being made
        child = start(path, log, 0.02)
        deadline = time.monotonic() + 60
        while count(path) < target and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.9) if target == 0 else rng.uniform(0, 0.1))
        if child.poll() is None:
            kills += 1
        child.kill()
        child.communicate(timeout=30)
    assert kills == 6
    child = start(path, log, 0.0)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    result = json.loads(output)
    trials = trials_of(path)
    assert_whole(trials, 40)
    assert (result["trials"], result["ended"]) == (40, "trials")
    evaluations = [json.loads(line) for line in log.read_text().splitlines()]
    counts = Counter(digest for _, digest, _ in evaluations)
    assert set(counts) == {trial.digest for trial in trials}
    assert sum(counts.values()) <= 40 + kills  # only what a kill interrupted was evaluated again
    deadline = time.monotonic() + 10
    pids = {pid for _, _, pid in evaluations}
    while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".new")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_search_after_the_running_trial(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "s.sqlite3"
    child = start(path, tmp_path / "log", 0.2)
    deadline = time.monotonic() + 60
    while count(path) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(number)
    output, _ = child.communicate(timeout=60)
    result = json.loads(output)
    assert (child.returncode, result["ended"]) == (0, "interrupted")
    trials = trials_of(path)
    assert 3 <= len(trials) < 40
    assert_whole(trials, len(trials))
    assert result["choice"]["value_us"] == min(trial.value for trial in trials)


def test_it_runs_outside_the_main_thread(tmp_path: Path) -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(tune(request(tmp_path / "s.sqlite3", fake_family.SMALL, 3)))
    )
    thread.start()
    thread.join(60)
    assert results[0].statuses == {"ok": 3}


def test_the_measured_objective_has_finals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "require_gpu", lambda gpu: None)
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    path = tmp_path / "s.sqlite3"
    result = tune(request(path, fake_family.SMALL, 40, objective="measured"))
    kinds = Counter(json.loads(line)[0] for line in log.read_text().splitlines())
    assert kinds == {"compile": 14, "measure": 14, "retime": 18}  # 5 finalists and the default, 3 rounds
    assert result.choice is not None
    assert result.choice.evidence == "measured"
    assert result.choice.config == {"tile": 4, "deep": True, "mode": "a"}
    assert (len(result.choice.finalists), result.choice.default_status) == (6, "ok")
    again = tune(request(path, fake_family.SMALL, 40, objective="measured"))
    assert again.choice == result.choice
    assert len(log.read_text().splitlines()) == 46  # neither trials nor finals are run again
    with TuningStudy.for_reading(path) as study:
        assert study.note("environment")["packages"]["optuna"]


def test_another_driver_voids_the_finals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.kernels.device import Device

    path, told = tmp_path / "s.sqlite3", Told()
    for driver in ("580.1", "580.1", "590.2"):
        device = Device(0, "NVIDIA H200", "sm_90a", 132, 1, 1, driver, gpu_card("h200"))
        monkeypatch.setattr(tune_module, "require_gpu", lambda gpu, device=device: device)
        tune(request(path, fake_family.SMALL, 3, objective="measured"), told)
    assert sum("finals are timed again" in message for message in told.messages) == 1
    with TuningStudy.for_reading(path) as study:
        assert [one["gpu"]["driver"] for one in study.note("earlier_environments")] == ["580.1"]
        assert study.note("environment")["gpu"]["driver"] == "590.2"
        assert study.note("finals")


def test_a_move_seen_by_a_process_that_died_is_seen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.kernels.device import Device

    path = tmp_path / "s.sqlite3"

    def measured(driver: str) -> None:
        device = Device(0, "NVIDIA H200", "sm_90a", 132, 1, 1, driver, gpu_card("h200"))
        monkeypatch.setattr(tune_module, "require_gpu", lambda gpu: device)
        tune(request(path, fake_family.SMALL, 3, objective="measured"))

    measured("580.1")
    store = TuningStudy.set_note

    def dies_after(study: TuningStudy, name: str, value: object) -> None:
        store(study, name, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TuningStudy, "set_note", dies_after)
        with pytest.raises(KeyboardInterrupt):
            measured("590.2")
    with TuningStudy.for_reading(path) as study:
        assert study.note("environment")["gpu"]["driver"] == "580.1" or study.note("finals") is None


def test_wrong_requests_are_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    path = tmp_path / "new" / "s.sqlite3"
    wrong = (
        ({"trials": 0}, "trials is 0"),
        ({"problem": fake_family.FakeProblem(1, 8, width=13)}, "width 13 is unlucky"),
        ({"objective": "measured"}, "needs an NVIDIA GPU"),
        ({"family": fake_family.FakeFamily()}, "cannot be reached from a worker"),
    )
    for changes, words in wrong:
        with pytest.raises(InputError, match=words):
            tune(request(path, fake_family.SMALL, **{"trials": 5, **changes}))  # type: ignore[arg-type]
    assert not path.parent.exists()


def test_a_measured_study_needs_that_very_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.kernels import device

    here = device.Device(0, "NVIDIA H200", "sm_90a", 132, 1, 1, "0", gpu_card("h200"))
    monkeypatch.setattr(device, "discover", lambda index=0: here)
    assert tune_module.require_gpu(gpu_card("h200")) is here
    with pytest.raises(InputError, match=r"the GPU here is NVIDIA H200.*--gpu h200"):
        tune_module.require_gpu(gpu_card("gb300"))


def test_a_search_stays_where_parameters_are_held(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    result = tune(request(path, fake_family.SMALL, 100, fixed={"tile": 8}))
    assert result.ended == "exhausted"
    trials = trials_of(path)
    assert {trial.config["tile"] for trial in trials} == {8}
    assert len(trials) == 2  # tile 8 is too large to be deep
    assert result.choice is not None
    assert (result.choice.config["tile"], result.identity["fixed"]) == (8, {"tile": 8})
    assert result.choice.default_us is not None
    with pytest.raises(InputError, match="another fixed"):
        tune(request(path, fake_family.SMALL, 100))
    both = request(path, fake_family.SMALL, 1, study=None, fixed={"tile": 8, "mode": "b"})
    assert both.path.name == "fake-small-tp1-rows8-gb300-predicted-mode_is_b-tile_is_8.sqlite3"
