"""Samplers on recorded spaces, without a GPU: how many evaluations until a config within 3 % of the best is found.

A recorded space answers for every config it holds; a sampler that asks for another is told so. The cost model that one of
them follows was fitted to no recorded space of a family that has other measurements
(:func:`k3lab.tuning.calibrate.left_out`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..kernels import InputError
from ..kernels.space import Config, Constraint, Param, Space, config_digest
from . import propose
from .guided import Guided
from .outcome import Outcome, Status, failure
from .record import read
from .study import TrialRecord

WITHIN = 0.03
"""Loss against the true best that counts as found."""
SHARE = 0.15
"""Bar: part of the space evaluated until then, median of the seeds."""
SEEDS = 20
LEAST_SPACE = 200
"""Configs that a recording must hold to be a space worth the name; smaller ones are used and named."""


@dataclass(frozen=True)
class Recorded:
    """A recorded space with its outcomes."""

    name: str
    family: str
    data: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read a recording.

        Raises:
            InputError: it is none, or holds no config that ended ok.
        """
        data = read(path)
        if not any(one["status"] == "ok" for one in data["configs"]):
            raise InputError(f"recording {path} holds no config that ended ok: there is no best to find")
        return cls(path.name.removesuffix(".json.gz"), str(data["identity"]["family"]), data)

    @cached_property
    def outcomes(self) -> dict[str, Mapping[str, Any]]:
        """Config digest to what became of it."""
        return {config_digest(one["config"]): one for one in self.data["configs"]}

    @cached_property
    def best_us(self) -> float:
        """The true best."""
        return min(float(one["value"]) for one in self.data["configs"] if one["status"] == "ok")

    @cached_property
    def space(self) -> Space:
        """The recorded configs as a space of their own."""
        told = self.data["space"]
        return Space(
            params=tuple(Param(one["name"], tuple(one["values"]), one["help"]) for one in told["params"]),
            constraints=(Constraint(lambda config: config_digest(config) in self.outcomes, "not recorded"),),
            default=told["default"],
        )

    def outcome(self, config: Config) -> Outcome:
        """What became of a config.

        Raises:
            InputError: it was not recorded.
        """
        found = self.outcomes.get(config_digest(config))
        if found is None:
            raise InputError(f"{self.name} does not hold the config {dict(config)}: a replay invents no outcome")
        if found["status"] != "ok":
            return failure(Status(found["status"]), found.get("reason", ""))
        return Outcome(Status.OK, value=float(found["value"]))

    @cached_property
    def predicted(self) -> dict[str, float]:
        """Config digest to what the cost model says, from the recorded resources."""
        from .cubin import KernelResources
        from .measurements import Measured
        from .validate import guess_us

        identity = self.data["identity"]
        found = {}
        for digest, one in self.outcomes.items():
            kernels = tuple(KernelResources(**each) for each in one.get("resources") or ())
            if not kernels:
                found[digest] = math.inf
                continue
            asked = Measured(
                identity["family"], identity["engine"], identity["gpu"], identity["problem"], one["config"], 1.0, kernels, True
            )  # fmt: skip
            found[digest] = guess_us(asked)
        return found


