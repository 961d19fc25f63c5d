"""How trials of a shared study begin, change hands and end, each step between two workers of one process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import shared_worker
import sqlalchemy
from k3lab.kernels import config_digest
from k3lab.tuning import shared_storage
from k3lab.tuning.counted import counted
from k3lab.tuning.outcome import Outcome, Status
from k3lab.tuning.shared_study import Shared, SharedStudy
from k3lab.tuning.study import OUTCOME, TrialRecord
from k3lab.tuning.tune import identity_of
from shared_case import (
    OK,
    SPACE,
    frozen,
    joined,
    without_server,
)


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
