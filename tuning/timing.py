"""Honest device time of a compiled engine: cold beside hot, with clocks, spread and the byte floor.

Isolated: no programmatic edge between calls, even where the engine is launched with one in a decode step.
What such an edge hides is another figure (:mod:`k3lab.tuning.chain`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..kernels import Compiled, Family, Problem
from ..kernels.collectives import CollectiveError
from ..kernels.health import check_health
from . import clocks
from .policy import FULL, TimingPolicy

if TYPE_CHECKING:
    import torch

    from .chain import ChainTiming


RESTED = "a cap held the clocks down: timed again with {:g} ms of rest before each replay"
"""Note of a measurement whose series was."""


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
    rest_ms: float = 0.0
    """Idle before each replay: 0 unless a cap held the clocks down before."""

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
    """The best of the alternatives."""
    notes: list[str] = field(default_factory=list)
    alternatives: dict[str, float] = field(default_factory=dict)
    """The same work by PyTorch operators, graph-captured, cold, in the same run: as called, and by torch.compile."""
    not_timed: dict[str, str] = field(default_factory=dict)
    """Alternatives that could not be timed, and why."""
    chain: ChainTiming | None = None
    """Behind a predecessor, with programmatic edges; None where it was not asked for or the launches have none."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able, times rounded to a nanosecond."""
        data = asdict(self)
        for name in ("cold_us", "hot_us", "floor_us", "alternative_us"):
            if data[name] is not None:
                data[name] = round(data[name], 3)
        data["spread"], data["percent_of_ceiling"] = round(self.spread, 4), round(self.percent_of_ceiling, 1)
        data["read_ceiling"] = round(self.read_ceiling)
        data["alternatives"] = {name: round(value, 3) for name, value in self.alternatives.items()}
        data["chain"] = self.chain.to_json() if self.chain else None
        return data


