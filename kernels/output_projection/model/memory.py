"""Memory whose stores arrive when they like: in order at one address from one writer, in any order otherwise.

A store that no one looks for has no effect, so stores are delivered when a read chooses to have seen them: that
gives the same behaviours as a step for each delivery, with far fewer states.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

Pending = tuple[tuple[Any, int], ...]
"""(value, launch that stored it), oldest first."""
Cell = tuple[Any, tuple[tuple[int, Pending], ...]]
"""(value in memory, (writing rank, what it has under way) by rank)."""


def empty(value: Any) -> Cell:
    """A cell that holds a value, with nothing under way."""
    return value, ()


def stored(cell: Cell, writer: int, value: Any, launch: int) -> Cell:
    """One more store under way."""
    now, queues = cell
    rest = dict(queues)
    rest[writer] = (*rest.get(writer, ()), (value, launch))
    return now, tuple(sorted(rest.items()))


def _after(value: Any, queues: list[tuple[int, Pending]]) -> Cell:
    return value, tuple((writer, queue) for writer, queue in queues if queue)


@lru_cache(maxsize=1 << 16)
def outcomes(cell: Cell) -> list[tuple[Any, Cell]]:
    """(value a read may see, memory after it): what is there, or any store under way as the last one delivered."""
    now, queues = cell
    found = [(now, cell)]
    for last, (_, queue) in enumerate(queues):
        for count in range(1, len(queue) + 1):
            # other writers' stores came before that one, or have not come yet
            before = [range(len(other) + 1) if i != last else (count,) for i, (_, other) in enumerate(queues)]
            for taken in itertools.product(*before):
                left = [(who, pending[n:]) for (who, pending), n in zip(queues, taken, strict=True)]
                found.append((queue[count - 1][0], _after(queue[count - 1][0], left)))
    return list(dict.fromkeys(found))


def flushed(cell: Cell, writer: int, launch: int) -> list[Cell]:
    """Memory once a writer's stores of a launch have been delivered, in every order with the others'."""
    queues = dict(cell[1])
    due = max((i for i, (_, when) in enumerate(queues.get(writer, ()), 1) if when == launch), default=0)
    if not due:
        return [cell]
    others = [who for who in queues if who != writer]
    found = []
    for taken in itertools.product(*(range(len(queues[who]) + 1) for who in others)):
        left = {writer: queues[writer][due:]}
        left |= {who: queues[who][n:] for who, n in zip(others, taken, strict=True)}
        found.append(_after(queues[writer][due - 1][0], sorted(left.items())))
    return found


def dropped(cell: Cell, writer: int) -> Cell:
    """Memory of which a writer died before its stores had left."""
    return _after(cell[0], [(who, queue) for who, queue in cell[1] if who != writer])
