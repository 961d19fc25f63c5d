"""The kernels of a synthetic decode step, what can be planted in it, and its events on a made-up clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
_CAST: Part = ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)", 1_800)
_STOCK = "fused_moe_kernel"
_MAIN_STREAM, _SIDE_STREAM = 7, 21
_PREFIX: Part = ("k3_lm_head_synthetic_embed", 2_000)
_SUFFIX: Part = ("k3_lm_head_synthetic_logits", 21_000)
_LAUNCH_TO_START_NS = 25_000
_LATE_NS = 4_000  # from the end of a graph to the launch of the next one of its step


@dataclass(frozen=True)
class Faults:
    """What to make wrong; layers are counted from 0, and pairs hold a layer and ns.

    - ``slow``: the routed experts take longer; ``bubble``: nothing runs before the layer, and nothing says why;
      ``copy``, ``flush``: the same, while a copy runs or the profiler writes its buffers; ``exposed``: the main stream
      waits for the shared experts on the side stream;
    - ``extra``, ``cast``: a split-K reduction or an elementwise cast more; ``missing``: a kernel less; ``stock``: the
      routed experts by a stock kernel; ``no_overlap``: kernels start when the one before has ended;
    - ``kernels``: pairs of a name and ns, kernels more at the end of every layer, such as those of a new family;
    - ``graphs``: so many graph launches a step, each made after the one before has ended; ``pause_ns``: from the end
      of a step to the next launch; ``cut_last``: the capture ends before the last layer of the last step.
    """

    slow: tuple[tuple[int, int], ...] = ()
    bubble: tuple[tuple[int, int], ...] = ()
    copy: tuple[tuple[int, int], ...] = ()
    flush: tuple[tuple[int, int], ...] = ()
    exposed: tuple[tuple[int, int], ...] = ()
    extra: tuple[int, ...] = ()
    cast: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    stock: tuple[int, ...] = ()
    no_overlap: tuple[int, ...] = ()
    kernels: tuple[tuple[str, int], ...] = ()
    graphs: int = 1
    pause_ns: int = 60_000
    cut_last: bool = False


def layer_parts(kind: str) -> tuple[Part, ...]:
    """The kernels of a synthetic layer in launch order: 13 for ``kda``, 15 for ``mla``."""
    return (*_HEAD[kind], *_TAIL)


def write_step(
    events: list[dict[str, Any]],
    rng: random.Random,
    launch: int,
    step: int,
    layers: int,
    keep: int,
    scale: float,
    faults: Faults,
) -> int:
    """Append one step of ``layers`` layers, cut after ``keep`` of them.

    Returns:
        The time at which its last kernel ends, ns.
    """
    writer = _StepWriter(events, rng, launch, 100 + step * faults.graphs, faults)
    opening = len(events)
    events.append(host_event("user_annotation", f"step[DECODE bs=1] {step}", launch - 8_000, 300_000, {}))
    writer.launch(launch)
    writer.run([(_PREFIX[0], round(_PREFIX[1] * scale))], bubble=1)
    starts = {index * layers // faults.graphs for index in range(1, faults.graphs)}
    for index in range(layers):
        parts = _layer_kernels(index, scale, faults, rng)
        if index >= keep:
            continue
        if index in starts:
            writer.launch(writer.end + _LATE_NS)
        writer.pauses(index)
        writer.run(
            parts, dict(faults.bubble).get(index, 0), dict(faults.exposed).get(index, 0), index in faults.no_overlap
        )
    if keep == layers:
        writer.run([(_SUFFIX[0], round(_SUFFIX[1] * scale))])
    events[opening]["dur"] = max(300_000, writer.launched - launch + 20_000)
    return writer.end


def _layer_kernels(index: int, scale: float, faults: Faults, rng: random.Random) -> list[Part]:
    slow = dict(faults.slow).get(index, 0)
    parts = []
    for name, cost in layer_parts("mla" if index % 4 == 3 else "kda"):
        if index in faults.missing and name.endswith("router_synthetic_route"):
            continue
        cost = round(cost * scale * rng.uniform(0.99, 1.01))
        if name.endswith("experts_synthetic_routed"):
            if index in faults.cast:
                parts.append((_CAST[0], round(_CAST[1] * scale)))
            parts.append((_STOCK if index in faults.stock else name, cost + slow))
        else:
            parts.append((name, cost))
        if index in faults.extra and name.endswith("router_synthetic_front"):
            parts.append((_EXTRA[0], round(_EXTRA[1] * scale)))
    parts += [(name, round(cost * scale * rng.uniform(0.99, 1.01))) for name, cost in faults.kernels]
    return parts


class _StepWriter:
    """Appends the kernels of a step one after another; ``end`` is when the last has ended, ``launched`` its launch."""

    def __init__(
        self, events: list[dict[str, Any]], rng: random.Random, launch: int, correlation: int, faults: Faults
    ) -> None:
        self.events, self.rng, self.faults = events, rng, faults
        self.end, self.launched = launch, launch
        self.started = self.side = self.node = 0
        self.correlation = correlation - 1
        self.fresh = False

    def launch(self, at: int) -> None:
        """A graph launch; what follows is of that graph."""
        self.correlation += 1
        self.events.append(host_event("cuda_runtime", "cudaGraphLaunch", at, 12_000, {"correlation": self.correlation}))
        self.end, self.launched, self.fresh = at + _LAUNCH_TO_START_NS, at, True

    def pauses(self, layer: int) -> None:
        """Pauses before a layer in which something else runs."""
        for length in (length for at, length in self.faults.copy if at == layer):
            row = host_event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", self.end + 300, length - 600, {
                "device": 0, "stream": _MAIN_STREAM, "correlation": self.correlation, "bytes": 4096})  # fmt: skip
            self.events.append(row)
            self.end, self.fresh = self.end + length, True
        for length in (length for at, length in self.faults.flush if at == layer):
            self.events.append(host_event("overhead", "Buffer Flush", self.end - 1_000, length + 2_000, {}))
            self.end, self.fresh = self.end + length, True

    def run(self, parts: Sequence[Part], bubble: int = 0, exposed: int = 0, apart: bool = False) -> None:
        """Kernels in launch order.

        Args:
            parts: names, and what each adds; 0 on the side stream.
            bubble: idle time before the first, ns.
            exposed: how long the main stream waits for the last of the shared experts, ns.
            apart: each of the main stream starts 300 ns after the one before it has ended.
        """
        self.end += bubble
        for index, (name, cost) in enumerate(parts):
            self.node += 1
            if cost == 0:  # beside the main stream, and over before it
                start = max(self.side, self.end - self.rng.randrange(500, 900))
                self.side = start + self.rng.randrange(700, 1_200)
                interval, stream = (start, min(self.side, self.end + 300)), _SIDE_STREAM
                if exposed and name.endswith("shared_down"):
                    interval, self.fresh = (start, self.end + exposed), True
                    self.side = self.end = self.end + exposed
            else:
                if (index == 0 and bubble) or self.fresh:
                    ahead, self.fresh = 0, False
                else:
                    ahead = -300 if apart else self.rng.randrange(600, 2_500)
                self.started = max(self.started + 200, self.end - ahead)
                interval, stream = (self.started, max(self.end, self.started) + cost), _MAIN_STREAM
                self.end = interval[1]
            self.events.append(_kernel(name, interval, stream, self.correlation, 1000 + self.node))


def _kernel(name: str, interval: tuple[int, int], stream: int, correlation: int, node: int) -> dict[str, Any]:
    start, end = interval
    grid = [64 + sum(map(ord, name)) % 90, 1, 1]
    args = {
        "device": 0, "context": 1, "stream": stream, "correlation": correlation,
        "graph id": 1, "graph node id": node, "grid": grid, "block": [256, 1, 1],
    }  # fmt: skip
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": max(1, end - start),
            "args": args}  # fmt: skip


def host_event(category: str, name: str, start: int, duration: int, args: dict[str, Any]) -> dict[str, Any]:
    """A row of the host, or of the device beside its kernels; times in ns."""
    return {"ph": "X", "cat": category, "name": name, "pid": 4000, "tid": 4000, "ts": start, "dur": duration,
            "args": args}  # fmt: skip