def copies_for(rotated_bytes: int, policy: TimingPolicy, free_bytes: int) -> int:
    """Copies of the weights so that ``rotate_bytes`` lie between two uses of one, within half the free memory."""
    if rotated_bytes <= 0:
        return 1
    wanted = -(-policy.rotate_bytes // rotated_bytes) + 1
    return max(1, min(wanted, free_bytes // 2 // rotated_bytes))


def time_calls(
    calls: Sequence[Callable[[], None]], policy: TimingPolicy, restore: Callable[[], None] | None = None
) -> Series:
    """Capture the calls in turn in one graph of at least ``policy.calls``, warm up, time its replays.

    Args:
        calls: one per copy of the inputs; each launches on torch's current stream.
        policy: how many, how often.
        restore: puts back what the calls update in place; runs before each replay, outside the timed region.
    """
    return capture_calls(calls, policy).replayed(policy, restore)


@dataclass(frozen=True)
class Captured:
    """Calls in one graph."""

    graph: torch.cuda.CUDAGraph
    calls: int
    copies: int

    def replayed(self, policy: TimingPolicy, restore: Callable[[], None] | None = None) -> Series:
        """Warm up, and time the replays; arguments as for :func:`time_calls`.

        Where a cap held the clocks down they are timed again with a rest before each.
        """
        return _replayed(self.graph, self.calls, self.copies, policy, restore or _nothing)


def capture_calls(calls: Sequence[Callable[[], None]], policy: TimingPolicy) -> Captured:
    """The first part of :func:`time_calls`: each call once, then all in turn in one graph."""
    import torch

    total = -(-policy.calls // len(calls)) * len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(total):
            calls[index % len(calls)]()
    return Captured(graph, total, len(calls))


def _replayed(
    graph: torch.cuda.CUDAGraph, total: int, copies: int, policy: TimingPolicy, restore: Callable[[], None]
) -> Series:
    import torch

    deadline = time.perf_counter() + policy.warm_ms / 1000
    while time.perf_counter() < deadline:
        for _ in range(4):
            restore()
            graph.replay()
        torch.cuda.synchronize()
    series = _sampled(graph, total, copies, policy, restore, 0.0)
    if policy.rest_ms and clocks.throttled(series.clocks_after):
        return _sampled(graph, total, copies, policy, restore, policy.rest_ms)
    return series


def _sampled(
    graph: torch.cuda.CUDAGraph,
    total: int,
    copies: int,
    policy: TimingPolicy,
    restore: Callable[[], None],
    rest_ms: float,
) -> Series:
    """One series: replays at once behind each other, or each on its own behind a rest and a replay that nobody times."""
    import torch

    before = clocks.read_clocks()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(policy.samples)
    ]
    for start, end in events:
        if rest_ms:
            torch.cuda.synchronize()
            time.sleep(rest_ms / 1000)
            restore()
            graph.replay()
        restore()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    after = clocks.read_clocks()
    samples = [round(start.elapsed_time(end) * 1e6 / total) for start, end in events]
    return Series(samples, total, copies, before, after, rest_ms)


def _nothing() -> None:
    """Calls that update nothing in place need no restoring."""


def steady(
    calls: Sequence[Callable[[], None]], policy: TimingPolicy, restore: Callable[[], None] | None = None
) -> tuple[Series, bool]:
    """Repeat until the spread is within the policy; the best series and whether it was."""
    best: Series | None = None
    for _ in range(policy.attempts):
        series = time_calls(calls, policy, restore)
        if best is None or series.spread < best.spread:
            best = series
        if best.spread <= policy.max_spread:
            return best, True
    assert best is not None
    return best, False


def input_copies(family: Family, problem: Problem, policy: TimingPolicy, seed: int) -> list[dict[str, torch.Tensor]]:
    """Inputs and outputs on the GPU, with enough copies of what is cold in a decode step.

    What a call updates in place is each copy's own, so that no call works on what the one before left.
    """
    import torch

    first = family.inputs(problem, seed, "cuda")
    for name, (shape, dtype) in family.output_specs(problem).items():
        first[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
    if (others := family.cold_copies(problem, first, policy.rotate_bytes)) is not None:
        return others
    cold = [name for name in family.rotated if name in first]
    rotated = sum(first[name].numel() * first[name].element_size() for name in cold)
    own = {*cold, *family.mutated}
    free, _ = torch.cuda.mem_get_info()
    copies = [first]
    for _ in range(copies_for(rotated, policy, free) - 1):
        copies.append({**first, **{name: first[name].clone() for name in own}})
    return copies


def warm_note(family: Family, copies: Sequence[Mapping[str, torch.Tensor]], policy: TimingPolicy) -> str | None:
    """What to say where memory was too small for the copies that the policy asks for, or None."""
    cold = [copies[0][name] for name in family.rotated if name in copies[0]]
    one = sum(tensor.numel() * tensor.element_size() for tensor in cold)
    between = (len(copies) - 1) * one
    if not one or between >= policy.rotate_bytes:
        return None
    return (
        f"{len(copies)} copies of the weights fit, {between / 1e6:.0f} MB between two uses of one in place of "
        f"{policy.rotate_bytes / 1e6:.0f}: the cold figure may be a hot one"
    )


def restorer(family: Family, copies: Sequence[Mapping[str, torch.Tensor]]) -> Callable[[], None] | None:
    """Puts back, in every copy, what inputs that are updated in place hold now; None where there are none."""
    if not family.mutated:
        return None
    kept = {name: copies[0][name].clone() for name in family.mutated}

    def restore() -> None:
        for tensors in copies:
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)

    return restore


def time_compiled(
    family: Family,
    compiled: Compiled,
    policy: TimingPolicy = FULL,
    *,
    seed: int = 0,
    alternative: bool = False,
    compile_s: float = 0.0,
    chain: bool = False,
) -> Timing:
    """Time a compiled engine on the current GPU, isolated.

    Inputs that a call updates in place are restored before each replay, outside the timed region.

    Args:
        family: the engine's.
        compiled: what is timed.
        policy: how.
        seed: of the inputs.
        alternative: also time the same work by PyTorch operators.
        compile_s: most seconds that torch.compile may take for a second alternative; 0 leaves it out.
        chain: also time it behind a predecessor, if launches of it have programmatic edges.

    Raises:
        BrokenMeasurement: the cold figure lies below the byte floor by more than the policy allows, a chain's
            graph lost programmatic edges, or a wait of the kernel gave up.
    """
    import torch

    from ..kernels.launch import Runner
    from .ceiling import read_ceiling

    ceiling = read_ceiling()
    problem = compiled.problem
    copies = input_copies(family, problem, policy, seed)
    restore = restorer(family, copies)
    runner = Runner(compiled)
    calls = [runner.bind(tensors, pdl=False) for tensors in copies]
    cold, stable = steady(calls, policy, restore)
    hot, _ = steady(calls[:1], policy, restore)
    beside: dict[str, float] = {}
    missing: dict[str, str] = {}
    if alternative:
        from .alternatives import time_alternatives

        beside, missing = time_alternatives(family, problem, copies, policy, compile_s=compile_s, restore=restore)
    chained = None
    if chain and any(launch.pdl for launch in compiled.launches):
        from .chain import time_chain

        chained = time_chain(family, compiled, runner, copies, policy, restore=restore)
    try:
        check_health(runner.buffers)
    except CollectiveError as error:
        raise BrokenMeasurement(f"a wait of the kernel gave up while it was timed: {error}") from error
    if fault := family.measurement_fault(problem, {**copies[0], **runner.buffers}):
        raise BrokenMeasurement(fault)
    floor_us = family.traffic(problem).bytes / ceiling * 1e6
    notes = []
    if warm := warm_note(family, copies, policy):
        notes.append(warm)
    if cold.rest_ms:
        notes.append(RESTED.format(cold.rest_ms))
    if slow := sorted({*clocks.throttled(cold.clocks_before), *clocks.throttled(cold.clocks_after)}):
        notes.append(f"clocks held down: {', '.join(slow)}")
    if not stable:
        notes.append(f"unstable: spread {cold.spread:.1%} after {policy.attempts} attempts")
    if chained is not None and not chained.stable:
        notes.append("the chain figures are unstable")
    del calls, copies, restore
    torch.cuda.empty_cache()
    if cold.median_us < floor_us * (1 - policy.below_floor):
        raise BrokenMeasurement(
            f"{cold.median_us:.2f} us lies below the byte floor of {floor_us:.2f} us: the weights were not cold"
        )
    return Timing(
        cold_us=cold.median_us,
        hot_us=hot.median_us,
        spread=cold.spread,
        stable=stable,
        floor_us=floor_us,
        percent_of_ceiling=100 * floor_us / cold.median_us,
        read_ceiling=ceiling,
        cold=cold,
        hot=hot,
        policy=policy,
        alternative_us=min(beside.values(), default=None),
        notes=notes,
        alternatives=beside,
        not_timed=missing,
        chain=chained,
    )
