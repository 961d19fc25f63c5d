"""What to try next: legal configs, none twice. The proposals are a function of the trials so far and the seed."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..kernels.space import Config, Param, Space, config_digest
from .study import TrialRecord, best_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

ENUMERABLE = 500_000
"""Points up to which a space is listed; of a larger one legal points are found by drawing."""
STARTUP = 5
"""Trials that ended ok before the sampler models anything."""
BATCH = 8
"""Configs the sampler is asked for at once."""
NEAR = 6
"""Of a batch: most that are known winners' neighbours, so that the sampler has its say, too."""
DRAWS = 100
"""Draws of the sampler, illegal or already seen, before a random unseen config is taken instead."""
RANDOM_DRAWS = 20_000
FEW_DRAWS = 500
"""Random points before a space that can be listed is."""


Predict = Callable[[Sequence[Config]], Sequence[float]]
"""Microseconds that the cost model gives each config; infinite where it cannot be built."""


class Proposer(Protocol):
    """Where configs come from."""

    name: str
    total: int | None
    """Configs it has to offer, or None if it does not know."""

    def ahead(self, trials: Sequence[TrialRecord], count: int) -> list[Config]:
        """The next legal configs that no trial has, at most so many, as far as they are settled: whatever becomes of
        the first of them, the others follow. Empty when there is none left.
        """

    def propose(self, trials: Sequence[TrialRecord]) -> Config | None:
        """The first of :meth:`ahead`, or None."""


class _Proposer:
    name: str
    total: int | None

    def ahead(self, trials: Sequence[TrialRecord], count: int) -> list[Config]:
        """See :class:`Proposer`."""
        return []

    def propose(self, trials: Sequence[TrialRecord]) -> Config | None:
        """See :class:`Proposer`."""
        return next(iter(self.ahead(trials, 1)), None)


class Listed(_Proposer):
    """A fixed list in its order, the default first: a whole small space, or a sample of a large one."""

    def __init__(self, space: Space, configs: Sequence[Config], name: str = "brute force") -> None:
        self.name = name
        self._configs = {config_digest(config): config for config in [space.default, *configs]}
        self.total: int | None = len(self._configs)
        self.digests = frozenset(self._configs)

    def ahead(self, trials: Sequence[TrialRecord], count: int) -> list[Config]:
        """See :class:`Proposer`."""
        seen = {trial.digest for trial in trials}
        left = (config for digest, config in self._configs.items() if digest not in seen)
        return list(itertools.islice(left, count))


