"""What a step will launch, kernel by kernel, known without a GPU and without torch.

``auto`` is the stock sequence (:mod:`k3lab.decode.stock`); ``latency_specialized`` puts a bundle's
kernels in place of a family's launches where it has them, and says of every other family why not. The
trace check reads :meth:`Plan.to_json`, field ``families``: kernel name to family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels import InputError, ModelCard
from ..kernels.gpu_cards import gpu_card
from ..kernels.model_card import LayerKind
from .choices import PLAIN, STEP_FAMILIES, Choice, Fallback, Finder, StepForm, Tuned, check_backend, check_rows, choose
from .cures import Objective
from .sequence import UNSERVED_NOTE, LayerForm, PlannedLaunch, forms, stock_launches, tuned_launches
from .sharding import check_dcp
from .stock import BEFORE_LAYERS, SPLIT_K_REDUCES, StockLaunch, Target, after_layers, stock_layer, target_layer
from .unused import Unused, unused_entries

SCHEMA = 1
AUTO_NOTE = "backend auto uses no tuned engine, by design; --backend latency_specialized with a --bundle does"
TUNED_FAMILIES = STEP_FAMILIES
"""Families :mod:`k3lab.decode.tuned` can launch from a bundle."""


@dataclass(frozen=True)
class LayerPlan:
    """All layers of one kind."""

    kind: LayerKind
    dense: bool
    layers: tuple[int, ...]
    """Zero-based indices."""
    launches: tuple[PlannedLaunch, ...]
    target: Target | None
    restarts: bool = False
    """They save a block, where that changes what is launched."""

    @property
    def label(self) -> str:
        """E.g. ``kda moe``."""
        return f"{self.kind} {'dense' if self.dense else 'moe'}{' restart' if self.restarts else ''}"

    def to_json(self) -> dict[str, Any]:
        """Counts, target, launches."""
        target = self.target and {
            "kernels": self.target.kernels,
            "conditions": self.target.conditions,
            # not under "kernel": the target's launches are not planned
            "sequence": [{"launch": launch.kernel, "family": launch.family} for launch in self.target.sequence],
        }
        return {
            "kind": self.kind, "mlp": "dense" if self.dense else "moe", "restarts": self.restarts, "layers": list(self.layers),
            "kernels": len(self.launches), "kernels_at_most": len(self.launches) + (0 if self.dense else SPLIT_K_REDUCES),
            "target": target,
            "launches": [launch.to_json(position) for position, launch in enumerate(self.launches, 1)],
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A step of one backend."""

    card: ModelCard
    tp: int
    rows: int
    dcp: int
    """Ranks that share each context."""
    backend: str
    gpu: str
    choices: tuple[Choice, ...]
    """Empty for ``auto``."""
    before: tuple[PlannedLaunch, ...]
    layers: tuple[LayerPlan, ...]
    after: tuple[PlannedLaunch, ...]
    unused: tuple[Unused, ...] = ()
    """Entries of the bundle that nothing launches."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known before reading on."""
        if self.backend == "auto":
            return (AUTO_NOTE,)
        return (UNSERVED_NOTE,) if self.tuned else ()

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Families that run untuned although the backend wants tuned ones."""
        return tuple(choice for choice in self.choices if isinstance(choice, Fallback))

    @property
    def tuned(self) -> tuple[Tuned, ...]:
        """Families that run a bundle's kernel."""
        return tuple(choice for choice in self.choices if isinstance(choice, Tuned))

    @property
    def total(self) -> int:
        """Launches of a step, without split-K reductions."""
        return (
            len(self.before) + len(self.after) + sum(len(layer.launches) * len(layer.layers) for layer in self.layers)
        )

    def layer(self, kind: str, *, dense: bool = False) -> LayerPlan:
        """The plan of one layer kind, the most frequent form of it.

        Raises:
            InputError: the model has no such layer.
        """
        for layer in self.layers:
            if (layer.kind, layer.dense) == (kind, dense):
                return layer
        raise InputError(
            f"{self.card.name} has no {kind} {'dense' if dense else 'moe'} layer; it has: {', '.join(dict.fromkeys(one.label for one in self.layers))}"
        )

    def families(self) -> dict[str, str]:
        """Kernel name to family, over the whole step."""
        every = (*self.before, *(launch for layer in self.layers for launch in layer.launches), *self.after)
        return {launch.kernel: launch.family for launch in every}

    def tuned_kernels(self) -> dict[str, int]:
        """Symbol of every tuned kernel to its launches a step: what a trace of it must hold."""
        every = [
            *self.before,
            *(one for layer in self.layers for one in layer.launches * len(layer.layers)),
            *self.after,
        ]
        return dict(Counter(one.kernel for one in every if one.evidence))

    def to_json(self) -> dict[str, Any]:
        """The plan as data."""
        return {
            "schema": SCHEMA, "model": self.card.name, "tp": self.tp, "rows": self.rows, "dcp": self.dcp, "backend": self.backend, "gpu": self.gpu,
            "notes": list(self.notes), "launches_per_step": self.total,
            "before": [launch.to_json(position) for position, launch in enumerate(self.before, 1)],
            "layers": [layer.to_json() for layer in self.layers],
            "after": [launch.to_json(position) for position, launch in enumerate(self.after, 1)],
            "families": self.families(),
            "tuned": [
                {"family": one.family, "kind": one.kind, "engine": one.engine, "config": one.config, "evidence": one.evidence}
                for one in self.tuned
            ],
            "fallbacks": [one.to_json() for one in self.fallbacks],
            "unused_entries": [one.to_json() for one in self.unused],
        }  # fmt: skip


