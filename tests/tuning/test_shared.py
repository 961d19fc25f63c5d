"""Many workers on one study in a real PostgreSQL: each config once, whoever dies, drifts, or loses the database."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fake_family
import optuna
import postgres
import pytest
import shared_worker
from k3lab.kernels import InputError, config_digest
from k3lab.tuning import shared_storage
from k3lab.tuning.counted import WORKER, aside_of, counted
from k3lab.tuning.identity import StudyIdentity
from k3lab.tuning.pull import pull
from k3lab.tuning.shared_tune import AHEAD, Aside
from k3lab.tuning.study import OUTCOME, TuningStudy
from k3lab.tuning.watch import snapshot
from shared_case import (
    NAME,
    TRIALS,
    ask,
    frozen,
    measured,
    measuring,
    result,
    start,
    until,
    without_server,
)


@without_server
def test_four_workers_one_of_them_killed_try_each_config_once(address: str, tmp_path: Path) -> None:
    children = [
        start(address, tmp_path, seconds=0.3, trials=TRIALS) for _ in range(4)
    ]  # long enough to be caught in one

    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count('"measure"') >= 4)

    def held() -> bool:
        """Stop the first in the middle of a trial."""
        children[0].send_signal(signal.SIGSTOP)
        time.sleep(0.1)  # what it has asked the server for is done
        mine = f"%-{children[0].pid}-%"
        if ask(
            address,
            "SELECT count(*) FROM trials NATURAL JOIN trial_user_attributes WHERE state = 'RUNNING' AND value_json LIKE %s",
            mine,
        ):
            return True
        children[0].send_signal(signal.SIGCONT)
        return False

    until(held)
    children[0].kill()
    children[0].communicate(timeout=30)
    results = [result(child) for child in children[1:]]
    assert [one["code"] for one in results] == [0, 0, 0]
    trials = frozen(address)
    # of a trial whose worker was taken for dead when its outcome was stored, but not its end, a failed one stays beside the one that counts
    ended = [trial for trial in trials if trial.state is optuna.trial.TrialState.COMPLETE]
    assert Counter(config_digest(trial.params) for trial in ended).most_common(1)[0][1] == 1
    assert len(ended) == TRIALS
    assert all(OUTCOME in trial.user_attrs for trial in ended)
    lost = [trial for trial in trials if trial not in ended]
    assert {trial.state for trial in lost} == {optuna.trial.TrialState.FAIL}
    # what the killed one was running; on a machine that is short of time others may be taken for dead, too
    (killed,) = [trial for trial in lost if f"-{children[0].pid}-" in trial.user_attrs[WORKER]]
    again = next(trial for trial in ended if trial.params == killed.params)
    assert again.user_attrs[WORKER] != killed.user_attrs[WORKER]
    times = measured(tmp_path)
    assert {config_digest(trial.params) for trial in ended} <= set(times)
    assert sum(times.values()) <= TRIALS + AHEAD + len(lost)  # what the killed one had in hand
    assert sum(one["new_trials"] for one in results) >= TRIALS - 8
    assert {json.dumps(one["choice"]["config"], sort_keys=True) for one in results} == {json.dumps(results[0]["choice"]["config"], sort_keys=True)}  # fmt: skip
    kinds = Counter(json.loads(line)[0] for line in (tmp_path / "log").read_text().splitlines())
    assert 15 <= kinds["retime"] - 4 * 3 <= 18  # one worker's finals, four canaries
    seen = snapshot(address, rhythm=shared_worker.shared(address, "").rhythm)["studies"][0]
    assert (seen["trials"], seen["wanted"], seen["lost"], seen["left_s"]) == (TRIALS, TRIALS, len(lost), 0.0)
    assert sum(row["trials"] for row in seen["workers"]) == TRIALS + len(lost)
    assert [row["ended"] for row in seen["workers"]].count("left") == 3
    assert seen["rate"] > 0 and seen["best_us"] == min(trial.value for trial in ended)


@without_server
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"driver": "590.2"}, "its gpu.driver is '590.2', the study's '580.1'"),
        ({"gpu": "NVIDIA H200 NVL"}, "its gpu.name is 'NVIDIA H200 NVL', the study's 'NVIDIA H200'"),
        ({"identity": {"source_digest": "0" * 16}}, "its source_digest is '0000000000000000'"),
        ({"identity": {"compilers": {"triton": "1.0"}}}, "its compilers.triton is '1.0'"),
        ({"package": "9.9"}, "its packages.torch is '9.9'"),
    ],
)
def test_a_worker_that_differs_is_refused_by_the_field(
    server: postgres.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    from dataclasses import replace

    from k3lab.tuning import environment, shared_tune

    address = server.create(f"differs-{abs(hash(words))}")
    shared_worker.work(address, str(tmp_path), engine="small", trials=1)
    if fields := change.pop("identity", None):
        of = StudyIdentity.of

        def other(*args: Any, **kwargs: Any) -> StudyIdentity:
            return replace(of(*args, **kwargs), **fields)

        monkeypatch.setattr(shared_tune, "identity_of", lambda request: other(request.family, request.engine, request.problem, request.gpu, request.objective, request.fixed))  # fmt: skip
    if package := change.pop("package", None):
        here = environment.package_versions()
        monkeypatch.setattr(environment, "package_versions", lambda: {**here, "torch": package})
    with pytest.raises(InputError) as refused:
        shared_worker.work(address, str(tmp_path), engine="small", trials=2, **change)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert len(frozen(address, "fake-small-tp1-rows8-h200-measured")) == 1


@without_server
def test_a_drifting_worker_is_kept_out_and_what_it_ran_is_tried_again(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = tmp_path / "slower"
    child = start(address, tmp_path, seconds=0.05, slower=slower, canary_s=1.0)
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count('"measure"') >= 6)
    slower.write_text("1.08")  # as a GPU that runs into its power cap
    left = result(child)
    assert left["code"] == 2
    assert "the canary takes" in left["refused"] and "+8.0%" in left["refused"] and "set aside" in left["refused"]
    kept = len(counted(frozen(address), {row["worker"]: frozenset() for row in ()}))
    monkeypatch.setenv("FAKE_SLOWER", str(slower))
    with pytest.raises(Aside, match=r"\+8\.0%"):  # still slow: it joins and leaves without a trial
        shared_worker.work(address, str(tmp_path))
    monkeypatch.delenv("FAKE_SLOWER")
    time.sleep(3.2)  # its claims outlive it by the grace
    done = shared_worker.work(address, str(tmp_path))
    assert done.statuses == {"ok": 40}
    trials = frozen(address)
    assert len(trials) > 40  # what was set aside is kept, and counts no more
    workers = snapshot(address)["studies"][0]["workers"]
    assert [row["ended"].split(":")[0] for row in workers] == ["set aside", "set aside", "left"]
    slow = [trial for trial in trials if trial.user_attrs[WORKER] == workers[0]["worker"]]
    assert kept == len(slow) and workers[1]["trials"] == 0
    with Seen(address) as (study, aside):
        records = counted(study.get_trials(), aside)
    truth = {
        config_digest(trial.params): trial.value for trial in trials if trial.user_attrs[WORKER] == workers[2]["worker"]
    }
    again = [digest for trial in slow if (digest := config_digest(trial.params)) in truth]
    assert again  # tried again by a worker that does not drift
    for record in records:
        if record.digest in again:
            assert record.value == truth[record.digest]


class Seen:
    """The study and which trials are set aside, as another process sees them."""

    def __init__(self, address: str) -> None:
        self.storage = shared_storage.open_database(address, shared_storage.Rhythm())

    def __enter__(self) -> Any:
        from k3lab.tuning.claims import Claims

        rows = Claims(self.storage.engine, 1, "").workers()
        return optuna.load_study(study_name=NAME, storage=self.storage), {
            row.worker: aside_of(row.facts) for row in rows
        }

    def __exit__(self, *_: object) -> None:
        self.storage.engine.dispose()


def test_trials_around_a_drift_are_set_aside() -> None:
    canaries = [{"drift": False}, {"drift": False}, {"drift": True}, {"drift": False}]
    assert aside_of({"canaries": canaries}) == {2, 3}  # between the second and the third, and before the fourth
    assert aside_of({"canaries": canaries[:2]}) == frozenset() == aside_of({})


@without_server
def test_a_lost_database_is_waited_for_and_nothing_is_lost_or_twice(tmp_path: Path) -> None:
    with postgres.running() as server:
        address = server.create("away")
        # the grace outlasts the database's absence and its start on a slow machine: nobody may be taken for dead
        children = [start(address, tmp_path, seconds=0.5, trials=TRIALS, grace_s=15) for _ in range(2)]
        until(lambda: sum(measured(tmp_path).values()) >= 6 and len(measuring(tmp_path)) == 2)
        server.stop()
        time.sleep(1.5)
        server.start()
        results = [result(child) for child in children]
        assert [one["code"] for one in results] == [0, 0]
        assert any("the database is away" in one["said"] for one in results)
        # of a trial whose outcome was stored, but not its end, Optuna keeps a failed one beside the one that counts
        ended = [trial for trial in frozen(address) if trial.state is optuna.trial.TrialState.COMPLETE]
        times = Counter(config_digest(trial.params) for trial in ended)
        twice = [trial for trial in frozen(address) if times[config_digest(trial.params)] > 1]
        assert not twice, [(trial.number, trial.state, trial.user_attrs) for trial in twice]
        assert len(ended) == TRIALS and len(measured(tmp_path)) == TRIALS
        assert sum(measured(tmp_path).values()) == TRIALS  # what was measured meanwhile was merged, not measured again
        assert not list((tmp_path / "spool").glob("*"))


@without_server
def test_outcomes_of_a_worker_that_gave_up_are_stored_once_by_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    with postgres.running() as server:
        address = server.create("away")
        child = start(address, tmp_path, seconds=1.0, lost_s=0.5, trials=TRIALS)
        until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count('"measure"') >= 3)
        time.sleep(0.4)  # in the middle of a trial
        server.stop()
        gone = result(child)
        assert gone["code"] == 2 and "outcomes wait in" in gone["refused"]
        (file,) = (tmp_path / "spool").glob("*.jsonl")
        lines = file.read_bytes()
        assert lines
        server.start()
        time.sleep(3.2)  # by now the worker counts as dead, and its trial is another's to try
        done = shared_worker.work(address, str(tmp_path), trials=TRIALS)
        assert done.statuses == {"ok": TRIALS} and not file.exists()
        file.write_bytes(lines)  # as if it had died before the file was gone
        capsys.readouterr()
        shared_worker.work(address, str(tmp_path), trials=TRIALS)
        assert "0 outcomes that waited for the database are stored" in capsys.readouterr().err
        ended = Counter(config_digest(trial.params) for trial in frozen(address) if OUTCOME in trial.user_attrs)
        assert len(ended) == TRIALS and set(ended.values()) == {1}
        waited = {config_digest(json.loads(line)["config"]) for line in lines.splitlines()}
        assert all(measured(tmp_path)[digest] == 1 for digest in waited)


@without_server
def test_a_shared_study_becomes_a_file_like_any_other(address: str, tmp_path: Path) -> None:
    done = shared_worker.work(address, str(tmp_path), engine="small", trials=40)
    assert (done.ended, done.statuses) == ("exhausted", {"ok": 14})
    (one,) = pull(address, tmp_path / "studies", family=fake_family.FAMILY)
    assert (one["trials"], one["whole"]) == (14, True)
    with TuningStudy.for_reading(Path(one["file"])) as study:
        trials, choice, finals = study.trials(), study.note("choice"), study.note("finals")
        assert study.identity == done.identity
    assert all(trial.finished and trial.ok for trial in trials)
    assert done.choice is not None
    assert (choice["config"], choice["value_us"]) == (dict(done.choice.config), round(done.choice.value_us, 4))
    assert finals
    with pytest.raises(InputError, match="is there: --fresh keeps it"):
        pull(address, tmp_path / "studies", family=fake_family.FAMILY)
    pull(address, tmp_path / "studies", family=fake_family.FAMILY, fresh=True)
    assert len(list((tmp_path / "studies").glob("*-old1.sqlite3"))) == 1
    with pytest.raises(InputError, match="there is no study nothing in"):
        pull(address, tmp_path, "nothing")


@pytest.mark.skipif("psycopg is not" in str(postgres.missing()), reason="psycopg is not installed")
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("sqlite:///studies/a.sqlite3", "SQLite file loses data when several machines write it"),
        ("mysql://host/db", "lie in PostgreSQL"),
        ("postgresql://user@host", "names no database"),
        ("nonsense", "is an address such as"),
        ("postgresql://me:secret@127.0.0.1:1/db", r"the database postgresql://me:\*\*\*@127.0.0.1:1/db cannot be opened"),
    ],
)  # fmt: skip
def test_wrong_addresses_are_one_line_without_the_password(address: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        snapshot(address)
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)
