"""Results that show themselves: a table and plots in a notebook, plain text elsewhere."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Plot = Callable[[], "Figure"]


class Shown:
    """A result: ``data`` as JSON would hold it, a table of it, and figures, drawn when they are looked at."""

    def __init__(
        self,
        title: str,
        data: Mapping[str, Any],
        rows: Sequence[tuple[str, Any]],
        figures: Mapping[str, Plot] | None = None,
        drawing: str = "",
    ) -> None:
        self.title = title
        self.data = data
        self.rows = list(rows)
        self._figures = dict(figures or {})
        self.drawing = drawing
        """A picture as SVG, or empty."""

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def __repr__(self) -> str:
        width = max((len(name) for name, _ in self.rows), default=0)
        return "\n".join([self.title, *(f"  {name:<{width}}  {value}" for name, value in self.rows)])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td style='text-align:left'>{html.escape(str(value))}</td></tr>"
            for name, value in self.rows
        )
        return f"<b>{html.escape(self.title)}</b><table>{cells}</table>{self.drawing}"

    def _ipython_display_(self) -> None:
        """In a notebook: the table, then the first figure."""
        from IPython.display import display

        display({"text/html": self._repr_html_(), "text/plain": repr(self)}, raw=True)
        if self._figures:
            display(self.figure)

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures, by name."""
        return {name: draw() for name, draw in self._figures.items()}

    @property
    def figure(self) -> Figure:
        """The first figure.

        Raises:
            InputError: the result has none.
        """
        from ..kernels.errors import InputError

        for draw in self._figures.values():
            return draw()
        raise InputError(f"{self.title} has no figure")


class Live:
    """Progress of a search in a notebook: one line that is written again with each trial."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": "starting"}, raw=True, display_id=True)
        self._total = self._ended = self._failed = 0
        self._title = ""

    def _show(self, news: str) -> None:
        done = round(24 * self._ended / max(self._total, 1))
        failed = f", {self._failed} failed" if self._failed else ""
        text = f"{self._title}  [{'#' * done}{'.' * (24 - done)}] {self._ended} of {self._total}{failed}  {news}"
        self._handle.update({"text/plain": text}, raw=True)

    def begin(self, title: str, trials: Sequence[Any], total: int) -> None:
        """See :class:`k3lab.tuning.progress.Progress`."""
        self._title, self._total = title, total
        self._ended = sum(trial.finished for trial in trials)
        self._failed = sum(trial.finished and not trial.ok for trial in trials)
        self._show("")

    def trial(self, trial: Any, best: Any) -> None:
        """See :class:`k3lab.tuning.progress.Progress`."""
        self._ended += 1
        self._failed += not trial.ok
        self._show(f"best {best.value:.2f} us (trial {best.number})" if best else "")

    def message(self, text: str) -> None:
        """See :class:`k3lab.tuning.progress.Progress`."""
        self._show(text)

    def end(self) -> None:
        """See :class:`k3lab.tuning.progress.Progress`."""


def live() -> Live | None:
    """A :class:`Live` in a notebook, None elsewhere."""
    import sys

    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return Live() if getattr(shell, "kernel", None) is not None else None  # a terminal's shell has no page to write on
