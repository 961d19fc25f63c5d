"""Time of a replay: steps take the time that they take; pauses in which nothing runs can be passed over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...kernels.collectives import Collectives


class Clock(Protocol):
    """Seconds from some beginning."""

    def now(self) -> float:
        """Never goes back."""
        ...

    def shared(self) -> float:
        """The same on all ranks of a group: what decides who runs next."""
        ...

    def pass_until(self, moment: float) -> None:
        """Come to that moment; at once where it is over."""
        ...


class WallClock:
    """Real time, from when it is first asked: what is made before a replay begins is nobody's wait.

    Args:
        real_pauses: wait where nothing runs; else such time is counted and not waited for.
        host: of a group whose ranks replay together: rank 0's time decides. Telling it counts as time.
    """

    def __init__(self, *, real_pauses: bool = False, host: Collectives | None = None) -> None:
        self._real, self._passed, self._host = real_pauses, 0.0, host
        self._start: float | None = None

    def now(self) -> float:
        """Seconds since it was first asked, those passed over counted."""
        if self._start is None:
            self._start = time.perf_counter()
        return time.perf_counter() - self._start + self._passed

    def shared(self) -> float:
        """See :class:`Clock`.

        Raises:
            CollectiveError: a rank did not come within the group's limit; it is named.
        """
        mine = self.now()
        if self._host is None:
            return mine
        import torch

        return float(self._host.all_gather(torch.tensor([mine], dtype=torch.float64), 0)[0])

    def pass_until(self, moment: float) -> None:
        """See :class:`Clock`."""
        rest = moment - self.now()
        if rest <= 0:
            return
        if self._real:
            time.sleep(rest)
        else:
            self._passed += rest
