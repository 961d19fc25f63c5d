"""An engine's space: named parameters, constraints that say why a point is illegal, one default."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .errors import InputError

Value = int | str | bool
Config = Mapping[str, Value]
"""One point of a space: parameter name to value."""


def config_digest(config: Config) -> str:
    """Digest of a config, independent of key order and process: 16 hex digits."""
    text = json.dumps(dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Param:
    """One tunable with its legal values, in ascending order of what it means."""

    name: str
    values: tuple[Value, ...]
    help: str
    """What it changes and in which unit: one line."""


@dataclass(frozen=True)
class Constraint:
    """A rule between parameters."""

    holds: Callable[[Config], bool]
    reason: str
    """Why a point that breaks it is illegal; may use ``{param}`` placeholders."""


class _Open(BaseException):
    """A rule asked for a parameter that has no value yet. No ``Exception``: a rule that catches those must not catch it."""


class _Partial(Mapping[str, Value]):
    """A config whose later parameters are open. A rule that never asks for those holds, or not, whatever they are."""

    def __init__(self, names: Sequence[str]) -> None:
        self.values_so_far: dict[str, Value] = {}
        self._names = names

    def __getitem__(self, name: str) -> Value:
        try:
            return self.values_so_far[name]
        except KeyError:
            if name in self._names:
                raise _Open(name) from None
            raise

    def __iter__(self) -> Iterator[str]:
        if len(self.values_so_far) < len(self._names):
            raise _Open(self._names[-1])
        return iter(self.values_so_far)

    def __len__(self) -> int:
        return len(self._names)


Rule = Callable[[Config], bool]


def extended(params: Sequence[Param], rules: Sequence[Rule]) -> Iterator[dict[str, Value]]:
    """Every point on which all rules hold, in the order of the parameters' product, built parameter by parameter.

    A rule is asked as soon as its answer depends on nothing that is still open, which it shows by what it reads:
    one refusal then leaves out all points that only differ later. Which parameters a rule reads may depend on
    their values.
    """
    names = [param.name for param in params]
    place = {name: index for index, name in enumerate(names)}
    last = len(params) - 1
    config = _Partial(names)

    def undecided(asked: Sequence[tuple[int, Rule]], index: int) -> list[tuple[int, int, Rule]] | None:
        """Rules that wait, behind the place of the parameter they wait for; None where one is broken."""
        waiting = []
        for number, rule in asked:
            try:
                if not rule(config):
                    return None
            except _Open as opened:
                waiting.append((place[opened.args[0]], number, rule))
            except Exception:  # it may count on a rule before it that still waits
                if index == last:
                    raise
                waiting.append((last, number, rule))
        return waiting

    def extend(index: int, waiting: list[tuple[int, int, Rule]]) -> Iterator[dict[str, Value]]:
        if index > last:
            yield dict(config.values_so_far)
            return
        due = sorted(((number, rule) for wanted, number, rule in waiting if wanted == index), key=lambda one: one[0])
        later = [one for one in waiting if one[0] != index]
        for value in params[index].values:
            config.values_so_far[names[index]] = value
            if (still := undecided(due, index)) is not None:
                yield from extend(index + 1, later + still)
            del config.values_so_far[names[index]]

    first = undecided(list(enumerate(rules)), -1)
    return iter(()) if first is None else extend(0, first)


@dataclass(frozen=True)
class Space:
    """All configs of one engine on one problem and GPU."""

    params: tuple[Param, ...]
    constraints: tuple[Constraint, ...]
    default: Config
    """The untuned choice; legal, and always among a study's finalists."""

    def __post_init__(self) -> None:
        reason = self.illegal(self.default)
        if reason:
            # of an engine's own making, but met by whoever asks for a problem that no config serves on that GPU
            raise InputError(f"no config is known that serves this problem on this GPU; the default: {reason}")

    def illegal(self, config: Config) -> str | None:
        """Why the config is not a legal point, or None if it is."""
        names = {param.name for param in self.params}
        if unknown := sorted(set(config) - names):
            return f"unknown parameter {unknown[0]!r}; the space has {', '.join(sorted(names))}"
        for param in self.params:
            if param.name not in config:
                return f"parameter {param.name!r} is missing"
            value = config[param.name]
            if not any(type(value) is type(legal) and value == legal for legal in param.values):  # True is no 1
                return f"{param.name} is {config[param.name]!r}, legal values are {', '.join(map(str, param.values))}"
        for constraint in self.constraints:
            if not constraint.holds(config):
                return constraint.reason.format(**config)
        return None

    def check(self, config: Config) -> None:
        """Raise InputError unless the config is legal."""
        reason = self.illegal(config)
        if reason:
            raise InputError(f"illegal config: {reason}")

    @property
    def size(self) -> int:
        """Points before constraints."""
        total = 1
        for param in self.params:
            total *= len(param.values)
        return total

    def points(self) -> Iterator[dict[str, Value]]:
        """Every point, legal or not, in a fixed order."""
        names = [param.name for param in self.params]
        for values in itertools.product(*(param.values for param in self.params)):
            yield dict(zip(names, values, strict=True))

    @cached_property
    def legal(self) -> tuple[dict[str, Value], ...]:
        """Every legal config, in the order of :meth:`points`."""
        return tuple(self.legal_points())

    def legal_points(self) -> Iterator[dict[str, Value]]:
        """The legal configs one by one, without a look at most of the illegal points."""
        return extended(self.params, [constraint.holds for constraint in self.constraints])

    def restricted(self, fixed: Config) -> Space:
        """The part of the space in which parameters have given values.

        Its default is this one's with those values; where that is illegal, the legal config that differs from
        it in the fewest parameters, the first of them in the space's order.

        Raises:
            InputError: no such parameter or value, or no legal config has them.
        """
        if not fixed:
            return self
        params = {param.name: param for param in self.params}
        for name, value in fixed.items():
            if name not in params:
                raise InputError(f"unknown parameter {name!r}; the space has {', '.join(sorted(params))}")
            legal = params[name].values
            if not any(type(value) is type(other) and value == other for other in legal):
                raise InputError(f"{name} is {value!r}, legal values are {', '.join(map(str, legal))}")
        narrow = tuple(replace(p, values=(fixed[p.name],)) if p.name in fixed else p for p in self.params)
        default = {**self.default, **fixed}
        if self.illegal(default) is not None:
            wanted = default
            near = list(extended(narrow, [constraint.holds for constraint in self.constraints]))
            if not near:
                text = ", ".join(f"{name}={value}" for name, value in fixed.items())
                raise InputError(f"no legal config has {text}: {self.illegal(wanted)}")
            default = min(near, key=lambda config: sum(config[name] != wanted[name] for name in params))
        return Space(narrow, self.constraints, default)

    def refusals(self) -> dict[str, int]:
        """Illegal points counted by the constraint that refuses them first."""
        counts: dict[str, int] = {}
        for config in self.points():
            for constraint in self.constraints:
                if not constraint.holds(config):
                    counts[constraint.reason] = counts.get(constraint.reason, 0) + 1
                    break
        return counts
