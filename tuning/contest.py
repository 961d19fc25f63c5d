"""A contest: configs of one or several engines on one problem, timed in turn in one process.

Two figures of two processes, or of two minutes, differ by more than the engines do. Here all have the same
inputs and one graph each, and every round takes them in another order: drift hits all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..kernels import Compiled, Family, Problem
from ..kernels.collectives import CollectiveError
from ..kernels.health import check_health
from . import clocks
from .alternatives import MOST_CALLS, PYTORCH
from .outcome import describe
from .policy import TimingPolicy
from .timing import RESTED, Captured, Series, capture_calls, input_copies, restorer, warm_note

if TYPE_CHECKING:
    import torch

ROUNDS = 3
WARM_MS = 200.0
"""Load before the first round."""


@dataclass
class Lane:
    """One contestant."""

    captured: Captured | None = None
    kept: list[Any] = field(default_factory=list)
    """What the graph's launches point to."""
    failed: str = ""
    series: list[Series] = field(default_factory=list)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Its scratch memory, with the health record where its kernels wait for each other."""

    def to_json(self) -> dict[str, Any]:
        """Microseconds and spread, one a round, and why it has none."""
        return {
            "values_us": [round(one.median_us, 4) for one in self.series],
            "spreads": [round(one.spread, 4) for one in self.series],
            "failed": self.failed,
        }


def turns(count: int, rounds: int = ROUNDS) -> list[list[int]]:
    """In which order the contestants run, round by round: each begins one further on."""
    return [[(place + turn) % count for place in range(count)] for turn in range(rounds)]


def time_contest(
    family: Family, problem: Problem, contestants: Sequence[Compiled | str], policy: TimingPolicy, seed: int, sign: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """Time all on the current GPU, weights cold, isolated, and the family's alternative beside them.

    Args:
        family: the engines'.
        problem: which instance.
        contestants: compiled, or why not.
        policy: of one round.
        seed: of the inputs.
        sign: called before each piece of work: a sign of life.

    Returns:
        ``results`` in the order of the contestants, ``alternatives`` in microseconds, ``floor_us``, and how.
    """
    import torch

    from .ceiling import read_ceiling

    sign()
    ceiling = read_ceiling()
    floor_us = family.traffic(problem).bytes / ceiling * 1e6
    copies = input_copies(family, problem, policy, seed)
    restore = restorer(family, copies)
    lanes = []
    for compiled in contestants:
        sign()
        lanes.append(Lane(failed=compiled) if isinstance(compiled, str) else _lane(compiled, copies, policy))
    other = Lane()
    plain = [call for tensors in copies[:MOST_CALLS] if (call := family.alternative(problem, tensors)) is not None]
    if plain:
        other.captured = capture_calls(plain, policy)
    runs = [*lanes, other]
    first = next((lane.captured for lane in runs if lane.captured), None)
    if first is not None:  # up to the clocks that all of them run at
        first.replayed(replace(policy, warm_ms=WARM_MS), restore)
    for order in turns(len(runs)):
        for index in order:
            sign()
            lane = runs[index]
            _round(lane, policy, restore, 0.0 if lane is other else floor_us)
            if lane is not other and lane.series and not lane.failed:  # at once: the next writes to the same outputs
                lane.failed = family.measurement_fault(problem, {**copies[0], **lane.buffers}) or ""
    notes = [warm] if (warm := warm_note(family, copies, policy)) else []
    if any(one.rest_ms for lane in runs for one in lane.series):
        notes.append(RESTED.format(policy.rest_ms))
    held = sorted({why for lane in runs for one in lane.series for why in clocks.throttled(one.clocks_after)})
    result = {
        "results": [lane.to_json() for lane in lanes],
        "alternatives": {PYTORCH: round(_middle(other), 3)} if other.series else {},
        "floor_us": round(floor_us, 3),
        "read_ceiling": round(ceiling),
        "rounds": ROUNDS,
        "policy": policy.to_json(),
        "notes": notes + ([f"clocks held down: {', '.join(held)}"] if held else []),
    }
    del runs, lanes, other, plain, copies, restore
    torch.cuda.empty_cache()
    return result


def _middle(lane: Lane) -> float:
    return statistics.median(one.median_us for one in lane.series)


def _lane(compiled: Compiled, copies: Sequence[dict[str, torch.Tensor]], policy: TimingPolicy) -> Lane:
    from ..kernels.launch import ResidencyError, Runner

    try:
        runner = Runner(compiled)
    except ResidencyError as error:
        return Lane(failed=describe(error))
    calls = [runner.bind(tensors, pdl=False) for tensors in copies]
    return Lane(capture_calls(calls, policy), [runner, calls], buffers=runner.buffers)


def gave_up(buffers: Mapping[str, torch.Tensor]) -> str:
    """What the health record among a contestant's buffers says, or nothing."""
    try:
        check_health(buffers)
    except CollectiveError as error:
        return f"a wait of the kernel gave up: {error}"
    return ""


def _round(lane: Lane, policy: TimingPolicy, restore: Callable[[], None] | None, floor_us: float) -> None:
    """One more series of a lane, the best of a few where the samples spread; or why it is out."""
    if lane.failed or lane.captured is None:
        return
    best: Series | None = None
    for _ in range(policy.attempts):
        series = lane.captured.replayed(policy, restore)
        best = series if best is None or series.spread < best.spread else best
        if best.spread <= policy.max_spread:
            break
    assert best is not None
    if why := gave_up(lane.buffers):
        lane.failed = why
    elif best.spread > policy.max_spread:
        lane.failed = f"unstable: spread {best.spread:.1%} after {policy.attempts} attempts"
    elif best.median_us < floor_us * (1 - policy.below_floor):
        lane.failed = f"unstable: {best.median_us:.2f} us lies below the byte floor of {floor_us:.2f} us"
    else:
        lane.series.append(best)
