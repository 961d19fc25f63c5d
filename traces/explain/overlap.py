"""Overlap on one stream: launches that run ahead (PDL), and overlap that a layer lost or a kernel never has.

A launch attribute stands in no file: that PDL was there is told by overlap on one stream alone, and its absence by
nothing but a launch call that cannot carry it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..analysis import DeviceLayers
from ..families import Names
from ..model import Kernel, Trace
from ..names import base_name
from ..timing import median_ns, union_length
from ..verdict import microseconds
from .alignment import Aligned, columns_of, examined
from .finding import Finding, kernel_label
from .side import main_stream

_AHEAD = 0.05
_LEAST_NS = 200  # overlap of peers from which its absence is told
_FOLLOWS_NS = 3000  # a kernel that only waited for another starts within this after it
_LISTED = 4


def run_ahead(device: DeviceLayers) -> list[Finding]:
    """Whether kernels overlap on their stream, and whether their starts run ahead of the work."""
    steps = [device.steps[step] for step in examined(device)]
    first, last = device.spans[0][0], device.spans[-1][1]
    if not any((value or 0) > 0 for step in steps for value in overlaps(step)[first:last]):
        return []
    times = [layer.times[step] for layer in device.layers for step in examined(device)]
    pairs = [
        (item, item.start_period) for item in times if item.start_period is not None and item.completion_period > 0
    ]
    off = [abs(start - item.completion_period) / item.completion_period for item, start in pairs]
    apart = sum(value > _AHEAD for value in off) > 0.1 * len(off)
    # a layer that starts before the end of the one before is longer by its wall; behind a pause it is not
    early = sum(item.wall - item.completion_period > _AHEAD * item.completion_period for item, _ in pairs)
    text = "kernels overlap on their stream: PDL seen"
    if apart and early > 0.1 * len(pairs):
        text = "launches run ahead: PDL seen"
    differ = f"start periods differ from completion periods by up to {max(off):.0%}; " if apart else ""
    text += f" ({differ}durations on a stream add up to {_stacked([step[first:last] for step in steps]):.2f} times the time it is busy)"
    return [Finding("ahead", None, text)]


def _stacked(steps: Sequence[Sequence[Kernel]]) -> float:
    """How many kernels run at once on a stream, on average of the time in which one does."""
    total = busy = 0
    for step in steps:
        streams: dict[int, list[tuple[int, int]]] = {}
        for kernel in step:
            streams.setdefault(kernel.stream, []).append((kernel.start, kernel.end))
            total += kernel.duration
        busy += sum(map(union_length, streams.values()))
    return total / busy


def no_overlap(trace: Trace, device: DeviceLayers) -> list[Finding]:
    """What can be said where no kernel overlaps its predecessor on a stream."""
    if any(item.overlap_same_stream for layer in device.layers for item in layer.times):
        return []
    said = _attribute([kernel for step in device.steps[:1] for kernel in step], trace)
    return [
        Finding("pdl", None, f"no kernel of the layers starts before the one before it on its stream has ended: {said}")
    ]


def _attribute(kernels: Sequence[Kernel], trace: Trace) -> str:
    """What the launch calls of kernels say about PDL."""
    names = Counter(call.name.split("_v")[0] for kernel in kernels if (call := trace.api(kernel)) is not None)
    if not names:
        return "PDL not seen (no proof that the attribute is absent: the launch calls are not in the file)"
    if any("GraphLaunch" in name for name in names):
        return (
            "PDL not seen (no proof that the attribute is absent: a replay does not tell, and kernels may wait at once)"
        )
    with_attribute = [name for name in names if "Ex" in name]
    if not with_attribute:
        return f"launched by {', '.join(sorted(names))}: no PDL attribute"
    return f"launched by {', '.join(sorted(with_attribute))}: PDL not seen (no proof: kernels may wait at once)"


def overlaps(kernels: Sequence[Kernel]) -> list[int | None]:
    """By kernel of a step in launch order: how long before the end of the last on its stream it starts, ns.

    Not above 0 where it starts after; None for the first of a stream.
    """
    ended: dict[int, int] = {}
    found: list[int | None] = []
    for kernel in kernels:
        before = ended.get(kernel.stream)
        found.append(None if before is None else before - kernel.start)
        ended[kernel.stream] = max(kernel.end, before or kernel.end)
    return found


def lost_overlap(
    classes: Sequence[Aligned], device: DeviceLayers, trace: Trace, names: Names, told: set[int]
) -> list[Finding]:
    """Layers in which kernels never overlap their predecessor on the stream, where those of the other layers do.

    Compared are kernels with like predecessors. One that starts long after its predecessor has ended is told as a gap;
    the others are added to ``told``, indices into a step.
    """
    chosen = examined(device)
    by_step = [overlaps(device.steps[step]) for step in chosen]
    found = []
    for one in classes:
        if not any(device.layers[index].times[step].overlap_same_stream for index in one.places for step in chosen):
            continue
        lost: dict[int, list[tuple[int, int, int]]] = {}  # by layer: cost, modal position, overlap of the peers
        for position, where in enumerate(columns_of(one, device)):
            ahead: dict[int, list[int]] = {}
            for index, at in where.items():
                if values := [value for step in by_step if (value := step[at]) is not None]:
                    ahead[index] = values
            for index, values in ahead.items():
                if max(values) > 0 or min(values) < -_FOLLOWS_NS:
                    continue
                before = _before(device, where[index])
                peers = [at for at in ahead if at != index and _before(device, where[at]) == before]
                usual = median_ns(median_ns(ahead[at]) for at in peers) if peers else 0
                if usual >= _LEAST_NS:
                    cost = _added(one, index, position) - median_ns(_added(one, at, position) for at in peers)
                    lost.setdefault(index, []).append((max(0, cost), position, usual))
                    told.add(where[index])
        for index, places in lost.items():
            layer = device.layers[index]
            _, position, usual = max(places)
            kernels = [device.steps[chosen[0]][device.spans[index][0] + own] for own, modal in one.places[index].items()
                       if modal in {place for _, place, _ in places}]  # fmt: skip
            many = f"{len(places)} kernels start" if len(places) > 1 else "a kernel starts"
            text = (
                f"{layer.name}: {many} after the one before on the stream has ended, where the peers overlap; most is lost "
                f"by kernel {position} {kernel_label(one.group.sequence[position], names)}, which starts "
                f"{microseconds(usual)} before that in its peers: {_attribute(kernels, trace)}"
            )
            found.append(Finding("overlap", layer.number, text, sum(cost for cost, _, _ in places), "lost overlap"))
    return found


def _before(device: DeviceLayers, at: int) -> str | None:
    """The kernel launched before one on its stream, without its template arguments."""
    step = device.steps[0]
    earlier = (step[index].name for index in range(at - 1, -1, -1) if step[index].stream == step[at].stream)
    name = next(earlier, None)
    return None if name is None else base_name(name)


def _added(one: Aligned, index: int, position: int) -> int:
    parts = one.parts[index][position]
    return median_ns(a + b for a, b in zip(parts.increments, parts.bubbles, strict=True))


def never_overlap(classes: Sequence[Aligned], device: DeviceLayers, trace: Trace, names: Names) -> list[Finding]:
    """Kernels that overlap their predecessor in no layer of a class most of whose kernels do; what that costs is unknown."""
    by_step = [overlaps(device.steps[step]) for step in examined(device)]
    main = main_stream(device)
    found = []
    for one in classes:
        never: list[int] = []
        ahead = 0
        columns = columns_of(one, device)
        for position, where in enumerate(columns):
            values = [value for at in where.values() for step in by_step if (value := step[at]) is not None]
            if not values or any(device.steps[0][at].stream != main for at in where.values()):
                continue
            ahead += median_ns(values) >= _LEAST_NS
            if max(values) <= 0 and median_ns(values) >= -_FOLLOWS_NS:
                never.append(position)
        if not never or ahead <= len(never):
            continue
        kernels = [device.steps[0][at] for position in never for at in columns[position].values()]
        listed = ", ".join(
            f"{position} {kernel_label(one.group.sequence[position], names)}" for position in never[:_LISTED]
        )
        text = (
            f"class {one.group.name}: kernel {listed} never starts before the one before it has ended, where {ahead} others "
            f"do: {_attribute(kernels, trace)}"
        )
        found.append(Finding("overlap", None, text, None, "no overlap"))
    return found
