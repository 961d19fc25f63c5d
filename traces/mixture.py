"""Steps that are no steady run of one kind, and kernels enough for a layer that are in none: what forbids a pass."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .layers import ANCHORS, RECURRENCE, StepLayers
from .steps import Step

_AT_ONCE = 0.1
"""Share of a step's kernels that may end before the step before: work on a side stream, not another run."""


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
    if layers is None and split.method in (RECURRENCE, ANCHORS):
        kernels = round(median(end - start for start, end in split.spans))
        before, after = split.spans[0][0], len(steps[0].kernels) - split.spans[-1][1]
        for count, where in ((before, "before the first layer"), (after, "after the last layer")):
            if count >= kernels:
                found.append(f"{count} kernels {where} are enough for a layer; --layers N tells whether they are one")
    return tuple(found)


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
