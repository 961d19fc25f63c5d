"""A machine that takes its time where a kernel may not count on haste: copies that land late, a warp that falls behind.

In the order in which :mod:`ptx_machine` takes steps most waits are over before they begin. Here what they are for happens:
each is needed, so a kernel without one of them has other bits, or does not end.
"""

from __future__ import annotations

import numpy as np

from .ptx_machine import Step
from .test_moe_tail_machine import TailMachine

PATIENCE = 4000
"""Instructions of others for which what is late is waited for; less, where nobody can go on without it."""


class Disorder(TailMachine):
    """Bulk copies land late; :attr:`laggard` stands still."""

    laggard: tuple[int, int] | None = None
    """(block among those that run side by side, warp) that stands still."""
    behind = ""
    """Behind which instruction; the first, if it has no name."""
    turn = 0

    def run(self, first: int, blocks: int) -> None:
        """See :meth:`Machine.run`."""
        self.under_way: list[tuple[int, tuple[int, int, int, np.ndarray]]] = []
        self.limit = 40_000  # polls for what never comes are many at once, and slow
        self.until, self.arrived = 0, np.zeros(blocks * self.block, dtype=bool)
        super().run(first, blocks)
        assert not self.under_way and self.until <= 0

    def execute(self, place: int, who: np.ndarray) -> None:
        """One instruction; then what is due."""
        super().execute(place, who)
        self.turn += 1
        if self.laggard is not None and not self.until and ".".join(self.steps[place].name).startswith(self.behind):
            late = self.late_ones()
            if (self.pc[late] == place + 1).all() and not self.stopped[late].any():
                self.stopped[late], self.until = True, self.turn + PATIENCE
        while self.under_way and self.under_way[0][0] <= self.turn:
            self.arrive()
        if self.until == self.turn:
            self.let_go()

    def late_ones(self) -> np.ndarray:
        """Which threads are the laggard's."""
        assert self.laggard is not None
        block, warp = self.laggard
        return (self.local == block) & (self.tid // 32 == warp)

    def let_go(self) -> None:
        """The laggard goes on."""
        self.stopped[self.late_ones()], self.until = False, -1

    def arrive(self) -> None:
        """The oldest copy lands."""
        _, what = self.under_way.pop(0)
        super().land(*what)
        self.wake()

    def land(self, block: int, to: int, bar: int, at: np.ndarray) -> None:
        """Not yet."""
        self.under_way.append((self.turn + PATIENCE, (block, to, bar, at)))

    def stirred(self) -> bool:
        """First the laggard, then the copies."""
        if self.until > 0:
            self.let_go()
        elif self.under_way:
            self.arrive()
        else:
            return False
        return True

    def do_barrier(self, step: Step, who: np.ndarray, place: int) -> None:
        """A cluster is waited for by threads that have said they are there."""
        if "cluster" in step.name and "arrive" in step.name:
            self.arrived[who] = True
        elif "cluster" in step.name:
            assert self.arrived[who].all(), "a thread waits for its cluster and never arrived"
        super().do_barrier(step, who, place)
