"""Reader of Nsight Systems exports (schema 3): puts together what the tables say, and what they leave open."""

from __future__ import annotations

from pathlib import Path

from ..errors import TraceError
from ..model import Trace
from .lost import told
from .nsys_host import Launches, idle_processes, read_launches, read_origins, read_ranges
from .nsys_kernels import KERNELS, copy_launches, read_copies, read_kernels, read_overheads
from .nsys_source import Source, graph_mode, metadata, time_changes
from .nsys_tables import Tables

_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_ON_HOST = 0x7FFFFFFF  # the device number of a replay that began on the host
_LOSSES = ("drop", "lost", "overflow", "discard", "not collected", "ran out of")
RECAPTURE = "capture again with: nsys profile --cuda-graph-trace=node -t cuda,nvtx ..."
_FORK = "if workers should have some, profile with --trace-fork-before-exec=true"


def _hint(tables: Source, mode: str | None, graphs_ran: bool, processes: int) -> str:
    if graphs_ran:
        return f"its graphs were traced as a whole; {RECAPTURE}"
    more = "; if it replays graphs, add --cuda-graph-trace=node" if mode == "graph" else ""
    if processes > 1:
        more += f"; {processes} processes were seen: {_FORK}"
    if tables.has(KERNELS):
        return f"the kernel table is empty: did anything run on the GPU inside the capture range?{more}"
    return f"no kernel table: trace CUDA (-t cuda,nvtx) in the process that works on the GPU{more}"


def read_nsys(path: Path) -> Trace:
    """Read an SQLite export of Nsight Systems.

    Raises:
        TraceError: not SQLite, damaged, or not an export of nsys.
    """
    tables = Tables(path)
    try:
        return read_tables(tables)
    finally:
        tables.close()


def read_tables(tables: Source, kind: str = "SQLite") -> Trace:
    """The trace in the tables of an export, whatever kind of files hold them.

    Raises:
        TraceError: not the tables of nsys, or damaged.
    """
    known = (KERNELS, _GRAPHS, "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "META_DATA_EXPORT")
    if not any(tables.has(table) for table in known):
        journal = "; a journal lies beside it (-wal or -journal): export it again" if tables.unsaved else ""
        raise TraceError(f"{tables.name}: {kind}, but not one of nsys export --type {kind.lower()}{journal}")
    if tables.has(KERNELS) and not {"start", "end"} <= tables.columns(KERNELS):
        raise TraceError(f"{tables.name}: its kernel table has no start and end; export the report again")
    meta, mode = metadata(tables), graph_mode(tables)
    one_process = "globalPid" not in tables.columns(KERNELS)
    kernels, rejected = read_kernels(tables)
    launches = read_launches(tables, kernels, copy_launches(tables), one_process)
    replays, untimed, notes = _replays(tables)
    if any(kernel.node is not None for kernel in kernels):
        mode = "node"
    elif mode is None and (replays or untimed):
        mode = "graph"
    gpus = {
        number: name
        for number, name in tables.rows("TARGET_INFO_GPU", ("id", "name"))
        if isinstance(number, int) and isinstance(name, str)
    }
    copies, copy_times = read_copies(tables)
    owners, idle = idle_processes(tables, kernels)
    version = meta.get("EXPORT_PRODUCT_VERSION")
    return Trace(
        path=tables.name,
        format=f"Nsight Systems {kind}",
        kernels=tuple(kernels),
        apis=launches.calls,
        ranges=tuple(read_ranges(tables, one_process)),
        node_origins=read_origins(tables, kernels, one_process),
        copies=copies,
        copy_times=tuple(copy_times),
        overheads=tuple(read_overheads(tables)),
        rejected=tuple(rejected),
        gpus=gpus,
        graph_mode=mode,
        graph_replays=tuple(replays),
        tool=f"nsys {version}" if version else None,
        notes=(*_notes(tables, meta, owners, idle, launches), *notes),
        incomplete=_incomplete(tables, launches, len(replays), untimed),
        no_kernels_hint=_hint(tables, mode, bool(replays or untimed or launches.graphs), idle),
    )


def _replays(tables: Source) -> tuple[list[tuple[int, int]], int, list[str]]:
    """Graph replays recorded as a whole: their times, how many have none, and what to say of them."""
    times, untimed, on_host = [], 0, 0
    for start, end, device in tables.rows(_GRAPHS, ("start", "end", "deviceId")):
        if isinstance(start, int) and isinstance(end, int) and end > start:
            times.append((start, end))
        else:
            untimed += 1  # both 0: no timestamps
        on_host += device == _ON_HOST
    notes = [f"{on_host} graph replays began on the host: their times hold host work, too"] if on_host else []
    return sorted(times), untimed, notes


def _notes(tables: Source, meta: dict[str, str], owners: int, idle: int, launches: Launches) -> list[str]:
    notes = []
    schema = meta.get("EXPORT_SCHEMA_VERSION")
    if schema and schema.split(".")[0] != "3":
        notes.append(f"schema {schema} is not one this reader was written for (3.x)")
    notes.extend(told(launches.graphs, RECAPTURE)[1])
    if changes := time_changes(tables):
        notes.append(f"the export changed its times ({changes}): compare them with no other file's but by differences")
    if owners and idle:
        notes.append(f"{owners} processes have kernels and {idle} of the same name have none; {_FORK}")
    severe = [text for severity, text in tables.rows("DIAGNOSTIC_EVENT", ("severity", "text")) if _severe(severity)]
    if severe:
        # the texts may quote the profiled process: they are not repeated
        notes.append(
            f"nsys recorded {len(severe)} warnings about this capture (table DIAGNOSTIC_EVENT): events may be missing"
        )
    return notes


def _severe(severity: object) -> bool:
    return isinstance(severity, int) and severity > 1


def _incomplete(tables: Source, launches: Launches, replays: int, untimed: int) -> tuple[str, ...]:
    found = [] if replays else told(launches.graphs, RECAPTURE)[0]
    if untimed:
        found.append(f"{untimed} graph replays were traced as a whole and without times; {RECAPTURE}")
    if launches.conditional:
        found.append("graphs with conditional nodes: only their first round is recorded, so counts are a lower bound")
    if tables.unsaved:
        found.append(f"a journal lies beside {tables.name} (-wal or -journal): rows may be missing; export it again")
    losses = sum(
        any(word in text.lower() for word in _LOSSES)
        for severity, text in tables.rows("DIAGNOSTIC_EVENT", ("severity", "text"))
        if _severe(severity) and isinstance(text, str)
    )
    if losses:
        found.append(f"{losses} warnings of nsys speak of lost events (table DIAGNOSTIC_EVENT)")
    return tuple(found)
