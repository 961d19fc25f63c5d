"""NVTX ranges projected on the GPU by ``nsys stats``: what they show, and why they are no layer times."""

from __future__ import annotations

from dataclasses import dataclass

from ..names import short_name
from .csv_tables import DAMAGED, Event, whole
from .nsys_stats_columns import GIVE_EXPORT, Columns, exact_ns, rounded
from .stamps import BadStamp, check_interval


@dataclass(frozen=True)
class ProjectedRange:
    """A range as the hull of the operations launched in it: from the first start to the last end, ns."""

    name: str
    start: int
    end: int
    operations: int | None


class Projection:
    """The ranges of an nvtx_gpu_proj_trace table, row by row."""

    def __init__(self, columns: Columns, file: str) -> None:
        self._columns = columns
        self._start = columns.factor("projected start", file)
        self._duration = columns.factor("projected duration", file)
        self.ranges: list[ProjectedRange] = []
        self.unusable = 0

    def add(self, event: Event) -> None:
        """Take one row; a root without a name owns every operation of its thread and is no range of the program."""
        cell, cells = self._columns.text, event.cells
        name = cell(cells, "name").lstrip(":")
        if event.kind != DAMAGED and not name:
            return
        try:
            if event.kind == DAMAGED:
                raise BadStamp(event.reason)
            start = exact_ns(cell(cells, "projected start"), self._start, "start")
            end = rounded(start + exact_ns(cell(cells, "projected duration"), self._duration, "duration"))
            check_interval(rounded(start), end)
        except BadStamp:
            self.unusable += 1
            return
        self.ranges.append(ProjectedRange(name, rounded(start), end, whole(cell(cells, "numgpuops"))))

    def summary(self) -> str:
        """One line: what the ranges are, the longest of them, and what to give instead."""
        text = "projected NVTX ranges only, hulls that hold gaps and other threads' kernels: no layer can be judged"
        if self.ranges:
            longest = max(self.ranges, key=lambda item: (item.end - item.start, item.name))
            text += f" ({len(self.ranges)} ranges, the longest {short_name(longest.name)} with"
            text += f" {(longest.end - longest.start) / 1000:.1f} us)"
        return f"{text}; {GIVE_EXPORT}"
