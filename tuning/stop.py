"""When a run ends before its time: a signal, or a budget of seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from time import monotonic


class Stop:
    """Set by SIGINT or SIGTERM, or by the clock: the running trial ends, then the search.

    Args:
        budget_s: seconds from now; None has no end.
    """

    def __init__(self, budget_s: float | None = None) -> None:
        self.signalled = False
        self._deadline = None if budget_s is None else monotonic() + budget_s

    @property
    def late(self) -> bool:
        """The budget is spent."""
        return self._deadline is not None and monotonic() >= self._deadline

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.signalled or self.late

    @property
    def word(self) -> str:
        """Why it stopped: ``interrupted`` or ``budget``."""
        return "interrupted" if self.signalled else "budget"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while inside; the second Ctrl-C ends at once."""
        if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._ask) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)

    def _ask(self, number: int, _frame: object) -> None:
        if self.signalled and number == signal.SIGINT:  # twice: now
            raise KeyboardInterrupt
        self.signalled = True
