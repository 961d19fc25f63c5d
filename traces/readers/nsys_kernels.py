"""What ran on the device according to an Nsight Systems export: kernels, copies, waits, and the profiler's own work."""

from __future__ import annotations

from collections.abc import Iterator

from ..model import MAX_DURATION_NS, CopyTime, Kernel, RejectedRow, in_order, rows_of
from .nsys_source import Source
from .stamps import BadStamp, check_interval

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
PID_MASK = ~0xFFFFFF
"""A globalTid with its low 24 bits cleared is the globalPid."""

_FORM = ("graphNodeId", "deviceId", "streamId", "globalPid",
         "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")  # fmt: skip
_NAMES = ("demangledName", "shortName", "mangledName")
_Form = tuple[str, int, int, int, tuple[int, ...], tuple[int, ...], int | None]
_DEVICE_WORK = {
    "memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    "sync": "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
}
_OVERHEADS = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")


def _whole(value: object) -> int | None:
    """An integer cell; one stored as a real number counts if it is whole."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def _dims(*values: object) -> tuple[int, ...]:
    found = [_whole(value) for value in values]
    return tuple(value for value in found if value is not None) if None not in found else ()


def read_kernels(tables: Source) -> tuple[list[Kernel], list[RejectedRow]]:
    """The kernels by start, and the rows whose times cannot be used.

    All but times and correlation of a row recurs from replay to replay: it is looked up, not made again.
    """
    rejected: list[RejectedRow] = []
    kernels = rows_of(Kernel, _rows(tables, rejected))
    in_order(kernels)
    rejected.sort(key=lambda row: (row.name, row.reason))
    return kernels, rejected


def _rows(tables: Source, rejected: list[RejectedRow]) -> Iterator[tuple]:
    forms: dict[tuple, _Form] = {}
    correlation: int | None = None
    names = [column for column in _NAMES if column in tables.columns(KERNELS)][:2]  # each column costs time
    for row in tables.rows(KERNELS, ("start", "end", "correlationId", *_FORM, *names)):
        start, end, number = row[:3]
        key = row[3:]
        form = forms.get(key)
        if form is None:
            form = forms[key] = _form(tables, key)
        name, device, stream, process, grid, block, node = form
        if not (isinstance(start, int) and isinstance(end, int) and 0 < end - start <= MAX_DURATION_NS):
            rejected.append(RejectedRow(name, _reason(start, end)))
            continue
        if number != correlation:  # else one object serves all kernels of a launch
            correlation = _whole(number)
        yield name, start, end, device, stream, process, correlation, grid, block, node


def _reason(start: object, end: object) -> str:
    if not (isinstance(start, int) and isinstance(end, int)):
        return "time is not a whole number of ns"
    try:
        check_interval(start, end)
    except BadStamp as reason:
        return str(reason)
    return "unusable times"


def _form(tables: Source, key: tuple) -> _Form:
    node, device, stream, process = key[:4]
    names = (tables.string(reference) for reference in key[10:])
    return (
        next((name for name in names if name), "<unnamed>"),
        _whole(device) or 0,
        _whole(stream) or 0,
        (_whole(process) or 0) & PID_MASK,
        _dims(*key[4:7]),
        _dims(*key[7:10]),
        _whole(node) or None,
    )


def read_copies(tables: Source) -> tuple[dict[str, int], list[CopyTime]]:
    """How many copies and fills there are, and all of them and the host's waits that have usable times, by start."""
    counts, found = {}, []
    for kind, table in _DEVICE_WORK.items():
        count = 0
        for start, end, device, stream, process in tables.rows(
            table, ("start", "end", "deviceId", "streamId", "globalPid")
        ):
            count += 1
            if isinstance(start, int) and isinstance(end, int) and end >= start:
                process = (_whole(process) or 0) & PID_MASK
                found.append(CopyTime(kind, start, end, _whole(device) or 0, _whole(stream), process))
        if count and kind != "sync":
            counts[kind] = count
    found.sort(key=lambda item: (item.start, item.end, item.kind, item.device, item.stream or 0, item.process))
    return counts, found


def read_overheads(tables: Source) -> list[tuple[int, int]]:
    """The intervals in which the profiler itself was at work, by start."""
    rows = (row for table in _OVERHEADS for row in tables.rows(table, ("start", "end")))
    return sorted(
        (start, end) for start, end in rows if isinstance(start, int) and isinstance(end, int) and end > start
    )


def copy_launches(tables: Source) -> Iterator[tuple[int, object]]:
    """(process, correlation) of every copy and fill."""
    for kind in ("memcpy", "memset"):
        for process, correlation in tables.rows(_DEVICE_WORK[kind], ("globalPid", "correlationId")):
            yield (_whole(process) or 0) & PID_MASK, correlation
