"""Work on side streams that the main stream has to wait for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from ..analysis import DeviceLayers
from ..families import Names
from ..model import Kernel
from ..timing import median_ns
from ..verdict import microseconds
from .alignment import Aligned, columns_of, examined
from .causes import Intervals
from .finding import NOTABLE_NS, Finding, kernel_label

_FOLLOWS_NS = 3000  # a main stream that waited for a side stream goes on within this


def main_stream(device: DeviceLayers) -> int:
    """The stream with the most work in the layers."""
    first, last = device.spans[0][0], device.spans[-1][1]
    work: Counter[int] = Counter()
    for kernel in device.steps[0][first:last]:
        work[kernel.stream] += kernel.duration
    return max(work, key=lambda stream: (work[stream], -stream))


def not_hidden(classes: Sequence[Aligned], device: DeviceLayers, names: Names, told: set[int]) -> list[Finding]:
    """Kernels of side streams that end in a pause of the main stream, which waits for them.

    The main stream is that with the most work in the layers. What counts is the part of the pause that the kernel
    fills before its end. Their indices into a step are added to ``told``.
    """
    main = main_stream(device)
    if all(kernel.stream == main for kernel in device.steps[0]):
        return []
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
                    f"class {one.group.name}: kernel {position} {kernel_label(name, names)} on a side stream is not hidden: "
                    f"the main stream pauses {microseconds(usual)} a layer until it ends"
                )
                found.append(Finding("side", None, text, usual * len(exposed), "side stream"))
                continue
            for index, value in exposed.items():
                if value - usual > NOTABLE_NS:
                    layer = device.layers[index]
                    text = (
                        f"{layer.name}: kernel {position} {kernel_label(name, names)} on a side stream is not hidden: the "
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
