"""Which families run a tuned kernel, and why the others do not. Needs neither torch nor a GPU.

No silent fallback: every (family, kind) of the model is in the list, either with the bundle's entry or
with the reason it has none and the command that would change that.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..kernels import Compiled, Evidence, InputError, ModelCard, Problem, family
from ..kernels.gpu_cards import gpu_card
from .bindings import lacking, places, step_kind
from .cures import Cures, Objective, joined, model_word

if TYPE_CHECKING:
    from ..kernels.bundle.reader import BundleEntry, Miss

BACKENDS = ("auto", "latency_specialized")


class Finder(Protocol):
    """What is used of a :class:`~k3lab.kernels.bundle.reader.Bundle`."""

    @property
    def path(self) -> Path:
        """Its directory."""
        ...

    @property
    def accept_predicted(self) -> bool:
        """Whether entries count that never ran on their GPU."""
        ...

    @property
    def accept_compiled(self) -> bool:
        """Whether entries of another GPU count."""
        ...

    @property
    def entries(self) -> tuple[BundleEntry, ...]:
        """All it has."""
        ...

    def find(self, family: str, problem: Problem, gpu_name: str) -> BundleEntry | Miss:
        """The entry that serves the problem on the GPU, or why there is none."""
        ...


STEP_FAMILIES = (
    "attention_projection", "output_projection", "router", "experts", "kda", "mla", "moe_tail", "attn_res", "lm_head",
)  # fmt: skip
"""Families that the step launches; the registry may hold more, which no launch uses until this package has one."""
ARGMAX = "argmax"
"""Kind of the head where a step hands out tokens alone."""
EMBED = "embed"
"""Kind of the head's family that every step begins with: rows of the embedding."""


@dataclass(frozen=True)
class Fallback:
    """A family that runs untuned."""

    family: str
    kind: str | None
    """Layer kind where the family distinguishes them."""
    reason: str
    cure: str
    """The commands for a shell, or the work, that would change it."""
    commands: tuple[str, ...] = ()
    """The same commands one by one; empty where it takes other work."""

    def to_json(self) -> dict[str, Any]:
        """For plans and reports."""
        return {
            "family": self.family, "kind": self.kind, "reason": self.reason,
            "cure": self.cure, "commands": list(self.commands),
        }  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """A family that runs a bundle's entry."""

    family: str
    kind: str | None
    engine: str
    config: dict[str, Any]
    evidence: str
    compiled: Compiled = field(compare=False, repr=False)
    place: tuple[str, str, str, int] = field(compare=False, repr=False)
    """Which entry of the bundle: family, GPU, key, rows."""

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


def _kinds(name: str, card: ModelCard, able: Container[str]) -> tuple[str | None, ...]:
    if not family(name).engines or name not in able:
        return (None,)  # one line says it for all kinds
    return places(family(name), card)


def model_families(card: ModelCard, able: Container[str] = STEP_FAMILIES) -> tuple[tuple[str, str | None], ...]:
    """Every (family, kind) a step of the model uses; families of other packages are no part of it.

    Args:
        card: the model.
        able: families the caller can launch; another one's kinds need no line each.
    """
    used = [name for name in STEP_FAMILIES if name not in ("kda", "mla") or name in card.layer_kinds]
    return tuple((name, kind) for name in used for kind in _kinds(name, card, able))


@dataclass(frozen=True)
class StepForm:
    """What a step is, beside its rows: families that tell such steps apart have a kind for each."""

    q_len: int = 1
    """Tokens a request."""
    cache_dtype: str = "bfloat16"
    """Of the MLA rows, by its torch name."""
    context: int = 0
    """Most tokens of a request; 0: not asked."""
    dcp: int = 1
    """Ranks that share each context: one, or all."""
    head: Literal["logits", "tokens"] = "logits"
    """What it hands out: logits, or of each row the likeliest token alone, for which ranks exchange a pair a row."""

    @property
    def again(self) -> tuple[str, ...]:
        """The words of ``decode plan`` that ask for such a step again."""
        kept = self.cache_dtype if self.cache_dtype != StepForm.cache_dtype else 0
        told = {"--drafts": self.q_len - 1, "--dcp": self.dcp if self.dcp > 1 else 0, "--kv-dtype": kept}
        return tuple(word for name, value in told.items() if value for word in (name, str(value)))


PLAIN = StepForm()
"""One token a request, BF16 rows."""


