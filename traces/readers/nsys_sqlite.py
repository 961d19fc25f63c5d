"""Reader of Nsight Systems SQLite exports (schema 3; columns and tables by version, see nsys_tables)."""

from __future__ import annotations

from pathlib import Path

from ..errors import TraceError
from ..model import ApiCall, CopyTime, HostRange, Kernel, NodeOrigin, RejectedRow, Trace
from .nsys_source import Source, graph_mode, metadata
from .nsys_tables import Tables
from .stamps import BadStamp, check_interval

_PID_MASK = ~0xFFFFFF  # a globalTid with its low 24 bits cleared is the globalPid
_RANGES = (59, 60, 70, 71)  # push/pop, start/end, and the nvtxt forms of both
_DOMAIN = 75
_LIBRARY_DOMAINS = frozenset({"NCCL", "CCCL", "CUBLAS", "CUDNN", "CUSPARSE", "CUSOLVER", "NVTX"})
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_LOST_SHARE = 0.1  # the edges of a capture may lose the kernels of a launch or two
_NODES = "CUDA_GRAPH_NODE_EVENTS"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RECAPTURE = "capture again with: nsys profile --cuda-graph-trace=node -t cuda,nvtx ..."


def _is_int(*values: object) -> bool:
    return all(isinstance(value, int) for value in values)


def _kernels(tables: Source) -> tuple[list[Kernel], list[RejectedRow]]:
    wanted = ("start", "end", "deviceId", "streamId", "globalPid", "correlationId", "graphNodeId",
              "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")  # fmt: skip
    kernels, rejected = [], []
    for row in tables.rows(_KERNELS, wanted, texts=("demangledName", "shortName")):
        start, end, device, stream, process, correlation, node, gx, gy, gz, bx, by, bz, full, short = row
        name = next((text for text in (full, short) if isinstance(text, str) and text), "<unnamed>")
        try:
            if not _is_int(start, end):
                raise BadStamp("time is not a whole number of ns")
            check_interval(start, end)
        except BadStamp as reason:
            rejected.append(RejectedRow(name, str(reason)))
            continue
        kernels.append(
            Kernel(
                name=name,
                start=start,
                end=end,
                device=device if _is_int(device) else 0,
                stream=stream if _is_int(stream) else 0,
                process=process & _PID_MASK if _is_int(process) else 0,
                correlation=correlation if _is_int(correlation) else None,
                grid=(gx, gy, gz) if _is_int(gx, gy, gz) else (),
                block=(bx, by, bz) if _is_int(bx, by, bz) else (),
                node=node if _is_int(node) and node else None,
            )
        )
    kernels.sort(key=lambda kernel: (kernel.order, kernel.process, kernel.device))
    rejected.sort(key=lambda row: (row.name, row.reason))
    return kernels, rejected


def _thread(global_tid: object, one_process: bool) -> tuple[int, int]:
    if not isinstance(global_tid, int):
        return (0, 0)
    return (0 if one_process else global_tid & _PID_MASK, global_tid)


def _apis(tables: Source, needed: set[tuple[int, int]], one_process: bool) -> dict[tuple[int, int], ApiCall]:
    found: dict[tuple[int, int], ApiCall] = {}
    wanted = ("start", "end", "globalTid", "correlationId")
    for start, end, tid, correlation, name in tables.rows("CUPTI_ACTIVITY_KIND_RUNTIME", wanted, texts=("nameId",)):
        if not _is_int(start, end, correlation):
            continue
        thread = _thread(tid, one_process)
        key = (thread[0], correlation)
        if key not in needed:
            continue
        call = ApiCall(name if isinstance(name, str) else "<unnamed>", start, end, thread)
        old = found.get(key)
        if old is None or (not call.is_graph_launch, call.start) < (not old.is_graph_launch, old.start):
            found[key] = call
    return found


def _graph_launches(tables: Source, needed: set[tuple[int, int]], one_process: bool) -> tuple[int, int]:
    """Graph launches in the file, and those of them that own none of its kernels."""
    launched = lost = 0
    for tid, correlation, name in tables.rows(
        "CUPTI_ACTIVITY_KIND_RUNTIME", ("globalTid", "correlationId"), texts=("nameId",)
    ):
        if isinstance(name, str) and "GraphLaunch" in name:
            launched += 1
            lost += (_thread(tid, one_process)[0], correlation) not in needed
    return launched, lost


def _ranges(tables: Source, one_process: bool) -> list[HostRange]:
    wanted = ("start", "end", "eventType", "globalTid", "domainId", "text", "endGlobalTid")
    skip: set[tuple[int, int]] = set()
    rows = tables.rows("NVTX_EVENTS", wanted, texts=("textId",))
    for _, _, kind, tid, domain, text, _, registered in rows:
        name = text if isinstance(text, str) else registered
        if kind == _DOMAIN and _is_int(domain) and isinstance(name, str) and name.upper() in _LIBRARY_DOMAINS:
            skip.add((_thread(tid, one_process)[0], domain))
    found = []
    for start, end, kind, tid, domain, text, last, registered in rows:
        name = text if isinstance(text, str) and text else registered
        if not _is_int(start, end) or end < start or not isinstance(name, str):
            continue  # marks, unclosed ranges, categories and domains have no end
        if kind is not None and kind not in _RANGES:
            continue
        thread = _thread(tid, one_process)
        if (thread[0], domain) not in skip:
            # a start/end range may be ended by another thread
            other = _thread(last, one_process) if isinstance(last, int) and last != tid else None
            found.append(HostRange(name, start, end, thread, other))
    found.sort(key=lambda item: (item.start, -item.end, item.name, item.thread))
    return found


