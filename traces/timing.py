"""Times of one layer of one step, in integer ns: completion period, wall, busy, sum, overlap, gap, increments.

Definitions (kernels only; copies are counted apart):

- wall: latest end minus earliest start of the layer's kernels;
- completion period: latest end of any kernel up to the layer's last in launch order, minus the same up to the last
  kernel before the layer. It adds up to the step, counts overlapping launches once and charges a bubble to the
  layer that started late: this is the one held against a budget. Where nothing precedes the layer in its step, it
  counts from the layer's first start;
- start period: start of the next layer's first kernel minus start of this one's. With programmatic dependent launch
  starts run ahead of the work, so it is reported and never judged;
- busy: length of the union of the kernels' intervals; gap = wall - busy;
- sum: total of durations; overlap = sum - busy, on the same stream (PDL) and across streams.

Identity: sum - overlap + gap = wall. Increments and bubbles of a layer's kernels add up to its completion period.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .model import Kernel


@dataclass(frozen=True)
class KernelShare:
    """One kernel's part of the completion period: what it adds to the latest end, and the idle time before it."""

    increment: int
    bubble: int


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer, ns. ``start_period`` is None where no kernel follows; ``shares`` is in launch order."""

    completion_period: int
    start_period: int | None
    wall: int
    busy: int
    total: int
    overlap_same_stream: int
    overlap_cross_stream: int
    shares: tuple[KernelShare, ...]

    @property
    def overlap(self) -> int:
        """Time counted more than once in the sum of durations."""
        return self.overlap_same_stream + self.overlap_cross_stream

    @property
    def gap(self) -> int:
        """Time between the layer's first start and last end in which none of its kernels ran."""
        return self.wall - self.busy


def union_length(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of half-open intervals."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def layer_times(kernels: Sequence[Kernel], layers: Sequence[tuple[int, int]]) -> list[LayerTimes]:
    """Times of consecutive layers of one step.

    Args:
        kernels: the step's kernels in launch order.
        layers: half-open index ranges into ``kernels``, in order and not empty.
    """
    reached: list[int] = []  # latest end of any kernel up to this one
    for kernel in kernels:
        reached.append(max(kernel.end, reached[-1]) if reached else kernel.end)
    found = []
    for start, end in layers:
        own = kernels[start:end]
        first = min(kernel.start for kernel in own)
        baseline = reached[start - 1] if start else first
        shares, latest = [], baseline
        for kernel in own:
            bubble = max(0, kernel.start - latest)
            increment = max(0, kernel.end - latest - bubble)
            shares.append(KernelShare(increment, bubble))
            latest = max(latest, kernel.end)
        total = sum(kernel.duration for kernel in own)
        busy = union_length((kernel.start, kernel.end) for kernel in own)
        streams: dict[int, list[Kernel]] = {}
        for kernel in own:
            streams.setdefault(kernel.stream, []).append(kernel)
        by_stream = sum(union_length((k.start, k.end) for k in group) for group in streams.values())
        found.append(
            LayerTimes(
                completion_period=latest - baseline,
                start_period=kernels[end].start - kernels[start].start if end < len(kernels) else None,
                wall=max(kernel.end for kernel in own) - first,
                busy=busy,
                total=total,
                overlap_same_stream=total - by_stream,
                overlap_cross_stream=by_stream - busy,
                shares=tuple(shares),
            )
        )
    return found


def median_ns(values: Iterable[int]) -> int:
    """Median as an integer; of an even number of values the mean of the middle two, rounded up."""
    ranked = sorted(values)
    middle = len(ranked) // 2
    if len(ranked) % 2:
        return ranked[middle]
    return (ranked[middle - 1] + ranked[middle] + 1) // 2


def quantile_ns(values: Iterable[int], percent: int) -> int:
    """The value at a percentile (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-percent * len(ranked) // 100) - 1)]