def plan(
    card: ModelCard,
    *,
    tp: int,
    rows: int,
    backend: str = "auto",
    bundle: Finder | None = None,
    gpu: str = "GB300",
    objective: Objective = "predicted",
    model: str = "",
    form: StepForm = PLAIN,
) -> Plan:
    """The launches of a step.

    Args:
        card: the model.
        tp: tensor-parallel size.
        rows: token rows of the step, 1 to 64.
        backend: ``auto`` or ``latency_specialized``.
        bundle: a loaded bundle, for ``latency_specialized``.
        gpu: name of a GPU card: whose entries of the bundle are used.
        objective: of the tuning a fallback names: ``measured`` where that GPU is here.
        model: what ``--model`` was, for the commands a fallback names.
        form: of the step; a plain one by default.

    Raises:
        InputError: TP does not divide, rows out of range, contexts over a part of the ranks, unknown backend or GPU.
    """
    card.check_tp(tp)
    check_dcp(form.dcp, tp)
    check_rows(rows)
    check_backend(backend)
    if bundle is not None and backend == "auto":
        raise InputError("backend auto uses no bundle; --backend latency_specialized does")
    name = gpu_card(gpu).name
    choices: tuple[Choice, ...] = ()
    if backend == "latency_specialized":
        choices = choose(card, tp=tp, rows=rows, gpu=name, bundle=bundle, only=TUNED_FAMILIES, objective=objective, model=model, form=form)  # fmt: skip
    groups: dict[LayerForm, list[int]] = {}
    for layer, own in enumerate(forms(card, choices)):
        groups.setdefault(own, []).append(layer)

    def launches(stock: Sequence[StockLaunch], own: LayerForm | None = None) -> tuple[PlannedLaunch, ...]:
        return tuned_launches(stock, choices, own) if choices else stock_launches(stock)

    layers = tuple(
        LayerPlan(
            own.kind, own.dense, tuple(indices),
            launches(stock_layer(own.kind, dense=own.dense, rows=rows, dcp=form.dcp), own),
            target_layer(own.kind, dense=own.dense), own.restarts,
        )
        for own, indices in groups.items()
    )  # fmt: skip
    # the common case first: a layer that restarts the residual, or follows the dense one, is an exception
    layers = tuple(sorted(layers, key=lambda one: (not one.dense, one.restarts, -len(one.layers), one.layers)))
    before, after = launches(BEFORE_LAYERS), launches(after_layers(form.head))
    unused = unused_entries(card, choices, bundle.entries, tp=tp, rows=rows, gpu=name) if bundle else ()
    return Plan(card, tp, rows, form.dcp, backend, name, choices, before, layers, after, unused)
