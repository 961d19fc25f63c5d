"""Overlap: launches that run ahead (PDL), overlap one layer lost, and work of side streams that is not hidden.

A launch attribute stands in no file: that PDL was there is told by overlap on one stream alone, and its absence by
nothing but a launch call that cannot carry it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from ..analysis import DeviceLayers
from ..families import Plan
from ..model import Kernel, Trace
from ..names import base_name
from ..timing import median_ns
from ..verdict import microseconds
from .alignment import Aligned, columns_of, examined
from .causes import Intervals
from .finding import NOTABLE_NS, Finding, kernel_label

_AHEAD = 0.05
_LEAST_NS = 200  # overlap of peers from which its absence is told
_FOLLOWS_NS = 3000  # a kernel that only waited for another starts within this after it


def run_ahead(device: DeviceLayers) -> list[Finding]:
    """Whether kernels overlap on their stream, and whether their starts run ahead of the work."""
    times = [layer.times[step] for layer in device.layers for step in examined(device)]
    overlap = sum(item.overlap_same_stream for item in times)
    pairs = [(item.start_period, item.completion_period) for item in times if item.start_period is not None]
    off = [abs(start - period) / period for start, period in pairs if period > 0]
    apart = sum(value > _AHEAD for value in off)
    if not overlap or not off:
        return []
    busy, total = sum(item.busy for item in times), sum(item.total for item in times)
    text = f"kernels overlap on their stream (PDL seen): durations add up to {total / busy:.2f} times the busy time"
    if apart > 0.1 * len(off):
        text = (
            f"launches run ahead: PDL seen (start periods differ from completion periods by up to {max(off):.0%}; "
            f"durations add up to {total / busy:.2f} times the busy time)"
        )
    return [Finding("ahead", None, text)]


def no_overlap(trace: Trace, device: DeviceLayers) -> list[Finding]:
    """What can be said where no kernel overlaps its predecessor on a stream."""
    if any(item.overlap_same_stream for layer in device.layers for item in layer.times):
        return []
    said = _attribute([kernel for step in device.steps[:1] for kernel in step], trace)
    return [Finding("pdl", None, f"no kernel starts before the one before it on its stream has ended: {said}")]


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
    classes: Sequence[Aligned], device: DeviceLayers, trace: Trace, plan: Plan | None, told: set[int]
) -> list[Finding]:
    """Layers in which kernels never overlap their predecessor on the stream, where those of the other layers do.

    Compared are kernels with like predecessors. One that starts long after its predecessor has ended is told as a gap;
    the others are added to ``told``, indices into a step.
    """
    chosen = examined(device)
    by_step = [overlaps(device.steps[step]) for step in chosen]
    found = []
    for one in classes:
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
                f"by kernel {position} {kernel_label(one.group.sequence[position], plan)}, which starts "
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


def not_hidden(classes: Sequence[Aligned], device: DeviceLayers, plan: Plan | None, told: set[int]) -> list[Finding]:
    """Kernels of side streams that end in a pause of the main stream, which waits for them.

    The main stream is that with the most work in the layers. What counts is the part of the pause that the kernel
    fills before its end. Their indices into a step are added to ``told``.
    """
    first, last = device.spans[0][0], device.spans[-1][1]
    work: Counter[int] = Counter()
    for kernel in device.steps[0][first:last]:
        work[kernel.stream] += kernel.duration
    if len(work) < 2:
        return []
    main = max(work, key=lambda stream: (work[stream], -stream))
    tails = [_tails(device.steps[step], main) for step in examined(device)]
    found = []
    for one in classes:
        columns = columns_of(one, device)
        for position, name in enumerate(one.group.sequence):
            exposed = {index: median_ns(step.get(at, 0) for step in tails) for index, at in columns[position].items()}
            if not exposed or max(exposed.values()) <= NOTABLE_NS:
                continue
            usual = median_ns(exposed.values())
            told.update(at for index, at in columns[position].items() if exposed[index] > NOTABLE_NS)
            if usual > NOTABLE_NS:
                text = (
                    f"class {one.group.name}: kernel {position} {kernel_label(name, plan)} on a side stream is not hidden: "
                    f"the main stream pauses {microseconds(usual)} a layer until it ends"
                )
                found.append(Finding("side", None, text, usual * len(exposed), "side stream"))
                continue
            for index, value in exposed.items():
                if value - usual > NOTABLE_NS:
                    layer = device.layers[index]
                    text = (
                        f"{layer.name}: kernel {position} {kernel_label(name, plan)} on a side stream is not hidden: the "
                        f"main stream pauses {microseconds(value)} until it ends, {microseconds(usual)} in its peers"
                    )
                    found.append(Finding("side", layer.number, text, value - usual, "side stream"))
    return found


def _tails(kernels: Sequence[Kernel], main: int) -> dict[int, int]:
    """By index of a side kernel: the time up to its end in which the main stream paused, and went on right after."""
    busy = Intervals((kernel.start, kernel.end, "") for kernel in kernels if kernel.stream == main)
    found = {}
    for index, kernel in enumerate(kernels):
        if kernel.stream == main:
            continue
        before = bisect_left(busy.starts, kernel.end) - 1  # the last that began before this one ended
        if before + 1 >= len(busy.starts) or busy.starts[before + 1] - kernel.end > _FOLLOWS_NS:
            continue
        free = max(kernel.start, busy.reached[before]) if before >= 0 else kernel.start
        if kernel.end > free:
            found[index] = kernel.end - free
    return found
