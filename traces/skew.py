"""Who waited for whom: the clocks of ranks brought together by their collectives, and the waiting charged to the late.

Each rank's file has a clock of its own (other hosts, other sessions). A collective over all ranks ends on all of
them at nearly the same moment, so the median of (end on the rank - mean end) over many collectives is the rank's
offset, and what is left over (its interquartile range) says how far the comparison can be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collectives import is_collective
from .model import Kernel
from .names import base_name
from .timing import median_ns, quantile_ns

LEAST_COLLECTIVES = 8
LARGEST_RESIDUAL_NS = 2000


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on one rank; ``arrival`` and ``end`` in ns on the clock of its file.

    ``arrival`` is when it could begin: its start, or the end of the kernel before it on its stream where it was
    launched ahead of that (PDL).
    """

    name: str
    arrival: int
    end: int

    @property
    def duration(self) -> int:
        """Waiting and transfer together, ns."""
        return self.end - self.arrival


@dataclass(frozen=True)
class RankWait:
    """One rank: ``offset_ns`` of its clock, and medians a step of what it waited itself and made the others wait.

    ``caused_ns`` is the mean wait of the other ranks in the collectives to which this one came last; ``last`` counts
    those collectives over all steps.
    """

    rank: int
    offset_ns: int
    residual_ns: int
    waited_ns: int
    caused_ns: int
    last: int


@dataclass(frozen=True)
class Transfer:
    """A kind of collective: how many a step has, and the median of its shortest duration over the ranks, ns."""

    name: str
    each_step: int
    shortest_ns: int


