"""Time of a replay: steps take the time that they take; pauses in which nothing runs can be passed over."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from some beginning."""

    def now(self) -> float:
        """Never goes back."""
        ...

    def pass_until(self, moment: float) -> None:
        """Come to that moment; at once where it is over."""
        ...


class WallClock:
    """Real time, from when it is first asked: what is made before a replay begins is nobody's wait.

    Args:
        real_pauses: wait where nothing runs; else such time is counted and not waited for.
    """

    def __init__(self, *, real_pauses: bool = False) -> None:
        self._real, self._passed = real_pauses, 0.0
        self._start: float | None = None

    def now(self) -> float:
        """Seconds since it was first asked, those passed over counted."""
        if self._start is None:
            self._start = time.perf_counter()
        return time.perf_counter() - self._start + self._passed

    def pass_until(self, moment: float) -> None:
        """See :class:`Clock`."""
        rest = moment - self.now()
        if rest <= 0:
            return
        if self._real:
            time.sleep(rest)
        else:
            self._passed += rest
