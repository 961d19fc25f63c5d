"""A search that begins where the cost model points and corrects it by what is measured.

A fair draw of the space is compiled and predicted ahead (no GPU); the best predicted are measured first, and what the
model was off by there is carried over to configs near them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ..kernels.space import Config, Space, config_digest
from .propose import BATCH, ENUMERABLE, Predict, Tpe, draws, neighbours
from .study import TrialRecord

SCREEN = 64
"""Configs of a space that are predicted before any is measured; all of a smaller one. Not by the trials asked for: a study that
goes on with more must go on as one that began with them."""
FREE = 1
"""Of a batch: fair draws from the whole space, so that a wrong model cannot hide a good config."""
AROUND = 2
"""Best measured configs whose neighbours are predicted."""
LENGTH, NOISE, TRUST = 0.5, 0.05, 0.15
"""Of the model's error as a field over the space: how far it reaches (a parameter's whole range is 1), what of it is noise, how
large it is at least (standard deviation of its logarithm)."""


def place(space: Space, config: Config) -> list[float]:
    """A config as a point: each parameter's position among its values, 0 to 1; one axis a value where they have no order."""
    found: list[float] = []
    for param in space.params:
        at, ordered = param.values.index(config[param.name]), all(type(value) in (int, float) for value in param.values)
        if ordered or len(param.values) == 2:
            found.append(at / max(len(param.values) - 1, 1))
        else:
            found += [float(at == index) / math.sqrt(2) for index in range(len(param.values))]
    return found


def corrected(
    points: Sequence[Sequence[float]],
    predicted: Sequence[float],
    known: Sequence[Sequence[float]],
    off: Sequence[float],
) -> list[float]:
    """Predicted microseconds, each times what the model was off by near it: a Gaussian process over the logarithm of its error.

    Args:
        points: of the configs to judge.
        predicted: their times by the model.
        known: points that were measured.
        off: logarithm of measured over predicted at each of these.
    """
    import numpy as np

    if not known or not points:
        return list(predicted)
    here, there, values = np.asarray(points), np.asarray(known), np.asarray(off)
    level = float(np.median(values))
    size = max(TRUST, float(np.std(values)))  # a model that turns out worse is corrected more

    def near(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        squares = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
        return size**2 * np.exp(-squares / (2 * LENGTH**2))

    weights = np.linalg.solve(near(there, there) + NOISE**2 * np.eye(len(there)), values - level)
    return [float(us * math.exp(level + move)) for us, move in zip(predicted, near(here, there) @ weights, strict=True)]


class Guided(Tpe):
    """The cost model's order, corrected batch by batch; :class:`Tpe` where the predicted configs are used up.

    Neighbours of the best that were measured are predicted, too, as the search goes on. The proposals are a function of the
    trials so far, the seed and the predictions.

    Args:
        space: where to search.
        seed: of all draws.
        predict: the cost model.
        screen: configs to predict before the first is measured.
    """

    def __init__(self, space: Space, seed: int, predict: Predict, screen: int = SCREEN) -> None:
        super().__init__(space, seed)
        self.name = "cost model, corrected by measurements"
        self._predict, self._screen = predict, screen
        self._times: dict[str, float] = {}
        self._drawn_first: list[Config] | None = None

    def pool(self, known: Sequence[TrialRecord]) -> dict[str, Config]:
        """Digest to config of all that is predicted when these trials are known, and can be built."""
        if self._drawn_first is None:
            self._drawn_first = self._first()
        wanted = {config_digest(config): config for config in self._drawn_first}
        for number in range(BATCH, len(known) + 1, BATCH):
            best = sorted((one for one in known[:number] if one.ok), key=lambda one: (one.value, one.digest))[:AROUND]
            for one in best:
                wanted |= {config_digest(config): config for config in neighbours(self._space, one.config)}
        new = {digest: config for digest, config in wanted.items() if digest not in self._times}
        if new:
            self._times |= dict(zip(new, self._predict(list(new.values())), strict=True))
        return {digest: config for digest, config in wanted.items() if 0 < self._times[digest] < math.inf}

    def _first(self) -> list[Config]:
        """The default and a fair draw; all legal configs of a small space."""
        rng = random.Random(f"{self._seed}/screen")
        if self._space.size <= ENUMERABLE:
            legal = list(self._space.legal)
            return [
                dict(self._space.default),
                *(legal if len(legal) <= self._screen else rng.sample(legal, self._screen)),
            ]
        found = {config_digest(self._space.default): dict(self._space.default)}
        for one in draws(self._space, rng, 50 * self._screen):
            found.setdefault(config_digest(one), one)
            if len(found) > self._screen:
                break
        return list(found.values())

    def _made(self, known: Sequence[TrialRecord], base: int, before: Sequence[str]) -> list[Config]:
        """The default first, then the best by the corrected model, then fair draws."""
        taken = set(before)
        made: list[Config] = []

        def take(config: Config) -> None:
            made.append(config)
            taken.add(config_digest(config))

        if base == 0:
            take(dict(self._space.default))
        pool = self.pool(known)
        measured = [trial for trial in known if trial.ok and trial.digest in pool]
        left = {digest: config for digest, config in pool.items() if digest not in taken}
        times = corrected(
            [place(self._space, config) for config in left.values()],
            [self._times[digest] for digest in left],
            [place(self._space, trial.config) for trial in measured],
            [math.log(trial.value / self._times[trial.digest]) for trial in measured],
        )
        room = BATCH - FREE if len(left) > BATCH else BATCH
        for _, digest in sorted(zip(times, left, strict=True))[: room - len(made)]:
            take(left[digest])
        if len(made) < room:  # all that was predicted is tried
            return made + super()._made(known, base, [*before, *map(config_digest, made)])[: BATCH - len(made)]
        rng = random.Random(f"{self._seed}/{base}/free")
        while len(made) < BATCH and (found := self._random(rng, taken)) is not None:
            take(found)
        return made
