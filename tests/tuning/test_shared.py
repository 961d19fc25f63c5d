"""Many workers on one study in a real PostgreSQL: each config once, whoever dies, drifts, or loses the database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_family
import optuna
import postgres
import pytest
import shared_worker
import sqlalchemy
from k3lab.kernels import InputError, config_digest
from k3lab.tuning import shared_storage
from k3lab.tuning.counted import WORKER, aside_of, counted
from k3lab.tuning.identity import StudyIdentity
from k3lab.tuning.outcome import Outcome, Status
from k3lab.tuning.pull import pull
from k3lab.tuning.shared_study import Shared, SharedStudy
from k3lab.tuning.shared_tune import AHEAD, Aside
from k3lab.tuning.study import OUTCOME, TrialRecord, TuningStudy
from k3lab.tuning.tune import identity_of
from k3lab.tuning.watch import snapshot

SCRIPT = str(Path(shared_worker.__file__))
SPACE = fake_family.LARGE.space(fake_family.FakeProblem(1, 8), None)
TRIALS = 24
NAME = "fake-large-tp1-rows8-h200-measured"
without_server = pytest.mark.skipif(bool(postgres.missing()), reason=str(postgres.missing()))


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.running() as one:
        yield one


@pytest.fixture
def address(server: postgres.Server, request: pytest.FixtureRequest) -> str:
    """A database of the test's own."""
    return server.create(request.node.name.split("[")[0][:60])


def start(address: str, folder: Path, *, seconds: float = 0.0, slower: Path | None = None, **asked: Any) -> subprocess.Popen[str]:  # fmt: skip
    told = json.dumps({"address": address, "folder": str(folder), **asked})
    environment = {**os.environ, "FAKE_SECONDS": str(seconds), "FAKE_LOG": str(folder / "log"), "OMP_NUM_THREADS": "1"}
    if slower:
        environment["FAKE_SLOWER"] = str(slower)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, SCRIPT, told], env=environment, stdout=pipe, stderr=pipe, text=True)


