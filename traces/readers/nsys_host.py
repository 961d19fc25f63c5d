"""What the host did according to an Nsight Systems export: launches, NVTX ranges, graph nodes at capture, processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..model import ApiCall, HostRange, Kernel, NodeOrigin, Thread
from .nsys_kernels import PID_MASK
from .nsys_source import Source

_RANGES = (59, 60, 70, 71)  # push/pop, start/end, and the nvtxt forms of both
_DOMAIN = 75
_LIBRARY_DOMAINS = frozenset({"NCCL", "CCCL", "CUBLAS", "CUDNN", "CUSPARSE", "CUSOLVER", "NVTX"})
_NODES = "CUDA_GRAPH_NODE_EVENTS"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_CONDITIONAL = "GraphConditionalHandle"


@dataclass(frozen=True)
class Launches:
    """The launches of the kernels by (process, correlation); of all graph launches (start, whether it owns work)."""

    calls: dict[tuple[int, int], ApiCall]
    graphs: list[tuple[int, bool]]
    conditional: bool
    """Whether graphs with conditional nodes were made: the kernels of their later rounds are not recorded."""


def _thread(global_tid: object, one_process: bool) -> Thread:
    if not isinstance(global_tid, int):
        return (0, 0)
    return (0 if one_process else global_tid & PID_MASK, global_tid)


def read_launches(
    tables: Source, kernels: Iterable[Kernel], copies: Iterable[tuple[int, object]], one_process: bool
) -> Launches:
    """The host calls that launched the kernels. A correlation counts within its process only.

    Args:
        tables: the export.
        kernels: its kernels.
        copies: (process, correlation) of copies and fills: a graph may hold nothing else.
        one_process: whether kernel rows do not say their process.
    """
    needed: dict[int, set[int | None]] = defaultdict(set)
    for kernel in kernels:
        needed[kernel.process].add(kernel.correlation)
    copying: dict[int, set[object]] = defaultdict(set)
    for process, copied in copies:
        copying[0 if one_process else process].add(copied)
    found: dict[tuple[int, int], ApiCall] = {}
    # by globalTid: the thread, the correlations of its process's kernels, and those of its copies
    threads: dict[object, tuple[Thread, Collection[object], Collection[object]]] = {}
    graphs: list[tuple[int, bool]] = []
    conditional = False
    names: dict[object, tuple[str, bool]] = {}
    for start, end, tid, correlation, reference in tables.rows(
        _CALLS, ("start", "end", "globalTid", "correlationId", "nameId")
    ):
        if reference not in names:
            text = tables.string(reference) or "<unnamed>"
            names[reference] = (text, "GraphLaunch" in text)
            conditional = conditional or _CONDITIONAL in text
        if tid not in threads:
            where = _thread(tid, one_process)
            threads[tid] = (where, needed.get(where[0], ()), copying.get(where[0], ()))
        name, graph = names[reference]
        thread, owned, copied_there = threads[tid]
        owns = correlation in owned
        if graph and isinstance(start, int):
            graphs.append((start, owns or correlation in copied_there))
        if not (owns and isinstance(start, int) and isinstance(end, int) and isinstance(correlation, int)):
            continue
        call = ApiCall(name, start, end, thread)
        old = found.setdefault((thread[0], correlation), call)
        if old is not call and (not graph, start) < (not old.is_graph_launch, old.start):
            found[thread[0], correlation] = call
    return Launches(found, graphs, conditional)


def read_ranges(tables: Source, one_process: bool) -> list[HostRange]:
    """Closed NVTX ranges by start, without those of the domains of libraries."""
    wanted = ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "text", "textId")
    rows = [
        (*row[:6], row[6] if isinstance(row[6], str) and row[6] else tables.string(row[7]))
        for row in tables.rows("NVTX_EVENTS", wanted)
    ]
    skip = {
        (_thread(tid, one_process)[0], domain)
        for _, _, kind, tid, _, domain, name in rows
        if kind == _DOMAIN and name is not None and name.upper() in _LIBRARY_DOMAINS
    }
    found = []
    for start, end, kind, tid, last, domain, name in rows:
        if name is None or not (isinstance(start, int) and isinstance(end, int)) or end < start:
            continue  # marks, unclosed ranges, categories and domains have no end
        if kind is not None and kind not in _RANGES:
            continue
        thread = _thread(tid, one_process)
        if (thread[0], domain) not in skip:
            # a start/end range may be ended by another thread
            other = _thread(last, one_process) if isinstance(last, int) and last != tid else None
            found.append(HostRange(name, start, end, thread, other))
    found.sort(key=lambda item: (item.start, -item.end, item.name, item.thread, item.end_thread or (0, 0)))
    return found


def read_origins(tables: Source, kernels: Iterable[Kernel], one_process: bool) -> dict[tuple[int, int], NodeOrigin]:
    """Follow each kernel's graph node through its clones to the node that was captured."""
    rows: dict[tuple[int, int], tuple[int, int, int | None, Thread]] = {}
    columns = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    for start, tid, number, original in tables.rows(_NODES, columns):
        if not (isinstance(start, int) and isinstance(number, int)):
            continue
        thread = _thread(tid, one_process)
        original = original if isinstance(original, int) and original else None
        key = (thread[0], number)
        row = (0 if original is None else 1, start, original, thread)
        if key not in rows or row[:2] < rows[key][:2]:
            rows[key] = row  # creation before clone, else the earliest
    found = {}
    for process, first in set(map(attrgetter("process", "node"), kernels)):
        node = first
        seen: set[int] = set()
        while node is not None and node not in seen and (process, node) in rows:
            seen.add(node)
            _, created, node, where = rows[process, node]
            if node is None and first is not None:
                found[process, first] = NodeOrigin(created, where)
    return found


def idle_processes(tables: Source, kernels: Sequence[Kernel]) -> tuple[int, int]:
    """Processes that own kernels, and how many of the same name (or, without kernels, of any) own none."""
    names: dict[int, str] = {}
    for process, name in tables.rows("PROCESSES", ("globalPid", "name")):
        if isinstance(process, int) and isinstance(name, str):
            names[process & PID_MASK] = name
    owners = {kernel.process for kernel in kernels}
    if not owners:
        return 0, len(names)
    alike = Counter(names.values())
    named = {names[process] for process in owners if process in names}
    return len(owners), sum(alike[name] for name in named) - len(owners & names.keys())
