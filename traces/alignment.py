"""The longest common subsequence of two launch orders, for sequences that differ in places."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MOST_DIFFERENCES = 2000
"""Insertions and deletions looked for: work and memory grow with their square (some 100 MB here)."""


def common(one: Sequence[Hashable], other: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """Pairs of places of a longest common subsequence, ascending; None where the sequences differ in too much.

    E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986): on each diagonal the
    furthest place that so many insertions and deletions reach.
    """
    ends = [len(one), len(other)]
    furthest = {1: 0}
    reached: list[dict[int, int]] = []
    for differences in range(min(sum(ends), MOST_DIFFERENCES) + 1):
        reached.append(dict(furthest))
        for diagonal in range(-differences, differences + 1, 2):
            down = diagonal == -differences or (
                diagonal != differences and furthest[diagonal - 1] < furthest[diagonal + 1]
            )
            place = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            while place < ends[0] and place - diagonal < ends[1] and one[place] == other[place - diagonal]:
                place += 1
            furthest[diagonal] = place
            if place >= ends[0] and place - diagonal >= ends[1]:
                return _walked_back(reached, ends)
    return None


def _walked_back(reached: Sequence[dict[int, int]], ends: Sequence[int]) -> list[tuple[int, int]]:
    x, y = ends
    found: list[tuple[int, int]] = []
    for differences in range(len(reached) - 1, -1, -1):
        before, diagonal = reached[differences], x - y
        down = diagonal == -differences or (diagonal != differences and before[diagonal - 1] < before[diagonal + 1])
        came = diagonal + 1 if down else diagonal - 1
        start_x = before[came] if differences else 0
        start_y = start_x - came if differences else 0
        least_x, least_y = (start_x, start_y + 1) if down else (start_x + 1, start_y)
        if not differences:
            least_x = least_y = 0
        while x > least_x and y > least_y:
            x, y = x - 1, y - 1
            found.append((x, y))
        x, y = start_x, start_y
    return found[::-1]
