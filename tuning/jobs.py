"""A job: one config to evaluate, as JSON lines carry it to a worker process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, Protocol

from ..kernels import registry
from ..kernels.contract import Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.space import Config
from .outcome import Outcome, SetupError

DEFAULT_EVALUATOR = "k3lab.tuning.evaluate"
"""Module with the functions of :class:`Evaluator`."""

Kind = Literal["predict", "compile", "measure", "retime", "contest", "chain", "build"]


@dataclass(frozen=True)
class Job:
    """One request to a worker. All fields are JSON-able."""

    kind: Kind
    family: str
    location: str | None
    """``module:ATTRIBUTE`` of a family that is not registered; None for one that is."""
    engine: str
    problem: Mapping[str, Any]
    config: Config
    arch: str
    gpu: str
    seed: int = 0
    digests: tuple[str, str] | None = None
    """Source and glue digest the engine must have; None where any will do."""
    contestants: Sequence[Mapping[str, Any]] = ()
    """Of a contest or its chains: ``engine``, ``config`` and ``digests`` of each; the job's own are those of the first."""

    @property
    def key(self) -> str:
        """One spelling of the job: two of the same are one."""
        return json.dumps(self.to_json(), sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        fields = asdict(self) | {"problem": dict(self.problem), "config": dict(self.config)}
        return fields | {"contestants": tuple(dict(one) for one in self.contestants)}


@dataclass(frozen=True)
class Task:
    """A job with its names resolved to objects, inside the worker."""

    job: Job
    family: Family
    engine: Engine
    problem: Problem


Stage = Callable[[str], None]
"""Called with ``compile``, ``check`` or ``time`` as each begins: the limits of the parent follow it."""


class Evaluator(Protocol):
    """What a worker can do with a task. Tests and other back ends supply their own module."""

    def predict(self, task: Task, stage: Stage) -> Outcome:
        """Compile for the GPU card's architecture and ask the cost model; needs no GPU."""

    def compile(self, task: Task, stage: Stage) -> Outcome:
        """Compile into the cache, so that a measurement of the same config finds it there; needs no GPU."""

    def measure(self, task: Task, stage: Stage) -> Outcome:
        """Compile, check against the twin, time, check again on fresh inputs."""

    def retime(self, task: Task, stage: Stage) -> Outcome:
        """Time once more a config that was measured before: for the finals."""

    def contest(self, task: Task, stage: Stage) -> Outcome:
        """Time the contestants, configs of one or several engines, in turn; the payload holds their times."""

    def chain(self, task: Task, stage: Stage) -> Outcome:
        """Time the contestants behind a predecessor, in turn; the payload holds what each adds to it."""

    def build(self, task: Task, stage: Stage) -> Outcome:
        """Compile for ``job.arch``; the payload holds launches, buffers and cubins for a bundle."""


def location_of(family: Family) -> str | None:
    """How another process finds the family: None if by its registered name, else ``module:ATTRIBUTE``.

    Raises:
        InputError: the object is neither registered nor a module's attribute.
    """
    if family.name in registry.family_names() and registry.family(family.name) is family:
        return None
    module = sys.modules.get(type(family).__module__)
    for name, value in vars(module).items() if module else ():
        if value is family:
            return f"{type(family).__module__}:{name}"
    raise InputError(
        f"family {family.name!r} cannot be reached from a worker process: register it (entry point k3lab.families), "
        f"or keep the object in a variable of its own module {type(family).__module__}"
    )


@cache
def find_family(name: str, location: str | None) -> Family:
    """The family a job names.

    Raises:
        InputError: the module or its attribute does not exist, or is no family.
    """
    if location is None:
        return registry.family(name)
    module, _, attribute = location.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # another package's module may raise anything
        raise InputError(
            f"family {name!r} cannot be loaded from {location}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Family):
        raise InputError(f"family {name!r}: {location} is a {type(found).__name__}, not a Family")
    return found


def resolve(job: Job) -> Task:
    """The job with its family, engine and problem.

    Raises:
        SetupError: the engine is not the one the job was made for.
    """
    try:
        family = find_family(job.family, job.location)
        engine = family.engine(job.engine)
    except InputError as error:
        raise SetupError(str(error)) from error
    require_digests(engine, job.digests)
    return Task(job, family, engine, family.problem_from_json(job.problem))


def require_digests(engine: Engine, wanted: Sequence[str] | None) -> None:
    """Make sure that this process holds the engine that a job was made for.

    Raises:
        SetupError: its files are others.
    """
    from .compiling import digests

    if wanted is not None and digests(engine) != tuple(wanted):
        raise SetupError(
            f"the files of {engine.family}/{engine.name} are others than when this run began: start it again "
            "(a study keeps to one kernel)"
        )
