"""Who watches a search: a live bar on a terminal, plain lines elsewhere, nothing for ``--json``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from .study import TrialRecord, best_of

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

EVERY = 10
"""Trials between two plain lines without news."""


class Progress(Protocol):
    """Watches a search."""

    def begin(self, title: str, trials: Sequence[TrialRecord], total: int) -> None:
        """The search starts with the trials of earlier runs, and shall hold ``total`` in the end."""

    def trial(self, trial: TrialRecord, best: TrialRecord | None) -> None:
        """A trial ended."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def end(self) -> None:
        """The search is over."""


class Silent:
    """Shows nothing."""

    def begin(self, title: str, trials: Sequence[TrialRecord], total: int) -> None:
        """See :class:`Progress`."""

    def trial(self, trial: TrialRecord, best: TrialRecord | None) -> None:
        """See :class:`Progress`."""

    def message(self, text: str) -> None:
        """See :class:`Progress`."""

    def end(self) -> None:
        """See :class:`Progress`."""


def _best(best: TrialRecord | None) -> str:
    return f"best {best.value:.2f} us (trial {best.number})" if best else "no config ended ok yet"


class Lines:
    """Plain lines: the start, each new best, each failure, and every tenth trial."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = 0
        self._best: int | None = None

    def begin(self, title: str, trials: Sequence[TrialRecord], total: int) -> None:
        """See :class:`Progress`."""
        self._total = total
        best = best_of(trials)
        self._best = best.number if best else None
        self.message(f"tuning {title}: {sum(trial.finished for trial in trials)} of {total} trials are there")

    def trial(self, trial: TrialRecord, best: TrialRecord | None) -> None:
        """See :class:`Progress`."""
        ended = trial.number + 1
        news = best is not None and best.number != self._best
        self._best = best.number if best else None
        if not trial.ok and trial.outcome:
            self.message(f"trial {trial.number}: {trial.outcome.status}: {trial.outcome.reason}")
        if news or ended % EVERY == 0 or ended == self._total:
            self.message(f"{ended}/{self._total}: {_best(best)}")

    def message(self, text: str) -> None:
        """See :class:`Progress`."""
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """See :class:`Progress`."""


class Bar:
    """A live bar with the best so far and the number of failures."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._failed = 0

    def begin(self, title: str, trials: Sequence[TrialRecord], total: int) -> None:
        """See :class:`Progress`."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._failed = sum(trial.finished and not trial.ok for trial in trials)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(
            *columns, TextColumn("{task.fields[news]}"), console=Console(stderr=True, highlight=False)
        )
        self._bar.start()
        self._bar.console.print(f"tuning {title}", markup=False)
        ended = sum(trial.finished for trial in trials)
        self._task = self._bar.add_task("trials", total=total, completed=ended, news=self._news(best_of(trials)))

    def _news(self, best: TrialRecord | None) -> str:
        return _best(best) + (f", {self._failed} failed" if self._failed else "")

    def trial(self, trial: TrialRecord, best: TrialRecord | None) -> None:
        """See :class:`Progress`."""
        assert self._bar is not None
        self._failed += not trial.ok
        self._bar.update(self._task, advance=1, news=self._news(best))

    def message(self, text: str) -> None:
        """See :class:`Progress`."""
        assert self._bar is not None
        self._bar.console.print(text, markup=False)

    def end(self) -> None:
        """See :class:`Progress`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def for_terminal(as_json: bool) -> Progress:
    """What suits standard error here."""
    if as_json:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()
