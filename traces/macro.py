"""The macro period: after how many layers their classes come again (Kimi K3: KDA, KDA, KDA, MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_COVERED = 0.6
"""Share of the layers that must lie in the recurring stretch: the first and the last ones may differ."""
_PART = 0.3
"""The same where the turn may be broken: of the longest whole part."""
_FIRST = 3
"""Layers at the beginning that may differ: dense ones."""


@dataclass(frozen=True)
class Macro:
    """Layers that recur together: ``classes`` in turn, ``times`` over, from layer ``first`` on (a position)."""

    classes: tuple[str, ...]
    first: int
    times: int
    kernels: int
    """Kernels of one turn."""


def macro_period(classes: Sequence[str], kernels: Sequence[int]) -> Macro | None:
    """The shortest run of layers that comes at least twice in a row over most of the step; None where none does.

    Args:
        classes: the class of each layer, in order.
        kernels: kernels of each layer's class.
    """
    for period in range(1, len(classes) // 2 + 1):
        first, end = _stretch(classes, period)
        if end - first < max(_COVERED * len(classes), 2 * period):
            continue
        aligned = -(-first // period) * period  # a layer that differs before it (dense MLP) stands for one of the turn
        if end - aligned >= 2 * period:
            first = aligned
        turn = slice(first, first + period)
        return Macro(tuple(classes[turn]), first, (end - first) // period, sum(kernels[turn]))
    return None


def _stretch(classes: Sequence[str], period: int) -> tuple[int, int]:
    """The longest run of layers in which each class is the one ``period`` before, as a half-open range."""
    best, begun = (0, 0), 0
    for index in range(period, len(classes) + 1):
        if index == len(classes) or classes[index] != classes[index - period]:
            if index - begun > best[1] - best[0]:
                best = (begun, index)
            begun = index - period + 1
    return best


def broken_at(classes: Sequence[str]) -> int | None:
    """The layer (a position) at which layers that come in turn fall out of it; None where they keep it.

    A layer that a capture lost does that. The first few layers and the last one may differ; layers all alike have no turn.
    """
    count = len(classes)
    for period in range(1, count // 2 + 1):
        first, end = _stretch(classes, period)
        if end - first < max(_PART * count, 2 * period):
            continue
        if period == 1:
            return None
        if end < count - 1:
            return end
        return first if first > _FIRST else None
    return None
