"""Steps that are no steady run of one kind, and kernels enough for a layer that are in none: what forbids a pass."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .layers import ANCHORS, RECURRENCE, StepLayers
from .recurrence import likeness
from .steps import Step

_AT_ONCE = 0.1
"""Share of a step's kernels that may end before the step before: work on a side stream, not another run."""

_LIKE_A_LAYER = 0.6
"""A layer whose mark is lost has the kernels of its neighbour, but for some."""


def mixed(steps: Sequence[Step], split: StepLayers, layers: int | None) -> tuple[str, ...]:
    """Plain lines on what a median over the steps would hide.

    Args:
        steps: the steps that are judged, in time order.
        split: the layers of each.
        layers: how many layers a step has, if known.
    """
    found = []
    for what, values in (("rows", {step.rows for step in steps}), ("requests", {step.requests for step in steps})):
        sizes = sorted(value for value in values if value is not None)
        if len(sizes) > 1:
            listed = ", ".join(map(str, sizes[:5])) + (", ..." if len(sizes) > 5 else "")
            found.append(f"the steps are of different sizes by their marks ({what}: {listed})")
            break
    if count := _at_once(steps):
        found.append(f"{count} steps run while another does: two runs at once, or a clock that jumped")
    if layers is None:
        found.extend(_beside(steps[0].names, split))
    return tuple(found)


def _beside(names: Sequence[str], split: StepLayers) -> list[str]:
    """Kernels before the first layer or after the last that may be a layer.

    What recurs is found wherever it is like a layer; so what is left is told by its size. Marks leave out what they do
    not cover (sampling may be many kernels): that is told where it is like the layer it adjoins.
    """
    (start, end), (begin, stop) = split.spans[0], split.spans[-1]
    before, after = names[max(0, start - (end - start)) : start], names[stop : stop + stop - begin]
    told = []
    for count, piece, layer, where in (
        (start, before, names[start:end], "before the first layer"),
        (len(names) - stop, after, names[begin:stop], "after the last layer"),
    ):
        if split.method in (RECURRENCE, ANCHORS):
            doubtful = count >= median(last - first for first, last in split.spans)
        else:
            doubtful = likeness(piece, layer) >= _LIKE_A_LAYER
        if doubtful:
            told.append(f"{count} kernels {where} may be another; --layers N tells how many there are")
    return told


def _at_once(steps: Sequence[Step]) -> int:
    """Steps of which more than a few kernels end before one that began earlier has ended."""
    reached: int | None = None
    count = 0
    for step in steps:
        if reached is not None and step.begin < reached:
            early = sum(item.kernel.end < reached for item in step.kernels)
            count += early > _AT_ONCE * len(step.kernels)
        reached = max(step.end, reached or step.end)
    return count
