"""A rank on a GPU that is killed, or comes too late: rank 1, at its fifth launch."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from k3lab.tuning.ranks.gpu import GpuPlayer

LATE_S = 12.0


class _Played:
    def __init__(self, played: Any, act: Any) -> None:
        self._played, self._act, self._launches = played, act, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._played, name)

    def launch(self, which: int) -> None:
        self._launches += 1
        if self._launches == 5:
            self._act()
        self._played.launch(which)


class Killed(GpuPlayer):
    """By the system."""

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def play(self, case: Any, inputs: Any) -> Any:
        played = super().play(case, inputs)
        return _Played(played, self.act) if self.group.rank == 1 else played


class Late(Killed):
    """By more than the limit."""

    def act(self) -> None:
        time.sleep(LATE_S)