def _choose(
    cures: Cures, tp: int, rows: int, bundle: Finder | None, name: str, kind: str | None, form: StepForm
) -> Choice:
    from ..kernels.bundle.keys import another_kernel
    from ..kernels.bundle.reader import Miss

    found = family(name)
    if not found.engines:
        return Fallback(
            name, kind, "no engine yet: the family has only its twin", f"write an engine in kernels/{name}/"
        )
    told: dict[str, Any] = {name: value for name, value in vars(form).items() if name != "head"}
    asked = kind or step_kind(found, cures.card, tp=tp, rows=rows, **told)
    problem, gpu = found.problem(cures.card, tp=tp, rows=rows, kind=asked), cures.gpu

    def fallback(reason: str, accept: tuple[str, ...] = ()) -> Fallback:
        commands = (cures.again(*accept),) if accept else cures.tune(found, problem, asked)
        if not commands:
            return Fallback(
                name, kind, f"{reason}; {cures.refusals(found, problem)}", f"write such an engine in kernels/{name}/"
            )
        return Fallback(name, kind, reason, joined(commands), commands)

    if bundle is None:
        return fallback("no bundle given")
    entry = bundle.find(name, problem, gpu.name)
    if isinstance(entry, Miss):
        return fallback(entry.reason, entry.accept)
    try:
        if refusal := another_kernel(entry.model, found.engine(entry.engine)):
            return fallback(refusal)
        compiled = entry.compiled(gpu.arch, problem)
    except InputError as error:
        return fallback(str(error))
    if reason := lacking(found, compiled, form.context):
        return fallback(reason)
    # an entry tuned for another GPU of this architecture was built here, never run or ranked
    evidence = entry.evidence if entry.model.gpu.upper() == gpu.name.upper() else Evidence.COMPILED
    return Tuned(name, kind, entry.engine, dict(compiled.config), str(evidence), compiled, entry.model.place)


def choose(
    card: ModelCard,
    *,
    tp: int,
    rows: int,
    gpu: str,
    bundle: Finder | None = None,
    only: Iterable[str] | None = None,
    objective: Objective = "predicted",
    model: str = "",
    command: tuple[str, ...] | None = None,
    form: StepForm = PLAIN,
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
        model: what ``--model`` was, for the same command (default: of the card).
        command: the decode command it ends with (default: the plan of this step).
        form: of the step; a plain one by default.

    Raises:
        InputError: TP does not divide, rows outside 1..64, no such GPU.
    """
    card.check_tp(tp)
    check_rows(rows)
    target = gpu_card(gpu)
    model = model or model_word(card)
    accept = [bundle.accept_predicted and "predicted", bundle.accept_compiled and "compiled"] if bundle else []
    cures = Cures(
        card,
        target,
        command or ("plan", "--model", model, "--tp", str(tp), "--rows", str(rows), *form.again, "--gpu", target.name),
        objective,
        model,
        bundle.path if bundle else None,
        tuple(word for word in accept if word),
    )
    able = set(STEP_FAMILIES if only is None else only)
    made: list[Choice] = []
    for name, kind in model_families(card, able):
        if name not in able and family(name).engines:
            made.append(_not_launched(name))
            continue
        tokens = name == "lm_head" and form.head == "tokens"
        own = _choose(cures, tp, rows, bundle, name, ARGMAX if tokens else kind, form)
        made.append(own)
        if tokens and not isinstance(own, Tuned):
            # logits serve too: their kernel, a gather and PyTorch's argmax
            logits = _choose(cures, tp, rows, bundle, name, kind, form)
            made += [logits] if isinstance(logits, Tuned) else []
        if name == "lm_head" and family(name).engines:
            made.append(_choose(cures, tp, rows, bundle, name, EMBED, form))
    return tuple(made)


def _not_launched(name: str) -> Fallback:
    """A family with engines that this package has no call of: tuning it would change nothing here."""
    return Fallback(
        name, None, "the decode path cannot launch this family's engines yet", f"extend decode/tuned.py by {name}"
    )


def without_gpu(choices: Sequence[Choice], why: str, cure: str) -> tuple[Fallback, ...]:
    """The same choices where nothing can be launched: tuned families fall back too, and say that they are tuned.

    Args:
        choices: of :func:`choose`.
        why: e.g. ``no GPU``.
        cure: what to do about it.
    """

    def fallen(choice: Choice) -> Fallback:
        if isinstance(choice, Tuned):
            has = f"the bundle has a {choice.evidence} {choice.engine} kernel"
            return Fallback(choice.family, choice.kind, f"{why}; {has}", cure)
        # its commands make a kernel, which still could not be launched here
        return replace(choice, reason=f"{choice.reason}, and {why}") if choice.commands else choice

    return tuple(map(fallen, choices))