def _origins(tables: Source, kernels: list[Kernel], one_process: bool) -> dict[tuple[int, int], NodeOrigin]:
    """Follow each kernel's graph node through its clones to the node that was captured."""
    rows: dict[tuple[int, int], tuple[int, int, int | None, tuple[int, int]]] = {}
    columns = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    for start, tid, number, original in tables.rows(_NODES, columns):
        if not _is_int(start, number):
            continue
        thread = _thread(tid, one_process)
        original = original if _is_int(original) and original else None
        key = (thread[0], number)
        row = (0 if original is None else 1, start, original, thread)
        if key not in rows or row[:2] < rows[key][:2]:
            rows[key] = row  # creation before clone, else the earliest
    found = {}
    for kernel in kernels:
        if kernel.node is None or (kernel.process, kernel.node) in found:
            continue
        node: int | None = kernel.node
        seen: set[int] = set()
        while node is not None and node not in seen and (kernel.process, node) in rows:
            seen.add(node)
            _, created, node, where = rows[kernel.process, node]
            if node is None:
                found[kernel.process, kernel.node] = NodeOrigin(created, where)
    return found


_DEVICE_WORK = {
    "memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    "sync": "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
}
_OVERHEADS = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")


def _copies(tables: Source) -> tuple[dict[str, int], list[CopyTime]]:
    """Copies and fills in the file, and all of them and the waits that have usable times."""
    counts, found = {}, []
    for kind, table in _DEVICE_WORK.items():
        rows = tables.rows(table, ("start", "end", "deviceId", "streamId", "globalPid"))
        if rows and kind != "sync":
            counts[kind] = len(rows)
        for start, end, device, stream, process in rows:
            if _is_int(start, end) and end >= start:
                device, process = (value if _is_int(value) else 0 for value in (device, process))
                stream = stream if _is_int(stream) else None
                found.append(CopyTime(kind, start, end, device, stream, process & _PID_MASK))
    found.sort(key=lambda item: (item.start, item.end, item.kind, item.device, item.stream or 0, item.process))
    return counts, found


def _overheads(tables: Source) -> list[tuple[int, int]]:
    rows = (row for table in _OVERHEADS for row in tables.rows(table, ("start", "end")))
    return sorted((start, end) for start, end in rows if _is_int(start, end) and end > start)


def _hint(tables: Source, mode: str | None, graphs_ran: bool) -> str:
    if graphs_ran:
        return f"its graphs were traced as a whole; {RECAPTURE}"
    graph = "; if it replays graphs, add --cuda-graph-trace=node" if mode == "graph" else ""
    if tables.has(_KERNELS):
        return f"the kernel table is empty: did anything run on the GPU inside the capture range?{graph}"
    return f"no kernel table: trace CUDA (-t cuda,nvtx) in the process that works on the GPU{graph}"


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
    known = (_KERNELS, _GRAPHS, "StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "META_DATA_EXPORT")
    if not any(tables.has(table) for table in known):
        journal = "; a journal lies beside it (-wal or -journal): export it again" if tables.unsaved else ""
        raise TraceError(f"{tables.name}: {kind}, but not one of nsys export --type {kind.lower()}{journal}")
    if tables.has(_KERNELS) and not {"start", "end"} <= tables.columns(_KERNELS):
        raise TraceError(f"{tables.name}: its kernel table has no start and end; export the report again")
    meta, mode, notes = metadata(tables), graph_mode(tables), []
    schema = meta.get("EXPORT_SCHEMA_VERSION")
    if schema and schema.split(".")[0] != "3":
        notes.append(f"schema {schema} is not one this reader was written for (3.x)")
    one_process = "globalPid" not in tables.columns(_KERNELS)
    kernels, rejected = _kernels(tables)
    needed = {(kernel.process, kernel.correlation) for kernel in kernels if kernel.correlation is not None}
    apis = _apis(tables, needed, one_process)
    replays = sorted(
        (start, end)
        for start, end in tables.rows(_GRAPHS, ("start", "end"))
        if _is_int(start, end) and end > start  # both 0: no timestamps
    )
    launched, lost = _graph_launches(tables, needed, one_process)
    if any(kernel.node is not None for kernel in kernels):
        mode = "node"
    elif mode is None and replays:
        mode = "graph"
    incomplete: tuple[str, ...] = ()
    if not replays and lost > _LOST_SHARE * launched:
        incomplete = (f"the kernels of {lost} of {launched} graph launches are not in the file; {RECAPTURE}",)
    if tables.unsaved:
        incomplete += (f"a journal lies beside {tables.name} (-wal or -journal): rows may be missing; export it again",)
    if any(_is_int(severity) and severity > 1 for (severity,) in tables.rows("DIAGNOSTIC_EVENT", ("severity",))):
        notes.append("nsys recorded warnings about this capture (table DIAGNOSTIC_EVENT): events may be missing")
    gpus = {
        number: name
        for number, name in tables.rows("TARGET_INFO_GPU", ("id", "name"))
        if _is_int(number) and isinstance(name, str)
    }
    copies, copy_times = _copies(tables)
    version = meta.get("EXPORT_PRODUCT_VERSION")
    return Trace(
        path=tables.name,
        format=f"Nsight Systems {kind}",
        kernels=tuple(kernels),
        apis=apis,
        ranges=tuple(_ranges(tables, one_process)),
        node_origins=_origins(tables, kernels, one_process),
        copies=copies,
        copy_times=tuple(copy_times),
        overheads=tuple(_overheads(tables)),
        rejected=tuple(rejected),
        gpus=gpus,
        graph_mode=mode,
        graph_replays=tuple(replays),
        tool=f"nsys {version}" if version else None,
        notes=tuple(notes),
        incomplete=incomplete,
        no_kernels_hint=_hint(tables, mode, bool(replays) or launched > 0),
    )
