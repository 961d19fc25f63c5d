"""What the trace commands share in their tables: times, verdicts, lists of lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

Names = Annotated[
    list[str] | None,
    typer.Option("--names", help="Names table of another engine, or its JSON file; repeatable. Default: all known."),
]
"""The ``--names`` option of commands that tell families."""

_COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow", "not judged": "dim"}
_MAX_LINES = 16


def us(ns: int | None) -> str:
    """Nanoseconds as microseconds with one decimal; a dash where there is no figure."""
    return "-" if ns is None else f"{round(ns / 1000, 1) + 0.0:.1f}"  # + 0.0: no minus before a zero


def word(verdict: str, synthetic: bool) -> str:
    """The verdict in its colour; a pass of a synthetic trace does not look like one of a real run."""
    if synthetic and verdict == "pass":
        return "[dim]pass (synthetic)[/]"
    return f"[{_COLOURS[verdict]}]{verdict}[/]"


def lines(console: Console, title: str, texts: list[str]) -> None:
    """A title and plain lines under it, the first of many; nothing where there are none."""
    if texts:
        console.print(f"[bold]{title}[/]")
        for line in texts[:_MAX_LINES]:
            console.print(f"  {line}", markup=False)
        if len(texts) > _MAX_LINES:
            console.print(f"  ... {len(texts) - _MAX_LINES} more (--json has all)", markup=False)
