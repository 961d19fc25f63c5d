"""Generators of small traces: torch.profiler JSON from rows, and Nsight Systems exports with chosen tables."""

from __future__ import annotations

import gzip
import json
import sqlite3
import sys
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

PROCESS = 0x1000000_000000 | (0x6F << 24)
THREAD = PROCESS | 0x6F


def kernel(name, start_us, duration_us, stream=7, correlation=1, node=0, grid=(148, 1, 1), device=0):
    """A kernel row of a torch trace; times in us as the text that is to stand in the file, or as numbers."""
    args = {"device": device, "stream": stream, "correlation": correlation, "graph node id": node}
    if grid is not None:
        args |= {"grid": list(grid), "block": [128, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, "ts": start_us, "dur": duration_us,
            "args": args}  # fmt: skip


def host(category, name, start_us, duration_us, correlation=None):
    """A host row: an API call or an annotation."""
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 4,
        "tid": 4,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def write_torch(path: Path, events, **head) -> Path:
    """Write events as a torch.profiler object, gzip where the name ends in .gz."""
    data = json.dumps({"schemaVersion": 1, **head, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def pdl_events(steps=3, layers=4, slow=(2, 9, 12.0), bubble=(3, 4.0), overlap=0.5):
    """Graph replays of layers of 13 kernels of 5 us (two of 6), each starting ``overlap`` us before its predecessor ends.

    Kernel ``slow[1]`` of layer ``slow[0]`` takes ``slow[2]`` us more; layer ``bubble[0]`` starts ``bubble[1]`` us late.
    """
    events, clock = [], 1000.0
    for step in range(steps):
        events.append(host("cuda_runtime", "cudaGraphLaunch", clock - 20, 8.0, correlation=10 + step))
        end = clock + overlap
        for layer in range(layers):
            if bubble and layer == bubble[0]:
                end += bubble[1]
            for index in range(13):
                duration = 6.0 if index in (3, 9) else 5.0
                if slow and (layer, index) == slow[:2]:
                    duration += slow[2]
                start = end - overlap
                node = 1000 + layer * 13 + index
                events.append(kernel(f"k{index:02}", start, duration, correlation=10 + step, node=node))
                end = start + duration
        clock = end + 30.0
    return events


def gpu_trace(path: Path, events, *, unit="ns", device="NVIDIA GB300 (0)", before="", eol="\n") -> Path:
    """Write the kernels of torch events as a cuda_gpu_trace CSV of nsys stats, with one copy behind them."""
    per = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}[unit]

    def time(us):
        value = Decimal(str(us)) * 1000 / per
        return f"{value:f}"

    lines = [f"Start ({unit}),Duration ({unit}),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),"
             "Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name"]  # fmt: skip
    for event in events:
        if event["cat"] == "kernel":
            args = event["args"]
            lines.append(f"{time(event['ts'])},{time(event['dur'])},{args['correlation']},148,1,1,128,1,1,64,0.000,0.101,"
                         f',,,,{device},1,,{args["stream"]},"{event["name"]}"')  # fmt: skip
    last = lines[-1].split(",")[0]
    lines.append(f"{last},1,9999,,,,,,,,,,4.194,6337.593,Pinned,Device,{device},1,,7,[CUDA memcpy Host-to-Device]")
    path.write_text(before + eol.join(lines) + eol, newline="")
    return path


class NsysFile:
    """An Nsight Systems export being written; tables appear with their first row, as nsys makes them."""

    _TABLES: ClassVar[dict[str, str]] = {
        "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, contextId, streamId, correlationId, globalPid, "
        "demangledName, shortName, gridX, gridY, gridZ, blockX, blockY, blockZ, graphNodeId",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start, end, deviceId, streamId, correlationId, globalPid, graphId",
        "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid, domainId",
        "CUDA_GRAPH_NODE_EVENTS": "start, end, globalTid, nameId, graphNodeId, originalGraphNodeId",
        "META_DATA_EXPORT": "name, value",
        "META_DATA_CAPTURE": "name, value",
        "TARGET_INFO_GPU": "id, name",
        "DIAGNOSTIC_EVENT": "severity, text",
        "PROCESSES": "globalPid, pid, name",
    }

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, dict]] = []
        self.strings: dict[str, int] = {}
        self.drop_columns: set[str] = set()
        self.empty_tables: set[str] = set()
        self.tables = dict(self._TABLES)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def add(self, table: str, **row) -> None:
        self.rows.append((table, row))

    def kernel(self, name, start, end, correlation, node=None, stream=7, process=PROCESS, device=0) -> None:
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=device, contextId=1, streamId=stream,
                 correlationId=correlation, globalPid=process, demangledName=self.string(name),
                 shortName=self.string(name), gridX=148, gridY=1, gridZ=1, blockX=128, blockY=1, blockZ=1,
                 graphNodeId=node)  # fmt: skip

    def api(self, name, start, end, correlation, thread=THREAD) -> None:
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, globalTid=thread, correlationId=correlation,
                 nameId=self.string(name))  # fmt: skip

    def range(self, name, start, end, registered=False, thread=THREAD, kind=59, domain=0) -> None:
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, text=None if registered else name,
                 textId=self.string(name) if registered else None, globalTid=thread, domainId=domain)  # fmt: skip

    def node(self, created, node, original=None, thread=THREAD) -> None:
        self.add("CUDA_GRAPH_NODE_EVENTS", start=created, end=created, globalTid=thread, nameId=1, graphNodeId=node,
                 originalGraphNodeId=original)  # fmt: skip

    def write(self, rows=None) -> Path:
        self.path.unlink(missing_ok=True)
        database = sqlite3.connect(self.path)
        database.execute("PRAGMA synchronous = OFF")
        rows = self.rows if rows is None else rows
        for table in dict.fromkeys([*(table for table, _ in rows), *sorted(self.empty_tables)]):
            names = [name for name in self.tables[table].split(", ") if name not in self.drop_columns]
            database.execute(f"CREATE TABLE {table} ({', '.join(f'{chr(34)}{name}{chr(34)}' for name in names)})")
            for owner, row in rows:
                if owner == table:
                    marks = ", ".join("?" * len(names))
                    database.execute(f"INSERT INTO {table} VALUES ({marks})", [row.get(name) for name in names])
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, text) for text, n in self.strings.items()])
        database.commit()
        database.close()
        return self.path


