"""Times of calls that all ranks make together: whatever decides how many there are is agreed upon.

Ranks whose kernels wait for each other must launch equally often, so warm-up is counted, not clocked, and a series is
repeated on all ranks or on none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .. import clocks
from ..policy import TimingPolicy
from ..timing import Series
from .group import RankGroup

Call = Callable[[], None]
MOST_WARM = 5000
"""Replays before a series."""


class Clock(Protocol):
    """What times on this rank."""

    @property
    def index(self) -> int | None:
        """Of the GPU."""
        ...

    def capture(self, calls: Sequence[Call], total: int) -> Call:
        """Each call once, then ``total`` of them in turn as one graph, launched by what is returned."""
        ...

    def samples_ns(self, replay: Call, count: int) -> list[float]:
        """Nanoseconds of so many replays, each behind a barrier of all ranks.

        Raises:
            CollectiveError: they did not end within the limit.
        """
        ...


def time_together(clock: Clock, calls: Sequence[Call], policy: TimingPolicy, group: RankGroup) -> tuple[Series, bool]:
    """(this rank's series, whether its spread was within the policy on every rank); all ranks call it.

    Args:
        clock: this rank's.
        calls: one per copy of the inputs; as many on every rank.
        policy: how many, how often.
        group: the ranks.
    """
    total = -(-policy.calls // len(calls)) * len(calls)
    group.meet()
    replay = clock.capture(calls, total)
    once = max(group.all(clock.samples_ns(replay, 1)[0]))
    clock.samples_ns(replay, min(MOST_WARM, math.ceil(policy.warm_ms * 1e6 / max(once, 1.0))))
    best: Series | None = None
    worst = math.inf
    for _ in range(policy.attempts):
        series = _series(clock, replay, total, len(calls), policy)
        spread = max(group.all(series.spread))
        if best is None or spread < worst:
            best, worst = series, spread
        if worst <= policy.max_spread:
            break
    assert best is not None
    return best, worst <= policy.max_spread


def _series(clock: Clock, replay: Call, total: int, copies: int, policy: TimingPolicy) -> Series:
    before = _clocks(clock)
    samples = [round(one / total) for one in clock.samples_ns(replay, policy.samples)]
    return Series(samples, total, copies, before, _clocks(clock))


def _clocks(clock: Clock) -> dict[str, Any]:
    return {} if clock.index is None else clocks.read_clocks(clock.index)
