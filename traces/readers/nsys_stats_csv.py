"""Reader of the CSV reports of ``nsys stats``: told apart, and read, by their headers and never by position."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from ..errors import TraceError
from ..model import CopyTime, Kernel, RejectedRow, Trace
from .csv_tables import DAMAGED, HEADER, Event, tables, whole
from .nsys_projection import Projection
from .nsys_sqlite import RECAPTURE
from .nsys_stats_columns import (
    GIVE_EXPORT,
    GPU_TRACE,
    KERNEL_SUM,
    PROJECTION,
    Columns,
    exact_ns,
    is_stats_header,
    report_of,
    rounded,
)
from .stamps import BadStamp, check_interval

_DEVICE = re.compile(r"^(.*?)\s*\((\d{1,6})\)$")
_WANTED = ("name", "start", "duration", "corrid", "device", "strm", "grdx", "grdy", "grdz", "blkx", "blky", "blkz")


class _GpuTrace:
    """The kernels and copies of a cuda_gpu_trace table, row by row; there may be millions, so texts are read once."""

    def __init__(self, columns: Columns, file: str) -> None:
        self._columns = columns
        self._start, self._duration = columns.factor("start", file), columns.factor("duration", file)
        self._pick = itemgetter(*(columns.at.get(name, -1) for name in _WANTED))
        self.kernels: list[Kernel] = []
        self.rejected: list[RejectedRow] = []
        self.copies: Counter[str] = Counter()
        self.copy_times: list[CopyTime] = []
        self.replays: list[tuple[int, int]] = []
        self.gpus: dict[int, str] = {}
        self._devices: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._shapes: dict[tuple[str, str, str], tuple[int, ...]] = {}

    def add(self, event: Event) -> None:
        """Take one row."""
        if event.kind == DAMAGED:
            name = " ".join(self._columns.text(event.cells, "name").split()) or "<unnamed>"
            self.rejected.append(RejectedRow(name, f"line {event.line}: {event.reason}"))
            return
        cells = [*event.cells, ""]  # where a column is missing, -1 finds this blank
        name, start, duration, correlation, device, stream, *dims = self._pick(cells)
        name = self._name(name)
        grid = self._shape((dims[0], dims[1], dims[2]))
        kind = None if grid or not name.startswith("[") else _operation(name)
        if kind in ("memcpy", "memset", "other"):
            self.copies[kind] += 1
        try:
            begin, end = self._interval(start.strip(), duration.strip())
        except BadStamp as reason:
            if kind is None:
                self.rejected.append(RejectedRow(name, str(reason)))
            return
        number, lane = self._device(device.strip()), whole(stream)
        if kind is None:
            block = self._shape((dims[3], dims[4], dims[5]))
            self.kernels.append(Kernel(name, begin, end, number, lane or 0, 0, whole(correlation), grid, block))
        elif kind == "graph":
            self.replays.append((begin, end))
        elif kind != "other":
            self.copy_times.append(CopyTime(kind, begin, end, number, lane))

    def _interval(self, start: str, duration: str) -> tuple[int, int]:
        first = exact_ns(start, self._start, "start")
        last = first + exact_ns(duration, self._duration, "duration")
        begin, end = rounded(first), rounded(last)  # one rounding of each edge: none can pass the other
        check_interval(begin, end)
        return begin, end

    def _name(self, text: str) -> str:
        if text not in self._names:
            self._names[text] = " ".join(text.split()) or "<unnamed>"
        return self._names[text]

    def _shape(self, texts: tuple[str, str, str]) -> tuple[int, ...]:
        if texts not in self._shapes:
            found = [whole(text) for text in texts]
            self._shapes[texts] = tuple(size for size in found if size is not None) if None not in found else ()
        return self._shapes[texts]

    def _device(self, text: str) -> int:
        """The number in ``NAME (0)``; devices that are written otherwise are counted in the order they come."""
        if text not in self._devices:
            found = _DEVICE.match(text)
            number = int(found[2]) if found else len(self._devices)
            self._devices[text] = number
            if name := (found[1] if found else text):
                self.gpus[number] = name
        return self._devices[text]


def _operation(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind in ("memcpy", "memset", "graph") if kind in lowered), "other")


def read_stats(path: Path) -> Trace:
    """Read the cuda_gpu_trace of a CSV of nsys stats.

    Other reports in the same file are named in the notes. A file of projected NVTX ranges alone is a trace without
    kernels, which says why.

    Raises:
        TraceError: no such report in it, several of them, or a unit that is not known.
    """
    found: _GpuTrace | None = None
    ranges: Projection | None = None
    kind, others = "", []
    for event in tables(path, is_stats_header):
        if event.kind == HEADER:
            columns = Columns.of(event.cells)
            kind = report_of(columns)
            if kind == GPU_TRACE:
                if found is not None:
                    raise TraceError(f"{path.name}: holds several {GPU_TRACE} reports; give them one by one")
                found = _GpuTrace(columns, path.name)
                continue
            others.append(kind)
            if kind == PROJECTION:
                ranges = Projection(columns, path.name)
        elif kind == GPU_TRACE and found is not None:
            found.add(event)
        elif kind == PROJECTION and ranges is not None:
            ranges.add(event)
    if found is None:
        if ranges is None:
            raise TraceError(f"{path.name}: {_without_trace(others)}")
        return Trace(path.name, f"nsys stats {PROJECTION}", (), no_kernels_hint=ranges.summary())
    notes = ["a table of nsys stats has no processes, graph nodes and NVTX: steps are the kernels of one correlation"]
    groups = Counter((kernel.device, kernel.correlation) for kernel in found.kernels)
    if groups and max(groups.values()) == 1:
        notes.append(
            f"no two kernels share a correlation, as those of a graph replay do; if the run replays graphs, {RECAPTURE}"
        )
    if others:
        notes.append(f"other reports in the file are not read: {', '.join(dict.fromkeys(others))}")
    return Trace(
        path=path.name,
        format=f"nsys stats {GPU_TRACE}",
        kernels=tuple(sorted(found.kernels, key=lambda kernel: (kernel.order, kernel.device))),
        copies=dict(found.copies),
        copy_times=tuple(sorted(found.copy_times, key=lambda item: (item.start, item.end, item.kind, item.device))),
        rejected=tuple(sorted(found.rejected, key=lambda row: (row.name, row.reason))),
        gpus=found.gpus,
        graph_replays=tuple(sorted(found.replays)),
        notes=tuple(notes),
        no_kernels_hint=f"the table has no kernel rows; if the run replays graphs, {RECAPTURE}",
    )


def _without_trace(reports: Sequence[str]) -> str:
    if KERNEL_SUM in reports:
        return (
            f"{KERNEL_SUM} has neither order nor times of calls: no layers; {GIVE_EXPORT}, "
            "or count with k3lab trace calls FILE --steps N --layers M"
        )
    return f"{', '.join(dict.fromkeys(reports)) or 'no report'} of nsys stats shows no kernels in order; {GIVE_EXPORT}"
