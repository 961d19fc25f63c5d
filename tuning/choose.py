"""Which config wins, and why. A difference inside the noise (or the model's error) is no difference."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..kernels.space import Config, Space, config_digest
from .confirm import Standing, better_in_chain, dropped_because
from .storage import reading
from .study import TrialRecord, TuningStudy

FINALISTS = 5
"""Fastest configs that reach the finals; the default comes on top."""
LEAST_BAND = 0.005
"""Relative difference nobody should act on, however small the spread."""
MODEL_ERROR = 0.25
"""Relative error of a prediction whose model states none as a number."""


@dataclass(frozen=True)
class Finalist:
    """One candidate of the finals."""

    trial: int
    digest: str
    config: Config
    value_us: float
    band: float
    """Relative difference within which another config is as good."""
    is_default: bool
    chain: Mapping[str, Any] | None = None
    """What it adds to a predecessor (see :meth:`k3lab.tuning.chain_contest.Link.to_json`); None where it was not timed there."""

    @property
    def standing(self) -> Standing:
        """As the rule of the chain sees it."""
        return Standing(f"trial {self.trial}", self.value_us, self.value_us * self.band, self.chain)

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self) | {
            "config": dict(self.config),
            "value_us": round(self.value_us, 4),
            "band": round(self.band, 4),
        }


@dataclass(frozen=True)
class Choice:
    """The winner of a study, with everything needed to judge the decision."""

    config: Config
    digest: str
    trial: int
    value_us: float
    evidence: str
    reason: str
    tie_band: float
    """Relative."""
    tie_band_source: str
    tied: tuple[int, ...]
    """Trials inside the band of the fastest, the fastest first."""
    default_us: float | None
    """The default's time; None where the default did not end ok."""
    default_status: str
    margin_over_default: float | None
    """Part of the default's time that is saved."""
    runner_up: Mapping[str, Any] | None
    """Next finalist by time, with ``margin``: its time over the winner's, less one."""
    finalists: tuple[Finalist, ...]
    in_situ: Mapping[str, Any] | None = None
    """What the captured layer said, both numbers of each config that was tried there; None where none was."""
    flip_rate: float | None = None
    """Part of repetitions of the finals, drawn from their own rounds, in which another config would have won; None where nothing
    was timed more than once."""
    chain: Mapping[str, Any] | None = None
    """The winner's figures behind a predecessor, beside ``value_us`` and never in its place; None where there are none."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self) | {
            "config": dict(self.config),
            "value_us": round(self.value_us, 4),
            "tied": list(self.tied),
            "finalists": [finalist.to_json() for finalist in self.finalists],
        }


def finalists(trials: Sequence[TrialRecord], space: Space) -> list[TrialRecord]:
    """The fastest ok trials of legal configs, fastest first, and the default if it ended ok."""
    legal = (trial for trial in trials if trial.ok and space.illegal(trial.config) is None)
    ranked = sorted(legal, key=lambda trial: (trial.value, trial.digest))
    chosen = ranked[:FINALISTS]
    default = config_digest(space.default)
    if not any(trial.digest == default for trial in chosen):
        chosen += [trial for trial in ranked if trial.digest == default]
    return chosen


def without_finals(trials: Sequence[TrialRecord], space: Space, finals: Mapping[str, Any]) -> list[TrialRecord]:
    """Finalists of a measured study that were not timed again: a search's quick times are not compared with finals."""
    return [trial for trial in finalists(trials, space) if trial.digest not in finals]


def distance(config: Config, space: Space) -> tuple[int, int]:
    """How far a config is from the default: parameters that differ, then steps along their value lists."""
    differing = steps = 0
    for param in space.params:
        here, there = param.values.index(config[param.name]), param.values.index(space.default[param.name])
        differing += here != there
        steps += abs(here - there)
    return differing, steps


def _weight(trial: TrialRecord) -> tuple[int, int]:
    """Shared memory and registers of all its launches: of two configs the smaller leaves more room beside it."""
    shared = registers = 0
    for kernel in trial.outcome.resources if trial.outcome else ():
        shared += int(kernel.get("static_shared_bytes", 0)) + int(kernel.get("dynamic_shared_bytes", 0))
        registers += int(kernel.get("registers", 0)) * int(kernel.get("threads", 0))
    return shared, registers


