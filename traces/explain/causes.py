"""Why the device idled between two kernels, by what the trace records in that time; unexplained where nothing does."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from ..analysis import DeviceLayers
from ..collectives import is_collective
from ..model import ApiCall, Kernel, Thread, Trace
from ..names import short_name
from ..verdict import microseconds
from .alignment import examined

OVERHEAD, COPY, OTHER, SYNC, HOST, LAUNCHING, LATENCY, GRAPH_START, COLLECTIVE, UNEXPLAINED = (
    "overhead", "copy", "other kernels", "sync", "host-bound", "launching", "launch latency", "graph start", "collective", "unexplained"
)  # fmt: skip
_MOST = 0.5
_COPY_SHARE = 0.1  # a copy of 2 us does not make a gap of 200 us
_LATENCY_NS = 10_000  # from a launch call to its kernel, on an idle device, at most


class Cause(NamedTuple):
    """A word of this module, and a sentence that says what in the trace shows it."""

    word: str
    text: str


class Intervals:
    """Intervals that may overlap, sorted by start, asked for those that touch a window."""

    def __init__(self, items: Iterable[tuple[int, int, str]]) -> None:
        self.items = sorted(items)
        self.starts = [item[0] for item in self.items]
        # latest end so far: where to stop looking back
        self.reached = list(accumulate([item[1] for item in self.items], max))

    def touching(self, start: int, end: int) -> list[tuple[int, int, str]]:
        """Those that share time with the window, by start."""
        found = []
        index = bisect_left(self.starts, end) - 1
        while index >= 0 and self.reached[index] > start:
            if self.items[index][1] > start:
                found.append(self.items[index])
            index -= 1
        return found[::-1]


def covered(items: Sequence[tuple[int, int, str]], start: int, end: int) -> int:
    """How much of a window the intervals, sorted by start, cover; ns."""
    total, reached = 0, start
    for begin, until, _ in items:
        low, high = max(begin, reached), min(until, end)
        if high > low:
            total += high - low
            reached = high
    return total


class Causes:
    """Finds the cause of gaps on one device of a trace."""

    def __init__(self, trace: Trace, device: DeviceLayers) -> None:
        self.trace = trace
        own = [item for item in trace.copy_times if item.process in (0, device.process)]
        self.copies = Intervals(
            (item.start, item.end, item.kind) for item in own if item.kind != "sync" and item.device == device.device
        )
        waits: dict[Thread | None, list[tuple[int, int, str]]] = defaultdict(list)
        for item in own:
            if item.kind == "sync":  # which thread waited stands in no file
                waits[None].append((item.start, item.end, "a wait for the device"))
        for (process, _), call in trace.apis.items():
            if "Synchronize" in call.name and process in (0, device.process):
                waits[call.thread].append((call.start, call.end, call.name))
        self.waits = {thread: Intervals(items) for thread, items in waits.items()}
        self.overheads = Intervals((start, end, "") for start, end in trace.overheads)
        self._device = device

    @cached_property
    def kernels(self) -> Intervals:
        """The kernels of the device from the start of each examined step to that of the next, whoever launched them."""
        kernels, place = self.trace.kernels, (self._device.process, self._device.device)
        begins = [kernel.start for kernel in kernels]
        longest = max(map(sub, [kernel.end for kernel in kernels], begins))
        found: set[int] = set()
        for step in examined(self._device):
            first = min(kernel.start for kernel in self._device.steps[step])
            last = max(kernel.end for kernel in self._device.steps[step])
            for kernel in self._device.steps[step + 1] if step + 1 < len(self._device.steps) else ():
                last = max(last, kernel.start)
            found.update(range(bisect_left(begins, first - longest), bisect_left(begins, last + 1)))
        rows = [kernels[index] for index in sorted(found)]
        return Intervals((row.start, row.end, row.name) for row in rows if (row.process, row.device) == place)

    def find(self, before: Kernel, kernel: Kernel, start: int, end: int) -> Cause:
        """Why nothing of the step ran from ``start`` to ``end``.

        Args:
            before: the kernel that ended at ``start``.
            kernel: the one that began at ``end``.
            start: ns on the clock of the file.
            end: likewise, later.
        """
        length = end - start
        copies = self.copies.touching(start, end)
        copied = covered(copies, start, end)
        flushed = covered(self.overheads.touching(start, end), start, end)
        if flushed > _MOST * length and flushed > copied:
            return Cause(
                OVERHEAD, f"overhead (the profiler's, or a kernel being loaded) for {microseconds(flushed)} of it"
            )
        kinds = ", ".join(sorted({kind for _, _, kind in copies}))
        many = f"a {kinds} takes" if len(copies) == 1 else f"{len(copies)} copies or fills ({kinds}) take"
        copy = Cause(COPY, f"{many} {microseconds(copied)} of it")
        if copied > _MOST * length:
            return copy
        others = self.kernels.touching(start, end)
        run = covered(others, start, end)
        if run > _MOST * length:
            return Cause(
                OTHER, f"{short_name(others[0][2])}, launched later or elsewhere, ran for {microseconds(run)} of it"
            )
        rest = self._by_launch(before, kernel, start, end)
        if copied <= _COPY_SHARE * length:
            return rest
        # a host that copies between its launches is late because of that
        return copy if rest.word in (HOST, SYNC, LATENCY) else Cause(rest.word, f"{copy.text}, the rest is {rest.text}")

    def _waits(self, thread: Thread | None, start: int, end: int) -> list[tuple[int, int, str]]:
        """Waits of the host for the device that touch a window: of a thread and of unknown ones, or of all."""
        chosen = self.waits.values() if thread is None else (self.waits.get(one) for one in (thread, None))
        return sorted(wait for items in chosen if items is not None for wait in items.touching(start, end))

    def _by_launch(self, before: Kernel, kernel: Kernel, start: int, end: int) -> Cause:
        call = self.trace.api(kernel)
        same = kernel.correlation is not None and kernel.correlation == before.correlation
        waits = [] if same else self._waits(None, start, end)
        if call is None:
            if covered(waits, start, end) > _MOST * (end - start):
                return Cause(SYNC, f"the host was in {waits[0][2]}")
            why = "" if same else " (the launch call is not in the file)"
            return self._beside_collective(before, kernel) or Cause(UNEXPLAINED, f"unexplained{why}")
        if not same and call.start > start:
            return self._late(call, start, end)
        length = end - start
        launching = min(call.end, end) - start
        if launching > _MOST * length:
            return Cause(
                LAUNCHING, f"{_called(call)}, which launches it, was still at work for {microseconds(launching)} of it"
            )
        if not same and end - call.start <= _LATENCY_NS:
            made = microseconds(end - call.start)
            return Cause(LATENCY, f"the latency of a launch: {_called(call)} started {made} before the kernel")
        if not same and call.is_graph_launch:
            made = microseconds(start - call.start)
            return Cause(GRAPH_START, f"another graph begins here, launched {made} before the gap")
        return self._beside_collective(before, kernel) or Cause(UNEXPLAINED, "unexplained")

    def _late(self, call: ApiCall, start: int, end: int) -> Cause:
        """The launch began in the gap: the host's doing, as far as it and the latency of a launch reach."""
        late = microseconds(call.start - start)
        if ended := [wait for wait in self._waits(call.thread, start, start + 1) if wait[1] <= call.start]:
            return Cause(SYNC, f"the host was in {ended[-1][2]}, and launched {late} after the kernel before had ended")
        if max(call.start, min(call.end, end)) + _LATENCY_NS - start < _MOST * (end - start):
            return Cause(UNEXPLAINED, f"unexplained: {_called(call)} started {late} after the kernel before had ended, "
                         "and the kernel long after that")  # fmt: skip
        return Cause(HOST, f"host-bound: {_called(call)} started {late} after the kernel before had ended")

    def _beside_collective(self, before: Kernel, kernel: Kernel) -> Cause | None:
        for place, name in (("behind", before.name), ("before", kernel.name)):
            if is_collective(name):
                return Cause(COLLECTIVE, f"{place} the collective {short_name(name)}: ranks may be apart, compare them")
        return None


def _called(call: ApiCall) -> str:
    return call.name.split("_v")[0]