def node_mode(path: Path, *, layers=3, replays=2, step_ns=4800, kernels=13, extra_in=None) -> NsysFile:
    """Node-mode capture: layers only as NVTX ranges around the capture, replays under step marks, PDL overlap.

    Kernels start every ``step_ns`` and run 5300 ns; layer 1's range is a registered string.
    """
    file = NsysFile(path)
    file.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1.210")
    file.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")
    file.add("META_DATA_CAPTURE", name="CUDA_GRAPH_TRACE_OPTIONS:MODE", value="Node")
    clock, captured = 1_000_000, 5000
    plan: list[tuple[str, int]] = []
    for layer in range(layers):
        begin = clock
        names = [f"kern_{index:02}" for index in range(kernels)]
        if layer == extra_in:
            names.insert(5, "split_k_reduce")
        for name in names:
            clock += 1000
            file.node(clock, captured)
            file.node(clock + 500_000, captured + 10_000, original=captured)
            plan.append((name, captured + 10_000))
            captured += 1
        file.range(f"layer_{layer}", begin, clock + 500, registered=layer == 1)
        clock += 1000
    for replay in range(replays):
        at = 50_000_000 + replay * 1_000_000
        correlation = 900 + replay
        file.range(f"execute_context_0(0)_generation_8(8) #{replay}", at - 40_000, at - 15_000)
        file.api("cudaGraphLaunch_v10000", at - 30_000, at - 20_000, correlation)
        for index, (name, node) in enumerate(plan):
            file.kernel(name, at + index * step_ns, at + index * step_ns + 5300, correlation, node=node)
    return file


class Make:
    """What tests get as the fixture ``make``."""

    kernel = staticmethod(kernel)
    host = staticmethod(host)
    torch = staticmethod(write_torch)
    pdl_events = staticmethod(pdl_events)
    gpu_trace = staticmethod(gpu_trace)
    nsys = NsysFile
    node_mode = staticmethod(node_mode)


@pytest.fixture(scope="session")
def make():
    return Make