def _measured(trial: TrialRecord, finals: Mapping[str, Any]) -> tuple[float, float] | None:
    """(microseconds, band) of a measured trial; None where the finals refused it."""
    spread = float((trial.outcome.timing or {}).get("spread", 0.0)) if trial.outcome else 0.0
    final = finals.get(trial.digest)
    if final is None:
        return trial.value, max(spread, LEAST_BAND)
    if final["failed"]:
        return None
    values = final["values_us"]
    middle = statistics.median(values)
    return middle, max((max(values) - min(values)) / middle, *final["spreads"], LEAST_BAND)


def _predicted(trial: TrialRecord) -> tuple[float, float]:
    """(microseconds, band) of a predicted trial: the model's stated relative error."""
    stated = (trial.outcome.prediction or {}).get("relative_error") if trial.outcome else None
    return trial.value, float(stated) if isinstance(stated, (int, float)) else MODEL_ERROR


def _band_source(trial: TrialRecord) -> str:
    """Where a predicted trial's band comes from, as its prediction says."""
    prediction = (trial.outcome.prediction or {}) if trial.outcome else {}
    return str(prediction.get("band_source", "the cost model's stated error"))


def pick(
    trials: Sequence[TrialRecord], space: Space, objective: str, finals: Mapping[str, Any] | None = None,
    in_situ: Mapping[str, Any] | None = None,
) -> Choice | None:  # fmt: skip
    """The winner among the finalists, or None where no trial ended ok.

    The fastest finalist sets the band; of all finalists inside it the one nearest the default wins, then
    the one that takes less shared memory and registers. Where finals have chain figures, one that wins alone
    but not there is dropped (:func:`k3lab.tuning.confirm.better_in_chain`). The same trials give the same choice.

    Args:
        objective: ``measured`` or ``predicted``: where the band comes from, and the evidence word.
        finals: config digest to the finals' ``values_us``, ``spreads``, ``failed`` and, where there is one, ``chain``.
        in_situ: what the captured layer chose of this engine, if it did (:meth:`k3lab.tuning.in_situ.Verdict.to_json`): it has
            the last word, and the isolated figure stays beside it.
    """
    default = config_digest(space.default)
    by_digest = {trial.digest: trial for trial in trials}
    pool: list[Finalist] = []
    for trial in finalists(trials, space):
        figures = _measured(trial, finals or {}) if objective == "measured" else _predicted(trial)
        if figures is not None:
            chain = (finals or {}).get(trial.digest, {}).get("chain")
            pool.append(Finalist(trial.number, trial.digest, trial.config, *figures, trial.digest == default, chain))
    if not pool:
        return None
    simplicity = {one.digest: (distance(one.config, space), _weight(by_digest[one.digest]), one.digest) for one in pool}
    pool.sort(key=lambda one: (one.value_us, one.digest))
    fastest, tied, alone, winner = _decided(pool, simplicity)
    taker = winner.standing if winner is not alone else None
    band = max(one.band for one in tied)
    source = "measured spread" if objective == "measured" else _band_source(by_digest[winner.digest])
    others = [one for one in pool if one is not winner]
    runner_up = others[0].to_json() | {"margin": round(others[0].value_us / winner.value_us - 1, 4)} if others else None
    reason = _reason(winner, fastest, tied, others, band, source)
    if taker is not None:
        reason = dropped_because(alone.standing, taker)
    if in_situ is not None and (there := next((one for one in pool if one.digest == in_situ["digest"]), None)):
        if there is not winner:
            winner = there
            others = [one for one in pool if one is not winner]
            runner_up = others[0].to_json() | {"margin": round(others[0].value_us / winner.value_us - 1, 4)}
        reason = f"in the captured layer: {in_situ['reason']}"
    default_trial = by_digest.get(default)
    default_us = next((one.value_us for one in pool if one.is_default), None)
    default_status = str(default_trial.outcome.status) if default_trial and default_trial.outcome else "not tried"
    if default_status == "ok" and default_us is None:
        default_status = "failed in the finals"
    return Choice(
        config=winner.config,
        digest=winner.digest,
        trial=winner.trial,
        value_us=winner.value_us,
        evidence=objective,
        reason=reason,
        tie_band=round(band, 4),
        tie_band_source=source,
        tied=tuple(one.trial for one in tied),
        default_us=default_us,
        default_status=default_status,
        margin_over_default=round(1 - winner.value_us / default_us, 4) if default_us else None,
        runner_up=runner_up,
        finalists=tuple(pool),
        in_situ=in_situ,
        flip_rate=_flip_rate(winner, pool, simplicity, finals or {}) if objective == "measured" else None,
        chain=winner.chain,
    )


