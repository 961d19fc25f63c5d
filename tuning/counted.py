"""Which trials of a shared study count: one a config, and none of a worker whose canary drifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels.space import config_digest
from .outcome import Status, failure
from .study import OUTCOME, TrialRecord, record_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

WORKER, CANARY = "k3lab:worker", "k3lab:canary"
"""Attributes of a trial: who ran it, and how many canaries that worker had timed by then."""


def aside_of(facts: Mapping[str, Any]) -> frozenset[int]:
    """Counts of canaries at which a worker's trials are set aside: the canary before them, or the one after, drifted."""
    canaries = facts.get("canaries", ())
    return frozenset(place + step for place, one in enumerate(canaries) if one["drift"] for step in (0, 1))


def set_aside(trial: FrozenTrial, aside: Mapping[str, frozenset[int]]) -> bool:
    """Whether a drifting worker ran the trial; ``aside``: of each worker, see :func:`aside_of`."""
    attrs = trial.user_attrs
    return attrs.get(CANARY, -1) in aside.get(attrs.get(WORKER, ""), ())


def counted(trials: Sequence[FrozenTrial], aside: Mapping[str, frozenset[int]]) -> list[TrialRecord]:
    """One trial a config, in the order of their numbers.

    The first that ended with an outcome counts; else the one that runs or waits; else, where its workers died as often
    as it was retried, a crash. Trials that a drifting worker ran do not count at all.
    """
    groups: dict[str, list[FrozenTrial]] = {}
    for trial in trials:
        if not set_aside(trial, aside):
            groups.setdefault(config_digest(trial.params), []).append(trial)
    found = []
    for group in groups.values():
        ended = [trial for trial in group if trial.state.is_finished() and OUTCOME in trial.user_attrs]
        alive = [trial for trial in group if not trial.state.is_finished()]
        if one := next(iter(ended or alive[-1:]), None):
            found.append(record_of(one))
        else:
            times = "once" if len(group) == 1 else f"{len(group)} times"
            record = record_of(group[-1])
            found.append(
                TrialRecord(record.number, record.config, record.digest, failure(Status.CRASHED, f"its worker died, {times}"), True)
            )  # fmt: skip
    return sorted(found, key=lambda trial: trial.number)
