"""The set of ranks: which rank each file is of, and whether every rank of the world is there once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .budget import Budget
from .report import DeviceReport
from .skew import Collective

_TOLD_ABSENT = 4096


@dataclass(frozen=True)
class RankLane:
    """One rank: a device of a process of a file. ``device`` is None where its file holds no kernel records.

    ``said`` is the rank number its file or the file's name tells; ``number`` is that, or its place where none tells.
    """

    label: str
    number: int
    said: int | None
    world: int | None
    synthetic: bool
    verdict: str
    reasons: tuple[str, ...]
    device: DeviceReport | None
    collectives: tuple[tuple[Collective, ...], ...]
    stamp: int | None


def numbered(lanes: Sequence[RankLane]) -> tuple[list[RankLane], bool]:
    """The lanes in the order of their ranks; whether all ranks are told by the files or their names."""
    if all(lane.said is not None for lane in lanes):
        named = [replace(lane, number=lane.said or 0) for lane in lanes]
        return sorted(named, key=lambda lane: (lane.number, lane.label)), True
    return [replace(lane, number=place) for place, lane in enumerate(lanes)], False


def find_world(
    lanes: Sequence[RankLane], told: bool, world: int | None, tp: int | None, budget: Budget | None
) -> tuple[int | None, list[str], list[str]]:
    """The world's size, why the set of ranks is not it, and notes."""
    doubts, notes = [], []
    said = sorted({lane.world for lane in lanes if lane.world is not None})
    if len(said) > 1:
        doubts.append(f"the files are of worlds of different sizes: {', '.join(map(str, said))} ranks")
    if world is not None and said and said != [world]:
        doubts.append(f"the world has {world} ranks on your word, and {said[0]} by the files")
    known = world or (said[-1] if said else None) or tp
    if known is None and budget is not None:
        known = budget.tp
        notes.append(f"how many ranks there were is not in the files and taken from the budget: {known}")
    if not told:
        if any(lane.said is not None for lane in lanes):
            listed = ", ".join(lane.label for lane in lanes if lane.said is None)
            doubts.append(f"these do not say which rank they are: {listed}")
        else:
            notes.append("no file says which rank it is: they are numbered in the order of their names")
    for number, count in sorted(Counter(lane.number for lane in lanes).items()):
        if count > 1:
            twice = ", ".join(lane.label for lane in lanes if lane.number == number)
            doubts.append(f"rank {number} is there {count} times: {twice}")
    by_stamp: dict[int, list[RankLane]] = {}
    for lane in lanes:
        if lane.stamp is not None:
            by_stamp.setdefault(lane.stamp, []).append(lane)
    for same in by_stamp.values():
        if len(same) > 1:
            line = f"the same kernel times to the nanosecond: {', '.join(lane.label for lane in same)}"
            (notes if all(lane.synthetic for lane in same) else doubts).append(line)  # no two GPUs are so alike
    size = tp or (budget.tp if budget is not None else None)
    if known is not None and size is not None and known % size:
        doubts.append(f"a world of {known} ranks is not of whole groups of TP{size}")
    if known is None:
        doubts.append("how many ranks there were is not in the files; say it with --world N")
        return None, doubts, notes
    present = {lane.number for lane in lanes}
    if told:
        if missing := _absent(present, known):
            doubts.append(f"{ranks_text(missing)} of {known} {'is' if len(missing) == 1 else 'are'} missing")
        if extra := sorted(number for number in present if number >= known):
            doubts.append(f"{ranks_text(extra)} {'is' if len(extra) == 1 else 'are'} none of a world of {known}")
    elif len(lanes) != known:
        doubts.append(f"{len(lanes)} ranks are there, the world has {known}")
    return known, doubts, notes


def _absent(present: set[int], world: int) -> list[int]:
    """Ranks of the world that are not there; of very many the first, as a wrong size must not fill the memory."""
    return [number for number in range(min(world, max(present, default=0) + _TOLD_ABSENT)) if number not in present]


def ranks_text(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 4-7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def one_gpu(lanes: Sequence[RankLane]) -> list[str]:
    """Which GPUs the ranks ran on, where it was not one kind."""
    owners: dict[str, list[int]] = {}
    for lane in lanes:
        if lane.device is not None:
            owners.setdefault(lane.device.layers.gpu or "not named", []).append(lane.number)
    if len(owners) < 2:
        return []
    return ["the ranks ran on different GPUs: " + "; ".join(f"{gpu}: {ranks_text(own)}" for gpu, own in owners.items())]
