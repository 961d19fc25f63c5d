"""How often each kernel ran, from the kernel summaries of ``nsys stats``: neither order nor times of calls."""

from __future__ import annotations

from pathlib import Path

from ..errors import TraceError
from ..model import RejectedRow
from .csv_tables import DAMAGED, HEADER, tables, whole
from .nsys_stats_columns import GPU_TRACE, KERNEL_SUM, Columns, is_stats_header, report_of


def counts_only(path: Path) -> bool:
    """Whether a kernel summary of any version is the best the file has: no report in it shows the kernels in order."""
    headers = (event.cells for event in tables(path, is_stats_header) if event.kind == HEADER)
    reports = {report_of(Columns.of(cells)) for cells in headers}
    return KERNEL_SUM in reports and GPU_TRACE not in reports


def read_kernel_sums(path: Path) -> tuple[dict[str, int], tuple[RejectedRow, ...]]:
    """Calls by kernel name, added up over grids, and the rows that say none.

    Raises:
        TraceError: several summaries in the file, or no usable row.
    """
    calls: dict[str, int] = {}
    rejected: list[RejectedRow] = []
    found: Columns | None = None
    inside = False
    for event in tables(path, is_stats_header):
        if event.kind == HEADER:
            columns = Columns.of(event.cells)
            inside = report_of(columns) == KERNEL_SUM
            if inside and found is not None:
                raise TraceError(f"{path.name}: holds several {KERNEL_SUM} reports; give them one by one")
            found = columns if inside else found
        elif inside and found is not None:
            name = found.text(event.cells, "name") or found.text(event.cells, "kernel name")
            name = " ".join(name.split()) or "<unnamed>"
            number = None if event.kind == DAMAGED else whole(found.text(event.cells, "instances"))
            if number:
                calls[name] = calls.get(name, 0) + number
            else:
                reason = event.reason if event.kind == DAMAGED else "instances is no whole number above 0"
                rejected.append(RejectedRow(name, f"line {event.line}: {reason}"))
    if not calls:
        raise TraceError(f"{path.name}: no usable row in its {KERNEL_SUM}; run nsys stats again")
    return calls, tuple(rejected)
