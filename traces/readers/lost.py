"""Graph launches whose kernels are not in the file."""

from __future__ import annotations

from collections.abc import Iterable

_EDGES = 0.1
"""The edges of a capture may lose the kernels of a launch or two in every ten."""


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


def told(launches: Iterable[tuple[int, bool]], cure: str) -> tuple[str, ...]:
    """A plain line on lost launches where they forbid a pass, else nothing; ``cure`` is what to do about it."""
    count, inside, edges = lost_launches(launches)
    if not inside and edges <= _EDGES * count:
        return ()
    return (f"{inside + edges} of {count} graph launches have no kernels in the file; {cure}",)
