"""Large generated traces for the speed tests: an Nsight Systems export and a torch.profiler JSON shaped like K3."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from nsys_eras import LATEST

LAYERS, KERNELS = 93, 13
PROCESS = 0x1000000_000000 | (0x6F << 24)
THREAD = PROCESS | 0x6F
_PERIOD, _DURATION, _PAUSE = 4_600, 5_100, 60_000  # ns: 13 periods are 59.8 us, within the published budget


def _names(layer: int) -> list[str]:
    kind = "mla" if layer % 4 == 3 else "kda"
    typed = "void cutlass::device_kernel<cutlass::gemm::kernel::Universal<cute::tuple<int, int, int, int>, {}>>(Params)"
    return [f"k3_{kind}_synthetic_step", *(typed.format(f"k3::Role<{index}>") for index in range(1, KERNELS))]


def _shapes() -> list[tuple[str, int]]:
    """Kernel name and grid of one step: embedding, layers, logits."""
    body = [(name, 64 + index) for layer in range(LAYERS) for index, name in enumerate(_names(layer))]
    return [("k3_lm_head_synthetic_embed", 8), *body, ("k3_lm_head_synthetic_logits", 148)]


def write_sqlite(path: Path, kernels: int, *, eager: bool = False) -> int:
    """Write an export of at least ``kernels`` kernels; returns their number.

    Node mode: one graph of 93 layers of 13 kernels, captured under NVTX ranges and replayed under step marks, with
    host calls between the launches. ``eager``: every kernel has a launch of its own, under the range of its layer.
    Rows in no order of time, as exports promise none.
    """
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    database.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;")
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    def fill(table: str, rows: Iterator[dict[str, object]]) -> None:
        columns = LATEST.tables[table].split(", ") if table != "StringIds" else ["id", "value"]
        listed = ", ".join(f'"{column}" {"TEXT" if column in ("text", "name", "value") else "INTEGER"}'
                           for column in columns)  # fmt: skip
        database.execute(f"CREATE TABLE {table} ({listed})")
        first = next(rows)
        used = list(first)
        sql = f"INSERT INTO {table} ({', '.join(f'{chr(34)}{name}{chr(34)}' for name in used)}) VALUES "
        sql += f"({', '.join('?' * len(used))})"
        database.executemany(sql, (tuple(row.values()) for row in chain([first], rows)))

    shapes = [(string(name), grid) for name, grid in _shapes()]
    steps = -(-kernels // len(shapes))
    first_node, clone = 5_000, 100_000
    captured_at = 1_000_000
    begin = 2_000_000_000

    def launch_at(step: int) -> int:
        return begin + step * (len(shapes) * _PERIOD + _PAUSE)

    def correlation(step: int, index: int) -> int:
        return 70_000 + (step * len(shapes) + index if eager else step * 20)

    def eager_api_rows() -> Iterator[dict[str, object]]:
        name = string("cudaLaunchKernelExC_v11060")
        for step in range(steps):
            for index in range(len(shapes)):
                start = launch_at(step) + index * 3_000
                yield {"start": start, "end": start + 2_500, "eventClass": 0, "globalTid": THREAD,
                       "correlationId": correlation(step, index), "nameId": name, "returnValue": 0}  # fmt: skip

    def eager_mark_rows() -> Iterator[dict[str, object]]:
        for step in range(steps):
            at = launch_at(step)
            spans = [(at - 100, len(shapes) * 3_000, f"execute_context_0(0)_generation_8(8) #{step}")]
            spans += [(at + (1 + layer * KERNELS) * 3_000 - 50, KERNELS * 3_000 - 100, f"model.layers.{layer}")
                      for layer in range(LAYERS)]  # fmt: skip
            for start, length, text in spans:
                yield {"start": start, "end": start + length, "eventType": 59, "text": text, "textId": None,
                       "globalTid": THREAD, "domainId": 0}  # fmt: skip

    def kernel_rows() -> Iterator[dict[str, object]]:
        for step in sorted(range(steps), key=lambda step: step * 7919 % steps):
            at = launch_at(step) + 20_000
            for index, (name, grid) in enumerate(shapes):
                start = at + index * _PERIOD + (step * 31 + index * 17) % 97
                yield {
                    "start": start, "end": start + _DURATION, "deviceId": 0, "contextId": 1, "streamId": 7,
                    "correlationId": correlation(step, index), "globalPid": PROCESS, "demangledName": name, "shortName": name,
                    "mangledName": name, "launchType": 1, "cacheConfig": 1, "registersPerThread": 128, "gridX": grid,
                    "gridY": 1, "gridZ": 1, "blockX": 256, "blockY": 1, "blockZ": 1, "staticSharedMemory": 0,
                    "dynamicSharedMemory": 65_536, "localMemoryPerThread": 0, "localMemoryTotal": 250_871_808,
                    "gridId": step * len(shapes) + index, "sharedMemoryExecuted": 32_768,
                    "graphNodeId": None if eager else clone + index, "clusterX": 0, "clusterY": 0, "clusterZ": 0,
                    "tensorSizeMinusOneElements": "[]",
                }  # fmt: skip

    def api_rows() -> Iterator[dict[str, object]]:
        names = [string(name) for name in ("cudaGraphLaunch_v10000", "cudaEventRecord_v3020", "cudaMemcpyAsync_v3020")]
        for step in range(steps):
            for call in range(20):
                start = launch_at(step) - 4_000 + call * 400
                yield {"start": start, "end": start + 350, "eventClass": 0, "globalTid": THREAD,
                       "correlationId": 70_000 + step * 20 + call, "nameId": names[min(call, 1) + (call > 15)],
                       "returnValue": 0}  # fmt: skip

    def node_rows() -> Iterator[dict[str, object]]:
        name = string("cudaStreamEndCapture")
        for copy in range(2):
            for index in range(len(shapes)):
                at = captured_at + index * 1_000 + copy * 500_000_000
                yield {"start": at, "end": at + 100, "eventClass": 1, "globalTid": THREAD, "nameId": name,
                       "graphNodeId": (clone if copy else first_node) + index,
                       "originalGraphNodeId": first_node + index if copy else None}  # fmt: skip

    def mark_rows() -> Iterator[dict[str, object]]:
        for layer in range(LAYERS):
            at = captured_at + (1 + layer * KERNELS) * 1_000 - 100
            yield {"start": at, "end": at + KERNELS * 1_000 - 200, "eventType": 59, "text": None,
                   "textId": string(f"model.layers.{layer}"), "globalTid": THREAD, "domainId": 0}  # fmt: skip
        for step in range(steps):
            at = launch_at(step) - 10_000
            yield {"start": at, "end": at + 25_000, "eventType": 59,
                   "text": f"execute_context_0(0)_generation_8(8) #{step}", "textId": None, "globalTid": THREAD,
                   "domainId": 0}  # fmt: skip

    fill("CUPTI_ACTIVITY_KIND_KERNEL", kernel_rows())
    fill("CUPTI_ACTIVITY_KIND_RUNTIME", eager_api_rows() if eager else api_rows())
    if not eager:
        fill("CUDA_GRAPH_NODE_EVENTS", node_rows())
    fill("NVTX_EVENTS", eager_mark_rows() if eager else mark_rows())
    fill("TARGET_INFO_GPU", iter([{"id": 0, "name": "NVIDIA GB300"}]))
    fill("META_DATA_EXPORT", iter([{"name": "EXPORT_PRODUCT_VERSION", "value": LATEST.nsys},
                                   {"name": "EXPORT_SCHEMA_VERSION", "value": LATEST.schema}]))  # fmt: skip
    fill("META_DATA_CAPTURE", iter([{"name": "CUDA_GRAPH_TRACE_OPTIONS:MODE", "value": "Node"}]))
    fill("StringIds", iter([{"id": number, "value": text} for text, number in strings.items()]))
    database.commit()
    database.close()
    return steps * len(shapes)


def write_json(path: Path, size: int) -> int:
    """Write a torch.profiler trace of at least ``size`` bytes; returns the number of kernels.

    Graph replays under step marks, with the operators, Python calls and flow arrows that fill a real file.
    """
    shapes, kernels, step, written = _shapes(), 0, 0, 0
    with path.open("w") as file:
        written += file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}], '
                              '"cupti_version": 130101, "baseTimeNanoseconds": 1760000000000000000, "traceEvents": [\n')  # fmt: skip
        while written < size:
            launch = 2_000_000_000 + step * (len(shapes) * _PERIOD + _PAUSE)
            correlation = 1_000 + step
            rows = [_host("user_annotation", f"step[DECODE bs=8] {step}", launch - 10_000, 25_000, 0),
                    _host("cuda_runtime", "cudaGraphLaunch", launch, 9_000, correlation)]  # fmt: skip
            for index, (name, grid) in enumerate(shapes):
                start = launch + 20_000 + index * _PERIOD + (step * 31 + index * 17) % 97
                rows.append(
                    f'{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": 7, "ts": {_us(start)}, '
                    f'"dur": {_us(_DURATION)}, "args": {{"External id": {index}, "queued": 0, "device": 0, "context": 1, '
                    f'"stream": 7, "correlation": {correlation}, "registers per thread": 128, "shared memory": 65536, '
                    f'"blocks per SM": 0.486486, "warps per SM": 3.891892, "grid": [{grid}, 1, 1], '
                    f'"block": [256, 1, 1], "est. achieved occupancy %": 6, "graph id": 1, '
                    f'"graph node id": {100 + index}}}}}'
                )
                if index % 3 == 0:
                    rows.append(
                        _host("python_function", f"torch/nn/modules/module.py({index}): _call_impl", launch, 900, 0)
                    )
                    rows.append(_host("cpu_op", f"aten::linear_{index % 5}", launch + index, 300, 0))
                    rows.append(f'{{"ph": "f", "id": {index}, "pid": 0, "tid": 7, "ts": {_us(start)}, "cat": "ac2g", '
                                '"name": "ac2g", "bp": "e"}')  # fmt: skip
            written += file.write((",\n" if step else "") + ",\n".join(rows))
            kernels += len(shapes)
            step += 1
        file.write('\n], "traceName": "big.json"}\n')
    return kernels


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _host(category: str, name: str, start: int, duration: int, correlation: int) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 4000, "tid": 4000, "ts": {_us(start)}, '
        f'"dur": {_us(duration)}, "args": {{"External id": 7, "Record function id": 0, "Ev Idx": 12, '
        f'"correlation": {correlation}}}}}'
    )
