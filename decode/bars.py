"""The bars of the decode path on one H200, and how a measurement stands to them: numbers and verdicts, no GPU needed.

A layer's time is a slope: between graphs with few and with many layers of one kind, so that what surrounds the layers,
and the graph's own start, drop out. The same for its launches.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..kernels import K3, InputError, ModelCard
from ..kernels.accounting import expected_distinct_experts, floor_us, layer_bytes, step_bytes
from ..kernels.gpu_cards import GpuCard
from ..kernels.model_card import LayerKind

FEW, MANY = 24, 68
"""Layers of the two graphs, where the model has as many."""
KINDS: tuple[LayerKind, ...] = ("kda", "mla")
"""Of the layers that are timed."""
DISTINCT_OFF = 0.02
"""Largest relative difference of the mean distinct experts from uniform routing's."""
FASTER = 2.0
"""Than ``auto``, at least."""


@dataclass(frozen=True)
class Bar:
    """What a figure should come to; all in its own unit."""

    what: str
    unit: str
    close: float
    """At most, to close."""
    aim: float


BARS_TP = 16
"""The bars below speak of one rank of K3 at that TP, its contexts whole."""
LAUNCH_BARS = {
    "kda": Bar("launches of a KDA MoE layer", "", 9, 7),
    "mla": Bar("launches of an MLA MoE layer", "", 11, 9),
}
LAYER_BARS = {8: Bar("KDA MoE layer, 8 rows", "us", 85, 65), 1: Bar("KDA MoE layer, 1 row", "us", 44, 34)}
STEP_BARS = {8: Bar("whole step, 8 rows", "us", 8200, 6200), 1: Bar("whole step, 1 row", "us", 4300, 3200)}


@dataclass(frozen=True)
class Graph:
    """A captured step of so many layers, measured."""

    layers: int
    samples_us: tuple[float, ...]
    launches: int | None
    """Kernels of the graph; None where none was captured."""

    @property
    def us(self) -> float:
        """Median."""
        return statistics.median(self.samples_us)

    @property
    def spread(self) -> float:
        """Between the quarter points, relative to the median."""
        if len(self.samples_us) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4)
        return (high - low) / self.us


@dataclass(frozen=True)
class Slope:
    """What one more layer costs."""

    us: float
    launches: float | None


def depths(card: ModelCard, kind: LayerKind) -> tuple[int, int]:
    """Layers of the two graphs: :data:`FEW` and :data:`MANY`, or a third of what the model has and all of it.

    Raises:
        InputError: the model has fewer than two MoE layers of the kind.
    """
    have = sum(1 for layer, one in enumerate(card.layer_kinds) if one == kind and not card.is_dense(layer))
    if have < 2:
        raise InputError(f"{card.name} has {have} {kind} MoE layers; a slope needs two")
    return (FEW, MANY) if have >= MANY else (max(1, have // 3), have)


def slope(few: Graph, many: Graph) -> Slope:
    """Between two graphs.

    Raises:
        InputError: they have equally many layers.
    """
    more = many.layers - few.layers
    if more < 1:
        raise InputError(f"a slope between {few.layers} and {many.layers} layers is none")
    launches = None if few.launches is None or many.launches is None else (many.launches - few.launches) / more
    return Slope((many.us - few.us) / more, launches)


@dataclass(frozen=True)
class Verdict:
    """A figure beside its bar."""

    bar: Bar
    got: float
    made_of: tuple[Mapping[str, Any], ...] = ()
    """Of a layer's time, what each family takes beside its floor, the largest distance first; empty where nobody looked."""

    @property
    def word(self) -> str:
        """``aim``, ``closes`` or ``missed``."""
        return "aim" if self.got <= self.bar.aim else "closes" if self.got <= self.bar.close else "missed"

    def to_json(self) -> dict[str, Any]:
        """Bar, figure, word."""
        return {
            "what": self.bar.what, "unit": self.bar.unit, "got": self.got, "close": self.bar.close, "aim": self.bar.aim,
            "verdict": self.word, "made_of": [dict(one) for one in self.made_of],
        }  # fmt: skip


def routing_fault(card: ModelCard, rows: int, distinct: float) -> str | None:
    """Why a measurement with so many distinct experts a layer, in the mean, does not stand for uniform routing, or None."""
    wanted = expected_distinct_experts(card, rows)
    if abs(distinct - wanted) <= DISTINCT_OFF * wanted:
        return None
    return f"{distinct:.1f} distinct experts in the mean, {wanted:.1f} under uniform routing at {rows} rows"


def layer_floor_us(card: ModelCard, tp: int, rows: int, q_len: int, kind: LayerKind, gpu: GpuCard, *, stock: bool = False) -> float:  # fmt: skip
    """Least time of a MoE layer's bytes; ``stock``: with router and latent projections replicated, as stock engines have them."""
    moved = layer_bytes(card, tp, rows, kind, q_len=q_len, moe="stock" if stock else "sharded").total
    return floor_us(moved, gpu)


def step_floor_us(card: ModelCard, tp: int, rows: int, q_len: int, gpu: GpuCard) -> float:
    """Least time of a step's bytes, head included."""
    return floor_us(step_bytes(card, tp, rows, q_len=q_len), gpu)


def verdicts(found: Mapping[str, Any], card: ModelCard) -> list[Verdict]:
    """Of a measurement's table (:func:`k3lab.decode.measure_bars.measure`) of a model: those bars that speak of it."""
    if replace(card, name=K3.name) != K3:  # whatever its file is called
        return []
    made: list[Verdict] = []
    for one in found["rows"]:
        if (found["tp"], one["dcp"]) != (BARS_TP, 1):
            continue
        rows, own = one["rows"], one["backends"]["latency_specialized"]
        if rows in LAYER_BARS:
            layer = own["layers"]["kda"]
            made.append(Verdict(LAYER_BARS[rows], layer["us"], tuple(layer.get("made_of", ()))))
            made.append(Verdict(STEP_BARS[rows], own["step_us"]))
        made += [
            Verdict(bar, own["layers"][kind]["launches"])
            for kind, bar in LAUNCH_BARS.items()
            if own["layers"].get(kind, {}).get("launches") is not None
        ]
    return made


def ratio_faults(found: Mapping[str, Any]) -> list[str]:
    """Where the tuned path is less than :data:`FASTER` times as fast as ``auto``."""
    faults = []
    for one in found["rows"]:
        for kind, ratio in one["ratios"].items():
            if ratio < FASTER:
                faults.append(
                    f"{one['rows']} rows, {kind}: {ratio:.2f} times as fast as auto, at least {FASTER:g} is wanted"
                )
    return faults
