"""Layer times side by side over ranks: the largest, the spread, and in what the ranks' layers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .analysis import DeviceLayers
from .names import base_name
from .rank_set import ranks_text
from .timing import median_ns

_TOLD = 6


@dataclass(frozen=True)
class LayerSpread:
    """One layer over the ranks: medians of its completion period, ns; ``spread_ns`` is the largest minus the smallest.

    ``slowest_rank`` is None where all ranks take the same.
    """

    number: int
    name: str
    largest_ns: int
    smallest_ns: int
    spread_ns: int
    slowest_rank: int | None


@dataclass(frozen=True)
class ClassSpread:
    """A class of layers over the ranks, by the median completion period of its layers on each, ns."""

    name: str
    kind: str | None
    layers: int
    largest_ns: int
    smallest_ns: int
    spread_ns: int
    slowest_rank: int | None


def _same_count(ranks: Mapping[int, DeviceLayers]) -> bool:
    return bool(ranks) and len({len(device.layers) for device in ranks.values()}) == 1


def _extremes(periods: Mapping[int, int]) -> dict[str, Any]:
    largest, smallest = max(periods.values()), min(periods.values())
    slowest = min(rank for rank, period in periods.items() if period == largest) if largest > smallest else None
    return {"largest_ns": largest, "smallest_ns": smallest, "spread_ns": largest - smallest, "slowest_rank": slowest}


def layer_spreads(ranks: Mapping[int, DeviceLayers]) -> list[LayerSpread]:
    """Every layer over the ranks; nothing where they have different numbers of layers."""
    if not _same_count(ranks):
        return []
    first = ranks[min(ranks)]
    return [
        LayerSpread(
            number=layer.number,
            name=layer.name,
            **_extremes({rank: device.layers[place].period for rank, device in ranks.items()}),
        )
        for place, layer in enumerate(first.layers)
    ]


def class_spreads(ranks: Mapping[int, DeviceLayers]) -> list[ClassSpread]:
    """Every class of the lowest rank's layers over the ranks; nothing where they have different numbers of layers."""
    if not _same_count(ranks):
        return []
    found = []
    for group in ranks[min(ranks)].classes:
        periods = {
            rank: median_ns(times.completion_period for place in group.members for times in device.layers[place].times)
            for rank, device in ranks.items()
        }
        found.append(ClassSpread(group.name, group.kind, len(group.members), **_extremes(periods)))
    return found


def unlike(ranks: Mapping[int, DeviceLayers]) -> list[str]:
    """In what the ranks' layers differ: their number, or the kernels of one."""
    counts: dict[int, list[int]] = {}
    for rank, device in sorted(ranks.items()):
        counts.setdefault(len(device.layers), []).append(rank)
    if len(counts) > 1:
        listed = "; ".join(f"{count} on {ranks_text(own)}" for count, own in sorted(counts.items()))
        return [f"the ranks have different numbers of layers: {listed}"]
    found = []
    for place in range(next(iter(counts), 0)):
        forms: dict[tuple[str, ...], list[int]] = {}
        for rank, device in sorted(ranks.items()):
            forms.setdefault(tuple(base_name(name) for name in device.layers[place].kernels), []).append(rank)
        if len(forms) > 1:
            usual = max(forms, key=lambda names: (len(forms[names]), -forms[names][0]))
            name = ranks[min(ranks)].layers[place].name
            for names, own in forms.items():
                if names != usual:
                    found.append(f"{name}: other kernels on {ranks_text(own)} than on {ranks_text(forms[usual])}: "
                                 f"{_difference(names, usual)}")  # fmt: skip
    if len(found) > _TOLD:
        return [*found[:_TOLD], f"... {len(found)} layers have other kernels on some rank"]
    return found


def _difference(names: Sequence[str], usual: Sequence[str]) -> str:
    here, there = [name for name in names if name not in usual], [name for name in usual if name not in names]
    parts = []
    if here:
        parts.append(f"has {', '.join(f'{name:.48}' for name in here[:3])}")
    if there:
        parts.append(f"lacks {', '.join(f'{name:.48}' for name in there[:3])}")
    return "; ".join(parts) or f"{len(names)} kernels against {len(usual)}"