Simplicity = Mapping[str, tuple[Any, ...]]
"""Config digest to what is the less the simpler the config is."""


def _decided(pool: Sequence[Finalist], simplicity: Simplicity) -> tuple[Finalist, list[Finalist], Finalist, Finalist]:
    """The fastest, those tied with it, the simplest of these, and who wins: that one, or who takes its place in the chain."""
    fastest = min(pool, key=lambda one: (one.value_us, one.digest))
    tied = [one for one in pool if one.value_us <= fastest.value_us * (1 + max(one.band, fastest.band))]
    alone = min(tied, key=lambda one: simplicity[one.digest])
    taker = better_in_chain(alone.standing, [one.standing for one in pool if one is not alone])
    return fastest, tied, alone, next((one for one in pool if one.standing == taker), alone) if taker else alone


REPETITIONS = 200


def _flip_rate(
    winner: Finalist, pool: Sequence[Finalist], simplicity: Simplicity, finals: Mapping[str, Any]
) -> float | None:
    """See :attr:`Choice.flip_rate`: rounds are drawn with replacement, by the same rule and bands; the same finals give the same rate."""
    rounds = {one.digest: finals.get(one.digest, {}).get("values_us", ()) for one in pool}
    if len(pool) < 2 or any(len(values) < 2 for values in rounds.values()):
        return None
    rng = random.Random(repr(sorted(rounds.items())))
    flips = 0
    for _ in range(REPETITIONS):
        drawn = {digest: statistics.median(rng.choices(values, k=len(values))) for digest, values in rounds.items()}
        again = [replace(one, value_us=drawn[one.digest]) for one in pool]
        flips += _decided(again, simplicity)[3].digest != winner.digest
    return flips / REPETITIONS


def _reason(
    winner: Finalist, fastest: Finalist, tied: Sequence[Finalist], others: Sequence[Finalist], band: float, source: str
) -> str:
    what = "the default config" if winner.is_default else f"trial {winner.trial}"
    if not others:
        return f"{what} is the only config that ended ok"
    if len(tied) == 1:
        ahead = others[0].value_us / winner.value_us - 1
        return f"{what} is the fastest, {ahead:.1%} ahead of trial {others[0].trial}, outside the band of {band:.1%} ({source})"
    simpler = "it is the default" if winner.is_default else "it is nearest the default"
    if winner is fastest:
        return f"{what} is the fastest of {len(tied)} within {band:.1%} of each other ({source}), and {simpler}"
    behind = winner.value_us / fastest.value_us - 1
    return (
        f"{what} is {behind:.1%} behind the fastest (trial {fastest.trial}), a tie within {band:.1%} ({source}) "
        f"of {len(tied)} configs: {simpler} among them"
    )


def choose(study: TuningStudy, space: Space) -> Choice | None:
    """The winner of an open study; see :func:`pick`.

    Raises:
        InputError: what the study holds of its trials or finals is damaged.
    """
    trials, identity, finals = study.trials(), study.identity, study.note("finals")
    verdict = (study.note("contest") or {}).get("in_situ")
    own = verdict if verdict and verdict["engine"] == identity["engine"] else None
    with reading(study.path):
        return pick(trials, space, identity["objective"], finals, own)
