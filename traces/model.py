"""What every reader delivers: kernels, launches, ranges and facts of one capture, in integer nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import gcd
from operator import attrgetter, eq
from types import MappingProxyType
from typing import NamedTuple, TypeVar

Thread = tuple[int, int]
"""(process, thread) as the file numbers them."""

Row = TypeVar("Row", bound=tuple)

MAX_DURATION_NS = 7 * 24 * 3600 * 10**9
"""A single device event longer than seven days is a corrupt stamp, not a kernel."""


class Kernel(NamedTuple):
    """One kernel on the device. Times in ns on the clock of the file; ``grid``/``block`` empty where not recorded.

    A tuple, because a capture has millions of them.
    """

    name: str
    start: int
    end: int
    device: int = 0
    stream: int = 0
    process: int = 0
    correlation: int | None = None
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    node: int | None = None

    @property
    def duration(self) -> int:
        """End minus start, ns."""
        return self.end - self.start

    @property
    def order(self) -> tuple[int, int, int, str, tuple[int, ...], tuple[int, ...], int]:
        """A total order by device start that does not depend on the order of the rows in the file."""
        return (self.start, self.end, self.stream, self.name, self.grid, self.block, self.correlation or 0)


def rows_of(kind: type[Row], rows: Iterable[tuple]) -> list[Row]:
    """Rows as named tuples of one kind, without a call each: for tables of millions."""
    return list(map(partial(tuple.__new__, kind), rows))


def in_order(kernels: list[Kernel]) -> None:
    """Sort by device start; kernels of one start in an order that does not depend on that of the rows in the file."""
    kernels.sort(key=attrgetter("start"))
    starts = [kernel.start for kernel in kernels]
    stop = 0
    same = list(map(eq, starts, starts[1:]))
    for first in [index for index, tied in enumerate(same) if tied] if True in same else ():
        if first >= stop:
            stop = bisect_right(starts, starts[first], first)
            kernels[first:stop] = sorted(kernels[first:stop], key=lambda item: (item.order, item.process, item.device))


class ApiCall(NamedTuple):
    """The host call that launched a kernel or a graph."""

    name: str
    start: int
    end: int
    thread: Thread

    @property
    def is_graph_launch(self) -> bool:
        """Whether it replays a graph (cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch, any version suffix)."""
        return "GraphLaunch" in self.name


class HostRange(NamedTuple):
    """An NVTX range or a torch user annotation on a host thread; ``end_thread`` is another that ended it, if one did."""

    name: str
    start: int
    end: int
    thread: Thread
    end_thread: Thread | None = None


class CopyTime(NamedTuple):
    """One copy, fill or host wait on the device. ``kind``: memcpy, memset, sync; ``stream`` is None where unknown."""

    kind: str
    start: int
    end: int
    device: int = 0
    stream: int | None = None
    process: int = 0


@dataclass(frozen=True, slots=True)
class NodeOrigin:
    """When and on which thread a graph node was captured."""

    created: int
    thread: Thread


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A device row whose times cannot be used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Trace:
    """One capture.

    ``kernels`` are sorted by device start. ``apis`` is keyed by (process, correlation), ``node_origins`` by
    (process, graph node). ``graph_replays`` are the (start, end) of replays recorded only as a whole.
    ``copy_times`` are copies, fills and waits with usable times, ``overheads`` the (start, end) in which the profiler
    itself was at work (buffer flushes): a gap under one is its own. Both are sorted by start.
    ``notes`` are plain lines about the file itself, and ``incomplete`` those that say kernels are missing from it;
    nothing of the profiled environment is kept.
    """

    path: str
    format: str
    kernels: tuple[Kernel, ...]
    apis: Mapping[tuple[int, int], ApiCall] = field(default_factory=lambda: MappingProxyType({}))
    ranges: tuple[HostRange, ...] = ()
    node_origins: Mapping[tuple[int, int], NodeOrigin] = field(default_factory=lambda: MappingProxyType({}))
    copies: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    copy_times: tuple[CopyTime, ...] = ()
    overheads: tuple[tuple[int, int], ...] = ()
    rejected: tuple[RejectedRow, ...] = ()
    gpus: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    graph_mode: str | None = None
    graph_replays: tuple[tuple[int, int], ...] = ()
    synthetic: bool = False
    tool: str | None = None
    world_size: int | None = None
    rank: int | None = None
    notes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    no_kernels_hint: str = ""

    def __repr__(self) -> str:  # a million kernels are no line of a notebook
        return f"<Trace {self.path}: {self.format}, {len(self.kernels)} kernels>"

    def gpu(self, device: int) -> str | None:
        """The name of a device, or None where the file does not say it (or not which)."""
        names = set(self.gpus.values())
        if len(names) == 1:
            return next(iter(names))
        return self.gpus.get(device)

    def api(self, kernel: Kernel) -> ApiCall | None:
        """The host call that launched the kernel; trimmed captures lack it."""
        if kernel.correlation is None:
            return None
        return self.apis.get((kernel.process, kernel.correlation))

    @cached_property
    def resolution_ns(self) -> int:
        """The step in which the file counts time: greatest common divisor of all kernel times, at most 1000."""
        if not self.kernels:
            return 1
        origin = self.kernels[0].start
        step = 0
        for kernel in self.kernels:
            step = gcd(step, kernel.start - origin, kernel.duration)
            if step == 1:
                break
        return min(1000, step)
