"""When a run ends before its time: a signal, or a budget of seconds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from types import FrameType
from typing import Any


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends what runs as Ctrl-C does, by ``KeyboardInterrupt``: files that are written stay whole.

    The ``k3lab`` process, which sees to that itself, keeps its own handler.
    """
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
        yield
        return
    with _handled(signal.default_int_handler, signal.SIGTERM):
        yield


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
        with _handled(self._ask, signal.SIGINT, signal.SIGTERM):
            yield

    def _ask(self, number: int, _frame: object) -> None:
        if self.signalled and number == signal.SIGINT:  # twice: now
            raise KeyboardInterrupt
        self.signalled = True
