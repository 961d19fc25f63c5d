"""Kernels that take more than they should: more than in the layer's peers, more than their family's share of a budget."""

from __future__ import annotations

from collections.abc import Collection

from ..analysis import DeviceLayers, Layer
from ..budget import Budget
from ..collectives import is_collective
from ..families import Names, is_ours, stock_instead
from ..family_check import LEAST_SHARE_NS, ClassFamilies
from ..names import short_name
from ..timing import median_ns
from ..verdict import FAIL, class_period, microseconds
from .alignment import Aligned, notable, usual_increments
from .finding import NOTABLE_NS, Finding, kernel_label

_OUTLIER = 1.15
_FAR = 1.5
_PER_LAYER = 4
_LISTED = 4


def against_peers(
    one: Aligned, device: DeviceLayers, failed: Collection[int], names: Names, told: Collection[int] = ()
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
        found.extend(_of_layer(one, index, layer, 0 if suspect else _FAR, names, skip))
    return found


def _of_layer(one: Aligned, index: int, layer: Layer, far: float, names: Names, skip: Collection[int]) -> list[Finding]:
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
            f"{layer.name}: kernel {position} {kernel_label(name, names)} adds {microseconds(own)}, "
            f"{microseconds(usual)} in its peers (+{microseconds(own - usual)})"
        )
        if is_collective(name):
            text += ": a collective, which waits for the last rank; compare the ranks"
        found.append(
            Finding("kernel", layer.number, text, own - usual, "collective" if is_collective(name) else "slow")
        )
    return sorted(found, key=lambda finding: -(finding.cost_ns or 0))[:_PER_LAYER]


def largest_parts(one: Aligned, names: Names) -> Finding:
    """The kernels that add most to a class."""
    increments = usual_increments(one)
    ranked = sorted(range(len(increments)), key=lambda index: (-increments[index], index))[:3]
    listed = ", ".join(f"{kernel_label(one.group.sequence[i], names)} {microseconds(increments[i])}" for i in ranked)
    return Finding("parts", None, f"class {one.group.name}: most time is added by {listed}")


def over_share(one: Aligned, families: ClassFamilies, names: Names, budget: Budget | None) -> list[Finding]:
    """Families whose kernels add more than their share of the budget, where that was judged to be so."""
    increments = usual_increments(one)
    known = names.families(one.group.sequence)
    evidence = budget.split.evidence if budget is not None and budget.split is not None else ""
    whose = f" ({evidence})" if evidence else ""
    found = []
    for row in families.rows:
        share = row.limit.period_ns if row.limit else None
        if row.judgement.time != FAIL or share is None or share < LEAST_SHARE_NS:
            continue
        most = max(
            (at for at, family in enumerate(known) if family == row.family), key=lambda at: (increments[at], -at)
        )
        over = row.part.time_ns - share
        text = (
            f"class {one.group.name}: {row.family} adds {microseconds(row.part.time_ns)} a layer, its share of the budget{whose} is "
            f"{microseconds(share)} (+{microseconds(over)}); most is added by kernel {most} "
            f"{short_name(one.group.sequence[most])}, {microseconds(increments[most])}"
        )
        found.append(Finding("share", None, text, over * len(one.group.members), "over its share"))
    return found


def stock_kernels(device: DeviceLayers, names: Names) -> list[Finding]:
    """Planned kernels of ours that did not run, with the stock kernels of their family that did, or that may have."""
    found = []
    for item in stock_instead(names, [layer.kernels for layer in device.layers]):
        stock = [name for name in item.ran if not is_ours(name)]
        if not stock and (item.ran or not item.unknown):
            continue  # another kernel of ours ran, or nothing that could be of the family
        head = f"{item.planned} [{item.family}] is planned and did not run in {len(item.layers)} layers"
        if not stock:
            text = f"{head}; in its place may have run: {', '.join(map(short_name, item.unknown[:_LISTED]))}"
            found.append(Finding("fallback", None, text, None, "stock kernel"))
            continue
        cost = sum(_adds(device.layers[index], stock) for index in item.layers)
        text = (
            f"{head}: stock kernels of its family ran, {', '.join(map(short_name, stock[:_LISTED]))} "
            f"({microseconds(cost // len(item.layers))} a layer)"
        )
        found.append(Finding("fallback", None, text, cost, "stock kernel"))
    return found


def _adds(layer: Layer, names: Collection[str]) -> int:
    """Median over the steps of what the layer's kernels of these names add, ns."""
    at = [index for index, name in enumerate(layer.kernels) if name in names]
    return median_ns(sum(times.increments[index] for index in at) for times in layer.times)
