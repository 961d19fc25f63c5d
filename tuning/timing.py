"""Honest device time of a compiled engine: cold beside hot, with clocks, spread and the byte floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..kernels import Compiled, Family, Problem
from . import clocks
from .policy import FULL, TimingPolicy

if TYPE_CHECKING:
    import torch


class BrokenMeasurement(RuntimeError):
    """A figure that cannot be true, such as one below the byte floor."""


@dataclass(frozen=True)
class Series:
    """Replays of one graph."""

    samples_ns: list[int]
    """Nanoseconds a call, one per replay."""
    calls: int
    """Calls in the graph."""
    copies: int
    """Copies of the weights cycled through; 1 is a hot figure."""
    clocks_before: dict[str, Any]
    clocks_after: dict[str, Any]

    @property
    def median_us(self) -> float:
        """Microseconds a call."""
        return statistics.median(self.samples_ns) / 1000

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        ordered = sorted(self.samples_ns)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        return (high - low) / statistics.median(ordered)


@dataclass(frozen=True)
class Timing:
    """A measurement of one engine on the GPU at hand."""

    cold_us: float
    hot_us: float
    spread: float
    stable: bool
    floor_us: float
    """Bytes of the problem over the read ceiling measured in the same process."""
    percent_of_ceiling: float
    read_ceiling: float
    """Bytes/s."""
    cold: Series
    hot: Series
    policy: TimingPolicy
    alternative_us: float | None = None
    """The same work by PyTorch operators, graph-captured, cold, in the same run."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """JSON-able, times rounded to a nanosecond."""
        data = asdict(self)
        for name in ("cold_us", "hot_us", "floor_us", "alternative_us"):
            if data[name] is not None:
                data[name] = round(data[name], 3)
        data["spread"], data["percent_of_ceiling"] = round(self.spread, 4), round(self.percent_of_ceiling, 1)
        data["read_ceiling"] = round(self.read_ceiling)
        return data


def copies_for(rotated_bytes: int, policy: TimingPolicy, free_bytes: int) -> int:
    """Copies of the weights so that ``rotate_bytes`` lie between two uses of one, within half the free memory."""
    if rotated_bytes <= 0:
        return 1
    wanted = -(-policy.rotate_bytes // rotated_bytes) + 1
    return max(1, min(wanted, free_bytes // 2 // rotated_bytes))


def time_calls(calls: Sequence[Callable[[], None]], policy: TimingPolicy) -> Series:
    """Capture the calls in turn in one graph of at least ``policy.calls``, warm up, time its replays.

    Args:
        calls: one per copy of the inputs; each launches on torch's current stream.
    """
    import torch

    total = -(-policy.calls // len(calls)) * len(calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(total):
            calls[index % len(calls)]()
    deadline = time.perf_counter() + policy.warm_ms / 1000
    while time.perf_counter() < deadline:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
    before = clocks.read_clocks()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(policy.samples)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    after = clocks.read_clocks()
    samples = [round(start.elapsed_time(end) * 1e6 / total) for start, end in events]
    return Series(samples, total, len(calls), before, after)


def steady(calls: Sequence[Callable[[], None]], policy: TimingPolicy) -> tuple[Series, bool]:
    """Repeat until the spread is within the policy; the best series and whether it was."""
    best: Series | None = None
    for _ in range(policy.attempts):
        series = time_calls(calls, policy)
        if best is None or series.spread < best.spread:
            best = series
        if best.spread <= policy.max_spread:
            return best, True
    assert best is not None
    return best, False


def input_copies(family: Family, problem: Problem, policy: TimingPolicy, seed: int) -> list[dict[str, torch.Tensor]]:
    """Inputs and outputs on the GPU, with enough copies of what is cold in a decode step."""
    import torch

    first = family.inputs(problem, seed, "cuda")
    for name, (shape, dtype) in family.output_specs(problem).items():
        first[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    rotated = sum(first[name].numel() * first[name].element_size() for name in family.rotated)
    free, _ = torch.cuda.mem_get_info()
    copies = [first]
    for _ in range(copies_for(rotated, policy, free) - 1):
        copies.append({**first, **{name: first[name].clone() for name in family.rotated}})
    return copies


def time_compiled(
    family: Family, compiled: Compiled, policy: TimingPolicy = FULL, *, seed: int = 0, alternative: bool = False
) -> Timing:
    """Time a compiled engine on the current GPU.

    Raises:
        BrokenMeasurement: the cold figure lies below the byte floor by more than the policy allows.
    """
    import torch

    from ..kernels.launch import Runner
    from .ceiling import read_ceiling

    ceiling = read_ceiling()
    problem = compiled.problem
    copies = input_copies(family, problem, policy, seed)
    runner = Runner(compiled)
    calls = [runner.bind(tensors) for tensors in copies]
    cold, stable = steady(calls, policy)
    hot, _ = steady(calls[:1], policy)
    beside = None
    if alternative and (made := [family.alternative(problem, tensors) for tensors in copies]) and made[0] is not None:
        beside = steady([call for call in made if call is not None], policy)[0].median_us
    floor_us = family.traffic(problem).bytes / ceiling * 1e6
    notes = []
    if len(copies) == 1 and family.rotated:
        notes.append("one copy of the weights only: the cold figure is a hot one")
    if slow := sorted({*clocks.throttled(cold.clocks_before), *clocks.throttled(cold.clocks_after)}):
        notes.append(f"clocks held down: {', '.join(slow)}")
    if not stable:
        notes.append(f"unstable: spread {cold.spread:.1%} after {policy.attempts} attempts")
    del calls, copies
    torch.cuda.empty_cache()
    if cold.median_us < floor_us * (1 - policy.below_floor):
        raise BrokenMeasurement(
            f"{cold.median_us:.2f} us lies below the byte floor of {floor_us:.2f} us: the weights were not cold"
        )
    percent = 100 * floor_us / cold.median_us
    return Timing(
        cold.median_us, hot.median_us, cold.spread, stable, floor_us, percent, ceiling, cold, hot, policy, beside, notes
    )
