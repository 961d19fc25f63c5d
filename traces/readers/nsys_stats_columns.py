"""Headers of the CSV reports of ``nsys stats``: which report it is, where its columns are, and in what unit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ..errors import TraceError
from .csv_tables import exact

GPU_TRACE, KERNEL_SUM, PROJECTION = "cuda_gpu_trace", "cuda_gpu_kern_sum", "nvtx_gpu_proj_trace"
GIVE_EXPORT = "give the report itself: nsys export --type sqlite"

_UNIT = re.compile(r"^(.*?)\s*(?:\(([^()]*)\)|:(?:\w+_)?(\w+))?$")
_NS = {"ns": 1, "nsec": 1, "us": 10**3, "usec": 10**3, "ms": 10**6, "msec": 10**6, "s": 10**9, "sec": 10**9}
_TIMES = frozenset({
    "start", "end", "duration", "total time", "total", "projected start", "projected duration", "orig start",
    "orig duration", "avg", "average", "med", "median", "min", "minimum", "max", "maximum", "stddev", "time",
    "api start", "kernel start", "kernel dur", "total proj time", "total range time",
})  # fmt: skip
_OTHERS = (  # reports without kernels in order: the columns that only they have, and what they are
    ({"kernel start", "kernel dur"}, "cuda_kern_exec_trace"),
    ({"num calls"}, "cuda_api_sum (times of host calls)"),
    ({"result", "tid"}, "cuda_api_trace (host calls)"),
    ({"category", "operation"}, "cuda_gpu_sum"),
    ({"operation"}, "cuda_gpu_mem_time_sum or cuda_gpu_mem_size_sum (copies)"),
    ({"style", "range"}, "a summary of NVTX ranges"),
    ({"nvtx range"}, "nvtx_kern_sum"),
    ({"durchild"}, "nvtx_pushpop_trace (host ranges)"),
)


@dataclass(frozen=True)
class Columns:
    """Where the columns of a header are, by lower-case name without unit, and their units as written."""

    at: Mapping[str, int]
    units: Mapping[str, str]
    titles: tuple[str, ...]

    @classmethod
    def of(cls, cells: Sequence[str]) -> Columns:
        """The columns of a header; of two with one name the first counts."""
        at: dict[str, int] = {}
        units: dict[str, str] = {}
        for index, cell in enumerate(cells):
            found = _UNIT.match(cell)
            name = (found[1] if found else cell).strip().lower()
            at.setdefault(name, index)
            units.setdefault(name, ((found[2] or found[3] or "") if found else "").strip().lower())
        return cls(at, units, tuple(cells))

    def text(self, cells: Sequence[str], name: str) -> str:
        """A cell without blanks; empty where the column or the cell is missing."""
        index = self.at.get(name)
        return cells[index].strip() if index is not None and index < len(cells) else ""

    def factor(self, name: str, file: str) -> int:
        """Nanoseconds in the unit of a column.

        Raises:
            TraceError: a unit that is none of ns, us, ms, s.
        """
        unit = self.units.get(name, "")
        if unit not in _NS:
            raise TraceError(
                f"{file}: the unit of column {self.titles[self.at[name]]!r} is not known; run nsys stats with --timeunit ns"
            )
        return _NS[unit]


def is_stats_header(cells: Sequence[str]) -> bool:
    """Whether a line is the header of a report of nsys stats."""
    if len(cells) < 3:
        return False
    columns = Columns.of(cells)
    return len(_TIMES & columns.at.keys()) >= 2


def report_of(columns: Columns) -> str:
    """The report a header belongs to: one of those read here, or what else it is."""
    have = columns.at.keys()
    if {"projected start", "projected duration", "name"} <= have:
        return PROJECTION
    for mark, name in _OTHERS:
        if mark <= have:
            return name
    if {"start", "duration", "name"} <= have and have & {"strm", "grdx", "corrid"}:
        return GPU_TRACE
    if {"total time", "instances", "name"} <= have or {"total time", "instances", "kernel name"} <= have:
        return KERNEL_SUM
    return "an unknown report with columns " + ", ".join(columns.titles[:12])


def exact_ns(text: str, factor: int, what: str) -> int | Decimal:
    """A time in ns, not yet rounded: ``factor`` is the ns in the unit of its column.

    Raises:
        BadStamp: no number, not finite, or too large.
    """
    if factor == 1 and text.isdecimal() and len(text) < 20:
        return int(text)
    return exact(text, what) * factor


def rounded(value: int | Decimal) -> int:
    """A time in whole ns."""
    return value if isinstance(value, int) else int(value.to_integral_value())
