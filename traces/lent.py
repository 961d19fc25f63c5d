"""Layers of one trace lent to another: a graph whose capture no one marked, and an eager run with marked layers.

What a launch order alone does not tell, another run of the same model does, in which every layer is under a range.
The two orders are laid beside each other by their kernels' names: a fused kernel, a cast that the graph has not, a
split-K reduction more are places where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .alignment import common
from .names import base_name

LEAST_COMMON = 0.5
"""Share of the layers' kernels that must be in both orders: with less they are runs of different models."""


@dataclass(frozen=True)
class Lent:
    """A step of the marked run: its kernels' names, and of each the (number, name) of its layer."""

    file: str
    kernels: tuple[str, ...]
    layers: tuple[tuple[int, str] | None, ...]


def placed(names: Sequence[str], lent: Lent) -> list[tuple[int, str] | None] | str:
    """Of each kernel of a step the layer it is in, None where that is left open; or why the layers do not fit.

    Args:
        names: the step's kernels in launch order.
        lent: the layers of the other run.
    """
    pairs = common([base_name(name) for name in lent.kernels], [base_name(name) for name in names])
    whose = f"the layers of {lent.file} do not fit"
    if pairs is None:
        return f"{whose}: the launch orders differ in too many kernels"
    found: list[tuple[int, str] | None] = [None] * len(names)
    for theirs, own in pairs:
        found[own] = lent.layers[theirs]
    wanted, there = ({item for item in side if item is not None} for side in (lent.layers, found))
    marked = sum(item is not None for item in lent.layers)
    if sum(item is not None for item in found) < LEAST_COMMON * min(marked, len(names)):
        return f"{whose}: less than half of the kernels are in both launch orders"
    if lost := sorted(wanted - there):
        return f"{whose}: nothing of {lost[0][1]} is in this trace"
    return found
