"""The heartbeat of a worker: a thread that says it is alive, also while a trial runs for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .shared_storage import is_lost

END_S = 30.0
"""How long the last beat may take."""


class Heart:
    """Beats until it is closed.

    Args:
        beat: says that the worker is alive; a lost database costs a beat.
        every_s: seconds between two.
    """

    def __init__(self, beat: Callable[[], None], every_s: float) -> None:
        self._beat, self._every_s = beat, every_s
        self._end = threading.Event()
        self.error: Exception | None = None
        """What ended it before its time."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            try:
                self._beat()
            except Exception as error:
                if not is_lost(error):
                    self.error = error
                    return

    def close(self) -> None:
        """End it."""
        self._end.set()
        self._thread.join(END_S)
