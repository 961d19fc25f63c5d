"""Entries of a bundle that no launch of a plan uses: told, so that nobody takes them for running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import InputError, ModelCard, family
from .choices import EMBED, Choice, Tuned, model_families

if TYPE_CHECKING:
    from ..kernels.bundle.reader import BundleEntry


@dataclass(frozen=True)
class Unused:
    """An entry that nothing launches."""

    family: str
    problem: str
    """Its label, e.g. ``kda-tp16-rows8``."""
    gpu: str
    engine: str
    evidence: str
    reason: str

    @property
    def text(self) -> str:
        """One line."""
        what = f"{self.family} {self.problem} on {self.gpu} ({self.evidence}, engine {self.engine})"
        return f"bundle entry {what}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """For plans and reports."""
        return {
            "family": self.family, "problem": self.problem, "gpu": self.gpu, "engine": self.engine,
            "evidence": self.evidence, "reason": self.reason,
        }  # fmt: skip


def entry_problem(entry: BundleEntry) -> str:
    """The label of an entry's problem; its fields where the family is not installed here."""
    fields = {**entry.model.key, "rows": entry.rows}
    try:
        return family(entry.model.family).problem_from_json(fields).label
    except InputError:
        return " ".join(f"{name}={value}" for name, value in fields.items())


def _keys(card: ModelCard, tp: int, rows: int) -> dict[str, list[Mapping[str, Any]]]:
    """Family to the keys of its problems in the model."""
    keys: dict[str, list[Mapping[str, Any]]] = {}
    for name, kind in (*model_families(card), ("lm_head", EMBED)):
        keys.setdefault(name, []).append(family(name).problem(card, tp=tp, rows=rows, kind=kind).key)
    return keys


def unused_entries(
    card: ModelCard, choices: Sequence[Choice], entries: Iterable[BundleEntry], *, tp: int, rows: int, gpu: str
) -> tuple[Unused, ...]:
    """The entries that none of the choices took, and why.

    Args:
        card: the model.
        choices: of :func:`~k3lab.decode.choices.choose`.
        entries: of the bundle.
        tp: tensor-parallel size.
        rows: token rows of the step.
        gpu: name of the GPU card.
    """
    taken = {choice.place for choice in choices if isinstance(choice, Tuned)}
    keys = _keys(card, tp, rows)
    found = []
    for entry in entries:
        model = entry.model
        if model.place in taken:
            continue
        if model.family not in keys:
            reason = f"no launch of {card.name} uses this family"
        elif dict(model.key) not in [dict(key) for key in keys[model.family]]:
            reason = f"no launch of {card.name} at TP {tp} has this problem"
        elif entry.rows < rows:
            reason = f"it serves at most {entry.rows} rows, this step has {rows}"
        elif any(place[0] == model.family and place[2] == model.place[2] for place in taken):
            reason = "another entry serves this step"
        elif model.gpu.upper() != gpu.upper():
            reason = f"it was tuned for {model.gpu}, this step is for {gpu}"
        else:
            reason = "not taken; the fallback of its family says why"
        found.append(Unused(model.family, entry_problem(entry), model.gpu, entry.engine, str(entry.evidence), reason))
    return tuple(found)