@dataclass(frozen=True)
class Skew:
    """Cross-rank times, or in ``refused`` why there are none. ``undecided_ns``: waiting a step whose cause is unclear.

    That is waiting in collectives to which two ranks came last within the residual of the clocks.
    """

    refused: str | None
    collectives: int = 0
    steps: int = 0
    residual_ns: int | None = None
    ranks: tuple[RankWait, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    undecided_ns: int = 0


def collectives_of(steps: Sequence[Sequence[Kernel]]) -> tuple[tuple[Collective, ...], ...]:
    """The collectives of every step of one rank, in launch order."""
    found = []
    for kernels in steps:
        reached: dict[int, int] = {}  # latest end on each stream
        own = []
        for kernel in kernels:
            before = reached.get(kernel.stream, kernel.start)
            if is_collective(kernel.name):
                arrival = min(max(kernel.start, before), kernel.end)
                own.append(Collective(base_name(kernel.name), arrival, kernel.end))
            reached[kernel.stream] = max(before, kernel.end)
        found.append(tuple(own))
    return tuple(found)


def compare(ranks: Mapping[int, Sequence[Sequence[Collective]]]) -> Skew:
    """Align the ranks and charge the waiting.

    Args:
        ranks: by rank number, the collectives of each of its steps.
    """
    numbers = sorted(ranks)
    if len(numbers) < 2:
        return Skew("one rank alone waits for nobody that is seen")
    if reason := _differ(ranks, numbers):
        return Skew(reason)
    flat = {rank: [item for step in ranks[rank] for item in step] for rank in numbers}
    count, steps = len(flat[numbers[0]]), len(ranks[numbers[0]])
    if count < LEAST_COLLECTIVES:
        return Skew(
            f"{count} collectives over all ranks are too few to bring the clocks together ({LEAST_COLLECTIVES} needed)",
            count,
            steps,
        )
    means = [sum(flat[rank][index].end for rank in numbers) // len(numbers) for index in range(count)]
    offsets, spread = {}, {}
    for rank in numbers:
        apart = [item.end - mean for item, mean in zip(flat[rank], means, strict=True)]
        offsets[rank], spread[rank] = median_ns(apart), _quartiles_apart(apart)
    residual = max(spread.values())
    if residual > LARGEST_RESIDUAL_NS:
        return Skew(
            f"the clocks cannot be brought together: the ends of collectives stay {residual / 1000:.1f} us apart "
            f"(interquartile range; at most {LARGEST_RESIDUAL_NS / 1000:.0f} us)",
            count,
            steps,
            residual,
        )
    if reason := _a_step_off(ranks, numbers):
        return Skew(reason, count, steps, residual)
    return _charge(ranks, numbers, offsets, spread)


def _differ(ranks: Mapping[int, Sequence[Sequence[Collective]]], numbers: Sequence[int]) -> str | None:
    """Why the collectives of the ranks do not correspond one to one."""
    steps = {rank: len(ranks[rank]) for rank in numbers}
    if len(set(steps.values())) > 1:
        listed = ", ".join(f"rank {rank} {steps[rank]}" for rank in numbers)
        return f"the ranks have different numbers of steps to compare: {listed}"
    first = numbers[0]
    for rank in numbers[1:]:
        for step, (left, right) in enumerate(zip(ranks[first], ranks[rank], strict=True)):
            if len(left) != len(right):
                return (
                    f"step {step} has {len(left)} collectives on rank {first} and {len(right)} on rank {rank}: "
                    "they do not correspond"
                )
            for place, (one, other) in enumerate(zip(left, right, strict=True)):
                if one.name != other.name:
                    return (
                        f"collective {place} of step {step} is {one.name:.60} on rank {first} and {other.name:.60} "
                        f"on rank {rank}: they do not correspond"
                    )
    return None


def _quartiles_apart(values: Sequence[int]) -> int:
    return quantile_ns(values, 75) - quantile_ns(values, 25)


def _a_step_off(ranks: Mapping[int, Sequence[Sequence[Collective]]], numbers: Sequence[int]) -> str | None:
    """Whether a rank fits the first one better when shifted by a whole step: then its capture began elsewhere."""
    first = ranks[numbers[0]]
    if len(first) < 3:
        return None
    for rank in numbers[1:]:
        other = ranks[rank]
        straight = _residual(first, other)
        if min(_residual(first[1:], other[:-1]), _residual(first[:-1], other[1:])) < straight // 4:
            return f"the steps of rank {rank} seem to be one off from those of rank {numbers[0]}: captured apart"
    return None


def _residual(left: Sequence[Sequence[Collective]], right: Sequence[Sequence[Collective]]) -> int:
    return _quartiles_apart(
        [b.end - a.end for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    )


def _charge(
    ranks: Mapping[int, Sequence[Sequence[Collective]]],
    numbers: Sequence[int],
    offsets: Mapping[int, int],
    spread: Mapping[int, int],
) -> Skew:
    steps, residual = len(ranks[numbers[0]]), max(spread.values())
    caused = {rank: [0] * steps for rank in numbers}
    waited = {rank: [0] * steps for rank in numbers}
    last = dict.fromkeys(numbers, 0)
    undecided = [0] * steps
    shortest: dict[str, list[int]] = {}
    for step in range(steps):
        for place in range(len(ranks[numbers[0]][step])):
            items = {rank: ranks[rank][step][place] for rank in numbers}
            least = min(item.duration for item in items.values())
            shortest.setdefault(items[numbers[0]].name, []).append(least)
            waits = {rank: item.duration - least for rank, item in items.items()}
            for rank, wait in waits.items():
                waited[rank][step] += wait
            order = sorted(numbers, key=lambda rank: (items[rank].arrival - offsets[rank], rank))
            late, before = order[-1], order[-2]
            others = (sum(waits.values()) - waits[late]) // (len(numbers) - 1)
            ahead = (items[late].arrival - offsets[late]) - (items[before].arrival - offsets[before])
            if ahead > residual:
                caused[late][step] += others
                last[late] += 1
            else:
                undecided[step] += others
    return Skew(
        refused=None,
        collectives=sum(map(len, ranks[numbers[0]])),
        steps=steps,
        residual_ns=residual,
        ranks=tuple(
            RankWait(rank, offsets[rank], spread[rank], median_ns(waited[rank]), median_ns(caused[rank]), last[rank])
            for rank in numbers
        ),
        transfers=tuple(
            Transfer(name, round(len(values) / steps), median_ns(values)) for name, values in sorted(shortest.items())
        ),
        undecided_ns=median_ns(undecided),
    )
