"""Kernels that take more than they should: more than in the layer's peers, more than their family's share of a budget."""

from __future__ import annotations

from collections.abc import Collection

from ..analysis import DeviceLayers, Layer
from ..collectives import is_collective
from ..families import Plan, family_of
from ..verdict import class_period, microseconds
from .alignment import Aligned, notable, usual_increments
from .finding import NOTABLE_NS, Finding, kernel_label

_OUTLIER = 1.15
_FAR = 1.5
_PER_LAYER = 4


def against_peers(
    one: Aligned, device: DeviceLayers, failed: Collection[int], plan: Plan | None, told: Collection[int] = ()
) -> list[Finding]:
    """Kernels that add more than in the other layers of the class.

    In layers that stand out or failed all that is notable is told, in others what is half as much again; what
    ``told`` holds (indices into a step) is left out.
    """
    usual = class_period(one.group, device)
    found = []
    for index in one.group.members:
        layer = device.layers[index]
        first = device.spans[index][0]
        skip = {modal for own, modal in one.places[index].items() if first + own in told}
        suspect = layer.period > _OUTLIER * usual + NOTABLE_NS or (index in failed and layer.period > usual)
        found.extend(_of_layer(one, index, layer, 0 if suspect else _FAR, plan, skip))
    return found


def _of_layer(
    one: Aligned, index: int, layer: Layer, far: float, plan: Plan | None, skip: Collection[int]
) -> list[Finding]:
    found = []
    for position, (own, _) in sorted(one.medians[index].items()):
        if own <= notable(layer) or position in skip:
            continue
        peers = one.in_peers(index, position)
        if peers is None:
            continue
        usual, _ = peers
        if own - usual <= notable(layer) or own < far * usual:
            continue
        name = one.group.sequence[position]
        text = (
            f"{layer.name}: kernel {position} {kernel_label(name, plan)} adds {microseconds(own)}, "
            f"{microseconds(usual)} in its peers (+{microseconds(own - usual)})"
        )
        if is_collective(name):
            text += ": a collective, which waits for the last rank; compare the ranks"
        found.append(
            Finding("kernel", layer.number, text, own - usual, "collective" if is_collective(name) else "slow")
        )
    return sorted(found, key=lambda finding: -(finding.cost_ns or 0))[:_PER_LAYER]


def largest_parts(one: Aligned, plan: Plan | None) -> Finding:
    """The kernels that add most to a class."""
    increments = usual_increments(one)
    ranked = sorted(range(len(increments)), key=lambda index: (-increments[index], index))[:3]
    listed = ", ".join(f"{kernel_label(one.group.sequence[i], plan)} {microseconds(increments[i])}" for i in ranked)
    return Finding("parts", None, f"class {one.group.name}: most time is added by {listed}")


def not_ours(one: Aligned, plan: Plan | None) -> list[Finding]:
    """Stock kernels of families for which the plan has a kernel of ours."""
    ours = {family for name, family in (plan or {}).items() if name.startswith("k3_")}
    increments = usual_increments(one)
    found = []
    for position, name in enumerate(one.group.sequence):
        family = family_of(name, plan)
        if family is None or family not in ours or "k3_" in name or (plan and name in plan):
            continue
        cost = increments[position] * len(one.group.members)
        planned = ", ".join(sorted(own for own, of in (plan or {}).items() if of == family and own.startswith("k3_")))
        text = (
            f"class {one.group.name}: kernel {position} {kernel_label(name, plan)} is a stock kernel, where the plan has "
            f"{planned}; it adds {microseconds(increments[position])} a layer"
        )
        found.append(Finding("fallback", None, text, cost, "stock kernel"))
    return found