class Random(propose.Tpe):
    """A fair draw from what was not tried, the default first: what any sampler must beat."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.name = "random"

    def _made(self, known: Sequence[TrialRecord], base: int, before: Sequence[str]) -> list[Config]:
        rng, taken = random.Random(f"{self._seed}/{base}"), set(before)
        made: list[Config] = []
        if base == 0 and config_digest(self._space.default) not in taken:
            made.append(dict(self._space.default))
        while len(made) < propose.BATCH:
            found = self._random(rng, taken | {config_digest(one) for one in made})
            if found is None:
                break
            made.append(found)
        return made


def guided(one: Recorded, seed: int) -> propose.Proposer:
    """The sampler that follows the cost model, on a recording."""
    return Guided(one.space, seed, lambda asked: [one.predicted[config_digest(config)] for config in asked])


SAMPLERS: dict[str, Callable[[Recorded, int], propose.Proposer]] = {
    "random": lambda one, seed: Random(one.space, seed),
    "tpe": lambda one, seed: propose.Tpe(one.space, seed),
    "guided": guided,
}
"""By name; ``random`` is the yardstick."""
DEFAULT = "guided"
"""The sampler of a measured search without known winners."""


@dataclass(frozen=True)
class Run:
    """One sampler with one seed on one space."""

    evaluations: int
    """Until the first config within :data:`WITHIN` of the best."""
    regret: float
    """Loss against the true best after :data:`SHARE` of the space."""


def run(one: Recorded, sampler: str, seed: int) -> Run:
    """Replay a sampler until it has found the best's neighbourhood; configs that failed count as evaluations."""
    proposer, trials = SAMPLERS[sampler](one, seed), list[TrialRecord]()
    allowed = max(1, int(SHARE * len(one.outcomes)))
    best, regret, needed = math.inf, math.inf, 0
    while len(trials) < len(one.outcomes):
        config = proposer.propose(trials)
        if config is None:
            break
        outcome = one.outcome(config)
        trials.append(TrialRecord(len(trials), config, config_digest(config), outcome, True))
        best = min(best, trials[-1].value)
        if len(trials) == allowed:
            regret = best / one.best_us - 1
        if not needed and best <= one.best_us * (1 + WITHIN):
            needed = len(trials)
        if needed and len(trials) >= allowed:
            break
    return Run(needed or len(one.outcomes), regret)


def replay(spaces: Sequence[Recorded], samplers: Sequence[str], seeds: int = SEEDS) -> list[dict[str, Any]]:
    """One row a space and sampler: medians over the seeds.

    Raises:
        InputError: an unknown sampler, no space, or fewer than one seed.
    """
    if unknown := [name for name in samplers if name not in SAMPLERS]:
        raise InputError(f"unknown sampler {unknown[0]!r}; samplers: {', '.join(SAMPLERS)}")
    if not spaces or seeds < 1:
        raise InputError("a replay needs at least one recording and one seed")
    rows = []
    for one in spaces:
        for name in samplers:
            runs = [run(one, name, seed) for seed in range(seeds)]
            evaluations = statistics.median(each.evaluations for each in runs)
            rows.append({
                "space": one.name, "family": one.family, "configs": len(one.outcomes), "sampler": name, "seeds": seeds,
                "evaluations": evaluations, "most_evaluations": max(each.evaluations for each in runs),
                "share": round(evaluations / len(one.outcomes), 4),
                "regret": round(statistics.median(each.regret for each in runs), 4),
            })  # fmt: skip
    return rows


def chosen_without(rows: Sequence[Mapping[str, Any]], family: str) -> tuple[str, tuple[str, ...]]:
    """The sampler a family gets: the one that needs the least share of the other families' spaces, each family alike.

    Returns:
        Its name, and the families it was chosen on: where there are no others, the default, on none.
    """
    shares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["family"] != family:
            shares.setdefault(row["sampler"], {}).setdefault(row["family"], []).append(row["share"])
    if not shares:
        return DEFAULT, ()
    means = {
        name: statistics.mean(statistics.mean(own) for own in by_family.values()) for name, by_family in shares.items()
    }
    order = list(SAMPLERS)
    best = min(means, key=lambda name: (means[name], -order.index(name)))
    return best, tuple(sorted(next(iter(shares.values()))))


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each space the sampler that its family gets, whether it keeps the bar, and whether random search is beaten."""
    found = []
    for space in dict.fromkeys(row["space"] for row in rows):
        own = {row["sampler"]: row for row in rows if row["space"] == space}
        first = next(iter(own.values()))
        name, on = chosen_without(rows, first["family"])
        if name not in own:
            continue
        mine = own[name]
        beaten = None  # nobody beats a draw whose first config, the default, is as good as the best
        if "random" in own and name != "random" and own["random"]["evaluations"] > 1:
            beaten = mine["evaluations"] < own["random"]["evaluations"]
        found.append({
            "space": space, "family": first["family"], "sampler": name, "chosen_on": list(on), "share": mine["share"],
            "within_bar": mine["share"] <= SHARE, "random_beaten": beaten, "whole_space": first["configs"] >= LEAST_SPACE,
        })  # fmt: skip
    return found
