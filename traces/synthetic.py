"""A generator of decode traces for demonstrations and tests. What it writes is marked synthetic, and read as such.

The trace has the shape of a graph-replayed K3 decode step with programmatic dependent launch: one graph launch a
step under a step mark, KDA, KDA, KDA, MLA layers of 13 and 15 kernels, starts that run ahead of the work, and the
shared expert on a side stream. The times are drawn from a seeded generator around fixed figures; they are not
measurements of anything.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TraceError

Part = tuple[str, int]
"""A kernel and what it adds to the completion period, ns; 0 for one hidden behind others."""

_HEAD: dict[str, tuple[Part, ...]] = {
    "kda": (("k3_attention_projection_synthetic_main", 12_000), ("k3_kda_synthetic_step", 3_500)),
    "mla": (
        ("k3_attention_projection_synthetic_main", 9_000),
        ("k3_mla_synthetic_query", 3_500),
        ("k3_mla_synthetic_core", 5_000),
        ("k3_mla_synthetic_value", 2_500),
    ),
}
_TAIL: tuple[Part, ...] = (
    ("k3_output_projection_synthetic_producer", 4_500),
    ("k3_output_projection_synthetic_consumer", 2_500),
    ("k3_experts_synthetic_shared_gate_up", 0),
    ("k3_experts_synthetic_shared_situ", 0),
    ("k3_experts_synthetic_shared_down", 0),
    ("k3_router_synthetic_front", 4_500),
    ("k3_router_synthetic_route", 2_500),
    ("k3_experts_synthetic_routed", 24_000),
    ("k3_moe_tail_synthetic_main", 4_500),
    ("k3_attn_res_synthetic_main", 2_500),
    ("k3_experts_synthetic_prefetch", 0),
)
_EXTRA: Part = ("k3_router_synthetic_split_k_reduce", 1_500)
_MAIN_STREAM, _SIDE_STREAM = 7, 21
_PREFIX: Part = ("k3_lm_head_synthetic_embed", 2_000)
_SUFFIX: Part = ("k3_lm_head_synthetic_logits", 21_000)
_EPOCH_NS = 1_760_000_000_000_000_000
_LAUNCH_TO_START_NS = 25_000
_BETWEEN_STEPS_NS = 60_000


@dataclass(frozen=True)
class Faults:
    """What to make wrong, by zero-based layer: a slow kernel, a bubble before a layer, a 14th kernel, a missing one.

    ``slow`` and ``bubble`` map a layer to ns; ``slow`` adds to the routed experts. ``cut_last`` drops the last
    layer and what follows it from the last step, as the end of a capture does.
    """

    slow: tuple[tuple[int, int], ...] = ()
    bubble: tuple[tuple[int, int], ...] = ()
    extra: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    cut_last: bool = False


def layer_parts(kind: str) -> tuple[Part, ...]:
    """The kernels of a synthetic layer in launch order: 13 for ``kda``, 15 for ``mla``."""
    return (*_HEAD[kind], *_TAIL)


def synthesize(
    path: str | Path,
    *,
    seed: int = 0,
    gpu: str | None = "NVIDIA GB300",
    tp: int = 16,
    steps: int = 25,
    layers: int = 12,
    scale: float = 1.0,
    faults: Faults | None = None,
) -> Path:
    """Write a synthetic decode trace as torch.profiler JSON (gzip where the name ends in ``.gz``).

    Args:
        path: where to write; replaced as a whole.
        seed: of the jitter (about one percent a kernel).
        gpu: device name to write; None leaves it out.
        tp: world size to write.
        steps: decode steps.
        layers: layers of a step; every fourth is MLA.
        scale: factor on all kernel times: 1.0 keeps the GB300 TP16 budget (KDA about 61 us), 1.2 does not.
        faults: what to make wrong.

    Returns:
        The path.

    Raises:
        TraceError: sizes that make no trace, or a path that cannot be written.
    """
    if steps < 1 or layers < 1 or scale <= 0:
        raise TraceError("a synthetic trace needs at least 1 step, 1 layer and a scale above 0")
    faults = faults or Faults()
    path = Path(path)
    rng = random.Random(seed)
    events: list[dict[str, Any]] = []
    clock = 5_000_000_000
    for step in range(steps):
        keep = layers - 1 if faults.cut_last and step == steps - 1 else layers
        clock = _write_step(events, rng, clock, step, layers, keep, scale, faults) + _BETWEEN_STEPS_NS
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "k3lab_synthetic": True,
        "k3lab_note": "made by k3lab.traces.synthesize: not recorded on any GPU",
        "k3lab_seed": seed,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _EPOCH_NS,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": tp},
    }
    if gpu is not None:
        head["deviceProperties"] = [{"id": 0, "name": gpu}]
    _write(path, _dump(head, events))
    return path


def _layer_kernels(index: int, scale: float, faults: Faults, rng: random.Random) -> list[Part]:
    slow = dict(faults.slow).get(index, 0)
    parts = []
    for name, cost in layer_parts("mla" if index % 4 == 3 else "kda"):
        if index in faults.missing and name.endswith("router_synthetic_route"):
            continue
        cost = round(cost * scale * rng.uniform(0.99, 1.01))
        parts.append((name, cost + slow if name.endswith("experts_synthetic_routed") else cost))
        if index in faults.extra and name.endswith("router_synthetic_front"):
            parts.append((_EXTRA[0], round(_EXTRA[1] * scale)))
    return parts


def _write_step(
    events: list[dict[str, Any]],
    rng: random.Random,
    launch: int,
    step: int,
    layers: int,
    keep: int,
    scale: float,
    faults: Faults,
) -> int:
    """Append one step; returns the time at which its last kernel ends."""
    correlation, node = 100 + step, 1000
    events.append(_host("user_annotation", f"step[DECODE bs=1] {step}", launch - 8_000, 300_000, {}))
    events.append(_host("cuda_runtime", "cudaGraphLaunch", launch, 12_000, {"correlation": correlation}))
    end, started, side = launch + _LAUNCH_TO_START_NS, 0, 0

    def run(parts: Sequence[Part], bubble: int = 0) -> None:
        nonlocal end, started, side, node
        end += bubble
        for index, (name, cost) in enumerate(parts):
            node += 1
            if cost == 0:  # beside the main stream, and over before it
                start = max(side, end - rng.randrange(500, 900))
                side = start + rng.randrange(700, 1_200)
                interval, stream = (start, min(side, end + 300)), _SIDE_STREAM
            else:
                ahead = 0 if index == 0 and bubble else rng.randrange(600, 2_500)
                started = max(started + 200, end - ahead)
                interval, stream = (started, max(end, started) + cost), _MAIN_STREAM
                end = interval[1]
            events.append(_kernel(name, interval, stream, correlation, node))

    run([(_PREFIX[0], round(_PREFIX[1] * scale))], bubble=1)
    for index in range(layers):
        parts = _layer_kernels(index, scale, faults, rng)
        if index < keep:
            run(parts, dict(faults.bubble).get(index, 0))
    if keep == layers:
        run([(_SUFFIX[0], round(_SUFFIX[1] * scale))])
    return end


def _kernel(name: str, interval: tuple[int, int], stream: int, correlation: int, node: int) -> dict[str, Any]:
    start, end = interval
    grid = [64 + sum(map(ord, name)) % 90, 1, 1]
    args = {
        "device": 0, "context": 1, "stream": stream, "correlation": correlation,
        "graph id": 1, "graph node id": node, "grid": grid, "block": [256, 1, 1],
    }  # fmt: skip
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": max(1, end - start),
            "args": args}  # fmt: skip


def _host(category: str, name: str, start: int, duration: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 4000, "tid": 4000, "ts": start, "dur": duration,
            "args": args}  # fmt: skip


def _dump(head: dict[str, Any], events: list[dict[str, Any]]) -> bytes:
    """JSON in which the integer ns of ``ts`` and ``dur`` stand as microseconds with three decimals, exactly."""
    lines = []
    for event in events:
        times = {key: f"{event[key] // 1000}.{event[key] % 1000:03d}" for key in ("ts", "dur")}
        rest = json.dumps({key: value for key, value in event.items() if key not in times})
        lines.append(f'{rest[:-1]}, "ts": {times["ts"]}, "dur": {times["dur"]}}}')
    body = ",\n".join(lines)
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{body}\n]}}\n'.encode()


def _write(path: Path, data: bytes) -> None:
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from None
