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
from itertools import accumulate
from typing import NamedTuple

from .model import Kernel


class KernelShare(NamedTuple):
    """One kernel's part of the completion period: what it adds to the latest end, and the idle time before it."""

    increment: int
    bubble: int


class LayerTimes(NamedTuple):
    """Times of one layer, ns. ``start_period`` is None where no kernel follows.

    ``increments`` and ``bubbles`` are the shares of its kernels in launch order.
    """

    completion_period: int
    start_period: int | None
    wall: int
    busy: int
    total: int
    overlap_same_stream: int
    overlap_cross_stream: int
    increments: tuple[int, ...]
    bubbles: tuple[int, ...]

    @property
    def shares(self) -> tuple[KernelShare, ...]:
        """What each kernel adds to the completion period, in launch order."""
        return tuple(map(KernelShare, self.increments, self.bubbles))

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
    starts, ends = [kernel.start for kernel in kernels], [kernel.end for kernel in kernels]
    streams = [kernel.stream for kernel in kernels]
    reached = list(accumulate(ends, max))  # latest end of any kernel up to this one
    begun = min(starts[slice(*layers[0])]) if layers and not layers[0][0] else 0
    before = [begun, *reached[:-1]]  # nothing precedes the first kernel: it counts from the start of its layer
    bubbles = [start - latest if start > latest else 0 for start, latest in zip(starts, before, strict=True)]
    increments = [
        end - latest - bubble if end > latest else 0 for end, latest, bubble in zip(ends, before, bubbles, strict=True)
    ]
    found = []
    for begin, stop in layers:
        own_starts, own_ends = starts[begin:stop], ends[begin:stop]
        first, last = min(own_starts), max(own_ends)
        baseline = before[begin]
        total = sum(own_ends) - sum(own_starts)
        own_increments = tuple(increments[begin:stop])
        if own_starts == sorted(own_starts):  # then increments are what is busy after the layers before
            early = [(own, min(end, baseline)) for own, end in zip(own_starts, own_ends, strict=True) if own < baseline]
            busy = sum(own_increments) + (union_length(early) if early else 0)
        else:
            busy = union_length(zip(own_starts, own_ends, strict=True))
        own_streams = streams[begin:stop]
        by_stream = busy
        if own_streams.count(own_streams[0]) < len(own_streams):
            by_stream = _union_by_stream(own_streams, own_starts, own_ends)
        found.append(
            LayerTimes(
                completion_period=max(last, baseline) - baseline,
                start_period=starts[stop] - starts[begin] if stop < len(kernels) else None,
                wall=last - first,
                busy=busy,
                total=total,
                overlap_same_stream=total - by_stream,
                overlap_cross_stream=by_stream - busy,
                increments=own_increments,
                bubbles=tuple(bubbles[begin:stop]),
            )
        )
    return found


def _union_by_stream(streams: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> int:
    """The sum over streams of the union of their intervals."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for stream, start, end in zip(streams, starts, ends, strict=True):
        groups.setdefault(stream, []).append((start, end))
    return sum(map(union_length, groups.values()))


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
