"""Graph launches whose kernels are not in the file."""

from __future__ import annotations

from collections.abc import Iterable

EDGES = 0.1
"""The edges of a capture may lose the kernels of one launch or step in ten."""


def lost_launches(launches: Iterable[tuple[int, bool]]) -> tuple[int, int, int]:
    """Graph launches, given as (start, whether it owns work in the file).

    Returns:
        How many there are; how many own nothing though launches before and after them do; how many at the edges.
    """
    owning = [owns for _, owns in sorted(launches)]
    if True not in owning:
        return len(owning), 0, len(owning)
    first, last = owning.index(True), len(owning) - 1 - owning[::-1].index(True)
    inside = owning[first : last + 1].count(False)
    return len(owning), inside, owning.count(False) - inside


def told(launches: Iterable[tuple[int, bool]], cure: str) -> tuple[list[str], list[str]]:
    """Plain lines on lost launches: those that forbid a pass, and notes; ``cure`` is what to do about them."""
    count, inside, edges = lost_launches(launches)
    line = f"{inside + edges} of {count} graph launches have no kernels in the file"
    if inside or edges > EDGES * count:
        return [f"{line}; {cure}"], []
    return [], [f"{line}: cut off by the capture"] if edges else []
