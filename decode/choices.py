"""Which families run a tuned kernel, and why the others do not. Needs neither torch nor a GPU.

No silent fallback: every (family, kind) of the model is in the list, either with the bundle's entry or
with the reason it has none and the command that would change that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..kernels import Compiled, Evidence, InputError, ModelCard, Problem, family
from ..kernels.gpu_cards import gpu_card
from ..kernels.registry import FAMILIES

if TYPE_CHECKING:
    from ..kernels.bundle.reader import BundleEntry, Miss

BACKENDS = ("auto", "latency_specialized")


class Finder(Protocol):
    """What is used of a :class:`~k3lab.kernels.bundle.reader.Bundle`."""

    def find(self, family: str, problem: Problem, gpu_name: str) -> BundleEntry | Miss:
        """The entry that serves the problem on the GPU, or why there is none."""
        ...


@dataclass(frozen=True)
class Fallback:
    """A family that runs untuned."""

    family: str
    kind: str | None
    """Layer kind where the family distinguishes them."""
    reason: str
    cure: str
    """The command, or the work, that would change it."""

    def to_json(self) -> dict[str, Any]:
        """For plans and reports."""
        return {"family": self.family, "kind": self.kind, "reason": self.reason, "cure": self.cure}


@dataclass(frozen=True)
class Tuned:
    """A family that runs a bundle's entry."""

    family: str
    kind: str | None
    engine: str
    config: dict[str, Any]
    evidence: str
    compiled: Compiled = field(compare=False, repr=False)

    @property
    def label(self) -> str:
        """E.g. ``attention_projection kda-tp16-rows8``."""
        return f"{self.family} {self.compiled.problem.label}"


Choice = Tuned | Fallback


def check_rows(rows: int) -> None:
    """Raise InputError unless the decode path serves so many rows."""
    if not 1 <= rows <= 64:
        raise InputError(f"rows is {rows}; the decode path serves 1 to 64 rows")


def check_backend(backend: str) -> None:
    """Raise InputError for an unknown backend."""
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}; backends: {', '.join(BACKENDS)}")


def _kinds(name: str, card: ModelCard) -> tuple[str | None, ...]:
    if not family(name).engines:
        return (None,)  # one line says it for all kinds
    kinds = tuple(kind for kind in family(name).kinds if kind not in ("kda", "mla") or kind in card.layer_kinds)
    return kinds if {"kda", "mla"} & set(kinds) else (None,)


def model_families(card: ModelCard) -> tuple[tuple[str, str | None], ...]:
    """Every (family, kind) a step of the model uses; families of other packages are no part of it."""
    used = [name for name in FAMILIES if name not in ("kda", "mla") or name in card.layer_kinds]
    return tuple((name, kind) for name in used for kind in _kinds(name, card))


def _choose(
    card: ModelCard, tp: int, rows: int, gpu: str, bundle: Finder | None, objective: str, name: str, kind: str | None
) -> Choice:
    from ..kernels.bundle.reader import Miss, tune_command

    found = family(name)
    if not found.engines:
        return Fallback(
            name, kind, "no engine yet: the family has only its twin", f"write an engine in kernels/{name}/"
        )
    problem = found.problem(card, tp=tp, rows=rows, kind=kind)
    cure = tune_command(name, problem, gpu, objective)
    if bundle is None:
        return Fallback(name, kind, "no bundle given", f"{cure}, then --bundle with what it wrote")
    entry = bundle.find(name, problem, gpu)
    if isinstance(entry, Miss):
        return Fallback(name, kind, entry.reason, entry.cure or cure)
    try:
        compiled = entry.compiled(gpu_card(gpu).arch, problem)
    except InputError as error:
        return Fallback(name, kind, str(error), cure)
    # an entry tuned for another GPU of this architecture was built here, never run or ranked
    evidence = entry.evidence if entry.model.gpu.upper() == gpu.upper() else Evidence.COMPILED
    return Tuned(name, kind, entry.engine, dict(compiled.config), str(evidence), compiled)


def choose(
    card: ModelCard,
    *,
    tp: int,
    rows: int,
    gpu: str,
    bundle: Finder | None = None,
    only: Iterable[str] | None = None,
    objective: str = "predicted",
) -> tuple[Choice, ...]:
    """What every family of the model runs on the specialised path.

    Args:
        card: the model.
        tp: tensor-parallel size.
        rows: token rows of the step.
        gpu: name of a GPU card.
        bundle: a loaded bundle, or None.
        only: families the caller can launch a tuned kernel of (default: all).
        objective: of the tuning command a fallback names: ``measured`` where that GPU is here.

    Raises:
        InputError: TP does not divide, rows outside 1..64, no such GPU.
    """
    card.check_tp(tp)
    check_rows(rows)
    gpu = gpu_card(gpu).name
    able = set(FAMILIES if only is None else only)
    choices: list[Choice] = []
    for name, kind in model_families(card):
        choice = _choose(card, tp, rows, gpu, bundle, objective, name, kind)
        if isinstance(choice, Tuned) and name not in able:
            choice = Fallback(
                name,
                kind,
                "the decode path cannot launch this family's engines yet",
                f"extend decode/tuned.py by {name}",
            )
        choices.append(choice)
    return tuple(choices)


def without_gpu(choices: Sequence[Choice], why: str, cure: str) -> tuple[Fallback, ...]:
    """The same choices where nothing can be launched: tuned families fall back too, and say that they are tuned.

    Args:
        choices: of :func:`choose`.
        why: e.g. ``no GPU``.
        cure: what to do about it.
    """
    return tuple(
        choice
        if isinstance(choice, Fallback)
        else Fallback(
            choice.family, choice.kind, f"{why}; the bundle has a {choice.evidence} {choice.engine} kernel", cure
        )
        for choice in choices
    )
