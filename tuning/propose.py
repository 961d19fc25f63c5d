"""What to try next: legal configs, none twice. The proposals are a function of the trials so far and the seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..kernels.space import Config, Param, Space, config_digest
from .study import TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

ENUMERABLE = 500_000
"""Points up to which a space is listed; of a larger one legal points are found by drawing."""
STARTUP = 10
"""Random trials before the sampler models anything."""
DRAWS = 200
"""Draws of the sampler, illegal or already seen, before a random unseen config is taken instead."""
RANDOM_DRAWS = 20_000


class Proposer(Protocol):
    """Where configs come from."""

    name: str
    total: int | None
    """Configs it has to offer, or None if it does not know."""

    def propose(self, trials: Sequence[TrialRecord]) -> Config | None:
        """A legal config that no trial has, or None when there is none left."""


class Listed:
    """A fixed list in its order, the default first: a whole small space, or a sample of a large one."""

    def __init__(self, space: Space, configs: Sequence[Config], name: str = "brute force") -> None:
        self.name = name
        self._configs = list({config_digest(config): config for config in [space.default, *configs]}.values())
        self.total: int | None = len(self._configs)
        self.digests = frozenset(map(config_digest, self._configs))

    def propose(self, trials: Sequence[TrialRecord]) -> Config | None:
        """See :class:`Proposer`."""
        seen = {trial.digest for trial in trials}
        return next((config for config in self._configs if config_digest(config) not in seen), None)


class Tpe:
    """Optuna's TPE over ordinal parameters, in memory: illegal and seen draws are rejected without becoming trials."""

    name = "TPE"

    def __init__(self, space: Space, seed: int) -> None:
        self.total: int | None = len(space.legal) if space.size <= ENUMERABLE else None
        self._space = space
        self._seed = seed

    def propose(self, trials: Sequence[TrialRecord]) -> Config | None:
        """See :class:`Proposer`."""
        seen = {trial.digest for trial in trials}
        if not trials:
            return self._space.default
        # the seed moves on with the trials: a killed and resumed search goes on as it would have gone
        rng = random.Random(f"{self._seed}/{len(trials)}")
        if len(trials) < STARTUP:
            return self._random(rng, seen)
        return self._draw(rng.getrandbits(32), trials, seen) or self._random(rng, seen)

    def _draw(self, seed: int, trials: Sequence[TrialRecord], seen: set[str]) -> Config | None:
        import optuna

        distributions = {param.name: _distribution(param) for param in self._space.params}
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            with warnings.catch_warnings():  # older Optunas call multivariate experimental
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP // 2)
            study = optuna.create_study(direction="minimize", sampler=sampler)
        finally:
            optuna.logging.set_verbosity(before)
        for trial in trials:
            if trial.ok:
                params = {param.name: _encode(param, trial.config[param.name]) for param in self._space.params}
                study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=trial.value))
        for _ in range(DRAWS):
            drawn = study.ask(distributions)
            config = {param.name: _decode(param, drawn.params[param.name]) for param in self._space.params}
            if self._space.illegal(config) is None and config_digest(config) not in seen:
                return config
            study.tell(drawn, state=optuna.trial.TrialState.FAIL)
        return None

    def _random(self, rng: random.Random, seen: set[str]) -> Config | None:
        if self._space.size <= ENUMERABLE:
            left = [config for config in self._space.legal if config_digest(config) not in seen]
            return rng.choice(left) if left else None
        return next(
            (config for config in draws(self._space, rng, RANDOM_DRAWS) if config_digest(config) not in seen), None
        )


def draws(space: Space, rng: random.Random, tries: int) -> Any:
    """Legal configs among that many random points of the space."""
    for _ in range(tries):
        config = {param.name: rng.choice(param.values) for param in space.params}
        if space.illegal(config) is None:
            yield config


def _ordinal(param: Param) -> bool:
    return len(param.values) > 1 and all(
        isinstance(value, int) and not isinstance(value, bool) for value in param.values
    )


def _distribution(param: Param) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    return IntDistribution(0, len(param.values) - 1) if _ordinal(param) else CategoricalDistribution(param.values)


def _encode(param: Param, value: Any) -> Any:
    return param.values.index(value) if _ordinal(param) else value


def _decode(param: Param, drawn: Any) -> Any:
    return param.values[drawn] if _ordinal(param) else drawn


def for_search(space: Space, trials: int, seed: int) -> Proposer:
    """Brute force where the trials cover the space, the sampler elsewhere."""
    if space.size <= ENUMERABLE and len(space.legal) <= trials:
        return Listed(space, space.legal)
    return Tpe(space, seed)


def sample(space: Space, size: int | None, seed: int) -> Listed:
    """The whole space, or a fair sample of that many configs beside the default: the same for the same seed."""
    rng = random.Random(seed)
    if space.size <= ENUMERABLE:
        legal: Sequence[Config] = space.legal
        if size is None or size >= len(legal):
            return Listed(space, legal, "whole space")
        return Listed(space, rng.sample(legal, size), "sample")
    if size is None:
        size = space.size
    found: dict[str, Config] = {}
    for config in draws(space, rng, max(RANDOM_DRAWS, 50 * size)):
        found.setdefault(config_digest(config), config)
        if len(found) == size:
            break
    return Listed(space, list(found.values()), "sample")
