"""Marks whose kernels are not in the file: what a capture lost without saying so."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .layers import LAUNCH_MARKS, NODE_MARKS, StepLayers
from .marking import Marked
from .marks import layer_number, step_mark
from .model import HostRange, Trace
from .readers.lost import EDGES
from .steps import Steps

_DIGITS = re.compile(r"\d+")


def _shape(name: str) -> str:
    return _DIGITS.sub("#", name)


def silent_marks(trace: Trace, items: Sequence[Marked], steps: Steps, split: StepLayers) -> tuple[tuple[str, ...], int]:
    """Plain lines on step and layer marks like those found that own no kernel, and how many step marks at the edges.

    Args:
        trace: the capture.
        items: the kernels of the device.
        steps: its steps.
        split: the layers of one of them.
    """
    process, device = items[0].kernel.process, items[0].kernel.device
    if len(items) < len(trace.kernels) and any(
        kernel.device != device and kernel.process == process for kernel in trace.kernels
    ):
        return (), 0  # the kernels may be the other device's
    found = []
    inside, edges = _silent_steps(trace.ranges, steps)
    if inside or edges > EDGES * len(steps.steps):
        found.append(f"{inside + edges} step marks have no kernels: events were lost")
    if split.method in (NODE_MARKS, LAUNCH_MARKS):
        shapes = {_shape(name) for name in split.names}
        alike = (layer_number(item.name) for item in trace.ranges if _shape(item.name) in shapes)
        if numbers := {number for number in alike if number is not None} - set(split.numbers):
            numbers -= {item.layer.number for item in items if item.layer is not None}
        if numbers:
            listed = ", ".join(map(str, sorted(numbers)[:5])) + (", ..." if len(numbers) > 5 else "")
            found.append(f"layers are marked that have no kernels ({listed}): events were lost")
    return tuple(found), edges


def _silent_steps(ranges: Iterable[HostRange], steps: Steps) -> tuple[int, int]:
    """Step marks of the steps' form that no kernel was launched under: between the steps, and before or after them.

    A mark counts that lies on a thread of the steps' marks and apart from all of them.
    """
    used = {mark for step in steps.steps if (mark := step.kernels[0].step) is not None}
    by_thread: dict[object, list[HostRange]] = {}
    for mark in sorted(used, key=lambda item: (item.start, item.end)):
        by_thread.setdefault(mark.thread, []).append(mark)
    starts = {thread: [mark.start for mark in own] for thread, own in by_thread.items()}
    shapes = {_shape(mark.name) for mark in used}
    inside = edges = 0
    for item in ranges:
        if item.thread not in by_thread or _shape(item.name) not in shapes or item in used:
            continue
        said = step_mark(item.name)
        if said is None or said.decode is False:
            continue
        own = by_thread[item.thread]
        after = bisect_right(starts[item.thread], item.start)
        if (after and own[after - 1].end > item.start) or (after < len(own) and own[after].start < item.end):
            continue  # around a step or inside one
        if 0 < after < len(own):
            inside += 1
        else:
            edges += 1
    return inside, edges