def result(child: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = child.communicate(timeout=100)
    assert output, errors
    return {**json.loads(output), "said": errors, "code": child.returncode}


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def frozen(address: str, name: str = NAME) -> list[optuna.trial.FrozenTrial]:
    """Every trial as Optuna itself tells it, as its dashboard does."""
    url = address.replace("postgresql:", "postgresql+psycopg:")
    return optuna.load_study(study_name=name, storage=url).get_trials()


def ask(address: str, query: str, *values: object) -> Any:
    """The first value of an SQL query."""
    import psycopg

    with psycopg.connect(address) as connection:
        found = connection.execute(query, values).fetchone()
    return found[0] if found else None


def measured(folder: Path) -> Counter[str]:
    """How often each config was measured."""
    if not (folder / "log").exists():
        return Counter()
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return Counter(digest for kind, digest, _ in lines if kind == "measure")


def joined(address: str, folder: Path, name: str = "s", **asked: Any) -> SharedStudy:
    """This process as a worker."""
    request = shared_worker.request(objective="predicted", **asked)
    return SharedStudy.join(name, identity_of(request), {}, shared_worker.shared(address, str(folder), **asked))


def measuring(folder: Path) -> set[int]:
    """Processes that measured something."""
    return {pid for kind, _, pid in map(json.loads, (folder / "log").read_text().splitlines()) if kind == "measure"}


OK = Outcome(Status.OK, value=3.0)


@pytest.mark.slow
@without_server
def test_four_workers_one_of_them_killed_try_each_config_once(address: str, tmp_path: Path) -> None:
    children = [start(address, tmp_path, seconds=0.3, trials=TRIALS) for _ in range(4)]  # long enough to be caught in one

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


@pytest.mark.slow
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


@pytest.mark.slow
@without_server
def test_a_lost_database_is_waited_for_and_nothing_is_lost_or_twice(tmp_path: Path) -> None:
    with postgres.running() as server:
        address = server.create("away")
        children = [start(address, tmp_path, seconds=0.5, trials=TRIALS) for _ in range(2)]
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


@pytest.mark.slow
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
def test_a_config_is_claimed_once_and_no_more_than_asked_for(address: str, tmp_path: Path) -> None:
    one, two = joined(address, tmp_path), joined(address, tmp_path)
    assert one.claim("a", 3) and one.claim("a", 3)
    assert not two.claim("a", 3)
    assert two.claim("b", 3) and two.claim("c", 3)
    assert not one.claim("d", 3)  # full
    assert one.duty("k3lab:finals", 60) and one.claim("a", 3)  # a duty is no config
    assert not two.duty("k3lab:finals", 60)
    two.close()  # it tried neither b nor c
    assert set(one.claims.all()) == {"a", "k3lab:finals"}
    assert one.claim("d", 3)
    one.close()


@without_server
def test_a_config_that_kills_its_workers_is_a_crash_in_the_end(address: str, tmp_path: Path) -> None:
    rhythm = shared_storage.Rhythm(beat_s=1, grace_s=1, retries=1)
    where = Shared(address, None, rhythm, spool=tmp_path / "spool")
    identity = identity_of(shared_worker.request(objective="predicted"))
    config = dict(SPACE.default)
    for turn in range(2):
        dying = SharedStudy.join("s", identity, {}, where)
        if turn:
            dying.reap()
            trial = dying.take_waiting()
        else:
            assert dying.claim(config_digest(config), 9)
            trial = dying.begin(config, SPACE)
        assert trial is not None and trial.config == config
        assert dying._heart is not None
        dying._heart.close()  # as kill -9
        time.sleep(2.2)
    last = SharedStudy.join("s", identity, {}, where)
    last.reap()
    assert last.take_waiting() is None
    (record,) = last.trials()
    assert record.finished and record.outcome is not None
    assert (record.outcome.status, record.outcome.reason) == (Status.CRASHED, "its worker died, 2 times")
    last.close()


@without_server
def test_who_was_taken_for_dead_and_was_not_does_not_store_twice(address: str, tmp_path: Path) -> None:
    slow, quick = joined(address, tmp_path, grace_s=1), joined(address, tmp_path, grace_s=1)
    config = dict(SPACE.default)
    assert slow.claim(config_digest(config), 9)
    trial = slow.begin(config, SPACE)
    assert trial is not None and slow._heart is not None
    slow._heart.close()  # as a machine that was suspended
    time.sleep(2.2)
    quick.reap()
    again = quick.take_waiting()
    assert again is not None and again.config == config
    quick.finish(again, OK)
    slow.finish(trial, Outcome(Status.OK, value=9.0))  # wakes up
    (record,) = quick.trials()
    assert (record.value, record.finished) == (3.0, True)
    assert [one.value for one in frozen(address, "s") if OUTCOME in one.user_attrs] == [3.0]
    for study in (slow, quick):
        study.close()


@without_server
def test_an_outcome_that_comes_while_its_trial_is_queued_again_is_stored_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna ends a stale trial, and later queues it again: its worker, not dead after all, finishes in between."""
    slow, quick = joined(address, tmp_path, grace_s=1), joined(address, tmp_path, grace_s=1)
    config = dict(SPACE.default)
    assert slow.claim(config_digest(config), 9)
    trial = slow.begin(config, SPACE)
    assert trial is not None and slow._heart is not None
    slow._heart.close()
    time.sleep(2.2)
    queue_again = quick._storage.get_heartbeat_stale_trial_callback()
    finishing = threading.Thread(target=slow.finish, args=(trial, OK))

    def late(study: optuna.Study, failed: optuna.trial.FrozenTrial) -> None:
        finishing.start()
        finishing.join(1.0)
        queue_again(study, failed)

    monkeypatch.setattr(quick._storage, "get_heartbeat_stale_trial_callback", lambda: late)
    quick.reap()
    finishing.join(20)
    if (left := quick.take_waiting()) is not None:
        quick.finish(left, Outcome(Status.OK, value=4.0))
    assert [one.value for one in frozen(address, "s") if one.state is optuna.trial.TrialState.COMPLETE] == [3.0]
    for study in (slow, quick):
        study.close()


@without_server
def test_a_claim_that_changes_hands_while_its_trial_begins_makes_one_trial(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sees its claim, is suspended until another takes it for dead, and wakes up."""
    slow, quick = joined(address, tmp_path, grace_s=1), joined(address, tmp_path, grace_s=1)
    config = dict(SPACE.default)
    digest = config_digest(config)
    assert slow.claim(digest, 9)
    begun: list[TrialRecord | None] = []

    def takes() -> None:
        quick.claims.take_over(digest)
        begun.append(quick.begin(config, SPACE))

    other = threading.Thread(target=takes)
    create = slow._storage.create_new_trial

    def suspended(study: int, template_trial: optuna.trial.FrozenTrial) -> int:
        other.start()
        other.join(1.0)
        return create(study, template_trial)

    monkeypatch.setattr(slow._storage, "create_new_trial", suspended)
    begun.append(slow.begin(config, SPACE))
    other.join(20)
    assert len([one for one in begun if one is not None]) == 1
    assert len(frozen(address, "s")) == 1
    for study in (slow, quick):
        study.close()


@without_server
def test_a_worker_that_died_before_its_first_heartbeat_is_missed_too(address: str, tmp_path: Path) -> None:
    dying, other = joined(address, tmp_path, grace_s=1), joined(address, tmp_path, grace_s=1)
    config = dict(SPACE.default)
    dying.claim(config_digest(config), 9)
    trial = dying.begin(config, SPACE)
    assert trial is not None and dying._heart is not None
    dying._heart.close()
    with dying._storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("DELETE FROM trial_heartbeats"))
    other.reap()  # gives it one
    time.sleep(2.2)
    other.reap()
    left = other.take_waiting()
    assert left is not None and left.config == config
    other.close()


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


def test_of_one_config_the_first_that_ended_counts() -> None:
    def trial(number: int, state: str, **attrs: Any) -> optuna.trial.FrozenTrial:
        made = optuna.create_trial(
            state=optuna.trial.TrialState[state], value=1.0 if state == "COMPLETE" else None, user_attrs=attrs,
            params={"p": 1}, distributions={"p": optuna.distributions.CategoricalDistribution((1, 2))},
        )  # fmt: skip
        made.number = number
        return made

    def records(*trials: optuna.trial.FrozenTrial, aside: dict[str, frozenset[int]] | None = None) -> list[TrialRecord]:
        return counted(trials, aside or {})

    done = {OUTCOME: OK.to_json(), "k3lab:worker": "w", "k3lab:canary": 1}
    (one,) = records(trial(0, "FAIL"), trial(1, "COMPLETE", **done), trial(2, "COMPLETE", **done))
    assert (one.number, one.ok) == (1, True)
    (one,) = records(trial(0, "FAIL"), trial(1, "WAITING"))
    assert (one.number, one.finished) == (1, False)
    (one,) = records(trial(0, "FAIL", **done), trial(1, "WAITING", **done))  # dead between its outcome and its end
    assert (one.number, one.ok) == (0, True)
    assert records(trial(0, "COMPLETE", **done), aside={"w": frozenset({1})}) == []
    (one,) = records(trial(0, "FAIL"))
    assert one.outcome is not None and one.outcome.reason == "its worker died, once"
