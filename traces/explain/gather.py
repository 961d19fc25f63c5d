"""All explanations of one device, the costliest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..analysis import DeviceLayers
from ..budget import Budget
from ..families import Names
from ..family_check import ClassFamilies
from ..model import Trace
from .alignment import align
from .causes import Causes
from .differences import against_class, between_classes, over_count
from .finding import Finding, by_cost, one_line
from .gaps import find_gaps, gap_findings
from .kernels import against_peers, largest_parts, over_share, stock_kernels
from .overlap import lost_overlap, never_overlap, no_overlap, run_ahead
from .side import not_hidden
from .steps import between_steps, several_graphs, shifted


def explain(
    trace: Trace,
    device: DeviceLayers,
    over: Iterable[int] = (),
    *,
    names: Names,
    budget: Budget | None = None,
    step_ns: int | None = None,
    families: Sequence[ClassFamilies] = (),
) -> list[Finding]:
    """What makes the layers and steps of a device slow: each thing with its cost in ns of a step, the costliest first.

    Costs overlap: idle time may be told of a layer, of its class and of the graphs that meet there.
    Where no layers were found nothing is explained, and that is said. Times of the host are never added to times of
    the device; what nothing measures has no cost, rather than one of 0.

    Args:
        trace: the capture.
        device: the analysed layers of one device of it.
        over: positions of the layers that failed.
        names: families of kernel names.
        budget: what the layers are held against.
        step_ns: how long a step takes untraced, if known.
        families: of each class, held against their shares of the budget.
    """
    if device.abstained is not None or not device.layers:
        why = device.abstained.reason if device.abstained is not None else "there are no layers"
        return [Finding("abstained", None, f"nothing is explained: {why}")]
    failed = set(over)
    causes = Causes(trace, device)
    classes = [align(group, device) for group in device.classes]
    gaps, steps = find_gaps(device, causes)
    told: set[int] = set()
    found = lost_overlap(classes, device, trace, names, told)
    found += never_overlap(classes, device, trace, names)
    found += not_hidden(classes, device, names, told)
    found += gap_findings(device, classes, gaps, steps, names, told)
    for at, one in enumerate(classes):
        found += against_class(one, device)
        found += against_peers(one, device, failed, names, told)
        if budget is not None:
            found += over_count(one, budget)
        if failed.intersection(one.group.members):
            found.append(largest_parts(one, names))
        if at < len(families) and 2 * len(failed.intersection(one.group.members)) > len(one.group.members):
            found += over_share(one, families[at], names, budget)
    found += between_classes(classes)
    found += stock_kernels(device, names)
    found += several_graphs(trace, device, gaps, steps)
    found += between_steps(device, causes)
    found += shifted(device, step_ns)
    found += run_ahead(device) or no_overlap(trace, device)
    return sorted((replace(item, text=one_line(item.text)) for item in found), key=by_cost)