class Tpe(_Proposer):
    """Optuna's TPE over ordinal parameters, in memory: illegal and seen draws are rejected without becoming trials.

    It is asked for :data:`BATCH` configs at once, by what was known when the batch before that began: so the
    next ones are settled while others are still being compiled. The batch, and not the number of processes,
    decides what is proposed.

    Args:
        space: where to search.
        seed: of all draws.
        starts: configs tried first, behind the default, the likeliest first; its neighbours, and later those of the
            best config so far, share each batch with the sampler.
    """

    def __init__(self, space: Space, seed: int, starts: Sequence[Config] = ()) -> None:
        self.name = "TPE from known winners" if starts else "TPE"
        self.total: int | None = None
        self._space = space
        self._seed = seed
        listed = {config_digest(config): config for config in [space.default, *starts]}
        self._starts = [config for config in listed.values() if space.illegal(config) is None]
        self._near = bool(starts)
        self._last: dict[int, tuple[list[str], list[Config]]] = {}

    def ahead(self, trials: Sequence[TrialRecord], count: int) -> list[Config]:
        """See :class:`Proposer`."""
        found: list[Config] = []
        seen = {trial.digest for trial in trials}
        number = len(trials)
        while len(found) < count:
            base = number // BATCH * BATCH
            known = max(0, base - BATCH)
            if known > len(trials) or not (batch := self._batch(trials, base, seen, found)):
                break
            take = min(base + BATCH - number, count - len(found))
            found += batch[:take]
            seen |= {config_digest(config) for config in batch[:take]}
            number += len(batch[:take])
            if len(batch) < take:
                break
        return found

    def _batch(
        self, trials: Sequence[TrialRecord], base: int, seen: set[str], pending: Sequence[Config]
    ) -> list[Config]:
        """Configs for the trials from the number after all these, in the batch that begins at ``base``."""
        number = len(trials) + len(pending)
        # what the batch is made from: trials before the last one; what it must not repeat: all before it
        known = trials[: max(0, base - BATCH)]
        before = [trial.digest for trial in trials[:base]]
        before += [config_digest(config) for config in pending[: max(0, base - len(trials))]]
        if self._last.get(base, (None,))[0] != before:
            self._last = {last: made for last, made in self._last.items() if last >= base - BATCH}
            self._last[base] = before, self._made(known, base, before)
        made = self._last[base][1]
        rest = [config for config in made if config_digest(config) not in seen]
        room = base + BATCH - number
        if len(rest) < room:  # trials of another search took some of it
            rng = random.Random(f"{self._seed}/{base}/more")
            more = {config_digest(config) for config in rest} | seen
            while len(rest) < room and (config := self._random(rng, more)) is not None:
                rest.append(config)
                more.add(config_digest(config))
        return rest[:room]

    def _made(self, known: Sequence[TrialRecord], base: int, before: Sequence[str]) -> list[Config]:
        """The batch of trials ``base`` and on: the same for the same trials before it."""
        rng = random.Random(f"{self._seed}/{base}")
        taken = set(before)
        made: list[Config] = []

        def take(config: Config) -> None:
            made.append(config)
            taken.add(config_digest(config))

        for config in self._starts[base:]:
            if len(made) < BATCH and config_digest(config) not in taken:
                take(config)
        best = best_of(known)
        centre = best.config if best else self._starts[1] if len(self._starts) > 1 else None
        if self._near and centre is not None:
            near = neighbours(self._space, centre)
            rng.shuffle(near)
            for config in near:
                if len(made) < NEAR and config_digest(config) not in taken:
                    take(config)
        drawn = self._drawn(rng.getrandbits(32), known, taken) if len(known) >= BATCH else iter(())
        while len(made) < BATCH:
            found = next(drawn, None) or self._random(rng, taken)
            if found is None:
                break
            take(found)
        return made

    def _drawn(self, seed: int, trials: Sequence[TrialRecord], taken: set[str]) -> Iterator[Config]:
        """What the sampler draws, legal and not taken, until it draws nothing else."""
        import optuna

        distributions = {param.name: _distribution(param) for param in self._space.params}
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            with warnings.catch_warnings():  # older Optunas call multivariate experimental
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP)
            study = optuna.create_study(direction="minimize", sampler=sampler)
        finally:
            optuna.logging.set_verbosity(before)
        for trial in trials:
            if trial.ok:
                params = {param.name: _encode(param, trial.config[param.name]) for param in self._space.params}
                study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=trial.value))
        misses = 0
        while misses < DRAWS:
            drawn = study.ask(distributions)
            config = {param.name: _decode(param, drawn.params[param.name]) for param in self._space.params}
            study.tell(drawn, state=optuna.trial.TrialState.FAIL)
            if self._space.illegal(config) is None and config_digest(config) not in taken:
                misses = 0
                yield config
            else:
                misses += 1

    def _random(self, rng: random.Random, seen: Collection[str]) -> Config | None:
        """A fair draw from the legal configs not seen: drawing again until one is not seen leaves each as likely."""
        for config in draws(self._space, rng, RANDOM_DRAWS if self._space.size > ENUMERABLE else FEW_DRAWS):
            if config_digest(config) not in seen:
                return config
        if self._space.size > ENUMERABLE:
            return None
        left = [config for config in self._space.legal if config_digest(config) not in seen]
        return rng.choice(left) if left else None


def neighbours(space: Space, config: Config) -> list[Config]:
    """Legal configs that differ in one parameter: one step along an ordinal one, any other value of another."""
    found: list[Config] = []
    for param in space.params:
        at = param.values.index(config[param.name])
        near = (at - 1, at + 1) if _ordinal(param) else range(len(param.values))
        others = [param.values[place] for place in near if 0 <= place < len(param.values) and place != at]
        found += [{**config, param.name: value} for value in others]
    return [one for one in found if space.illegal(one) is None]


def adapted(space: Space, config: Config) -> Config | None:
    """A config of another problem's space in this one: values that this one has not become the nearest; None if that is illegal."""
    here: dict[str, Any] = {}
    for param in space.params:
        value = config.get(param.name, space.default[param.name])
        if not any(type(value) is type(other) and value == other for other in param.values):
            if not _ordinal(param) or not isinstance(value, int):
                return None
            wanted = int(value)
            value = min(param.values, key=lambda other: (abs(int(other) - wanted), other))
        here[param.name] = value
    return here if space.illegal(here) is None else None


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


def for_search(
    space: Space, trials: int, seed: int, starts: Sequence[Config] = (),
    predict: Predict | None = None,
) -> Proposer:  # fmt: skip
    """Brute force where the trials cover the space; elsewhere the cost model's guidance where it can be asked and no winners
    are known, or the sampler.

    Args:
        space: where to search.
        trials: configs to try in all.
        seed: of the sampler.
        starts: configs to try first, behind the default.
        predict: microseconds by the cost model (see :mod:`k3lab.tuning.guided`).
    """
    if space.size <= ENUMERABLE and len(list(itertools.islice(space.legal_points(), trials + 1))) <= trials:
        return Listed(space, [*starts, *space.legal])
    if predict is not None and not starts:
        from .guided import Guided

        return Guided(space, seed, predict)
    return Tpe(space, seed, starts)


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
