"""What the trace commands share in their tables: times, verdicts, lists of lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BUDGETS = "gb300-tp16, h200-tp16, h200-tp8, or a JSON file of yours (k3lab trace budget makes one)."
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--names",
        help="Names table of another engine: vllm_latency_specialized, vllm_stock, or a JSON file of yours; repeatable."
        " Default: both.",
    ),
]
"""The ``--names`` option of commands that tell families."""
Budget = Annotated[str, typer.Option("--budget", help=_BUDGETS)]
"""The ``--budget`` option of a command that needs one; kept by a test to the names that there are."""
MaybeBudget = Annotated[str | None, typer.Option("--budget", help=_BUDGETS)]
Gpu = Annotated[str | None, typer.Option("--gpu", help="The GPU, where the trace does not name it, as GB300.")]
Tp = Annotated[int | None, typer.Option("--tp", help="Tensor-parallel size of the run. Default: the budget's.")]
Rows = Annotated[
    int | None, typer.Option("--rows", help="Rows (tokens) of a decode step, over all requests. Default: the budget's.")
]
Layers = Annotated[int | None, typer.Option("--layers", help="Layers of a step, if known (K3 has 93).")]
LayersFrom = Annotated[
    Path | None,
    typer.Option(
        "--layers-from", help="Another trace of the model, eager with a range around each layer: its layers are these."
    ),
]
Plan = Annotated[
    Path | None,
    typer.Option("--plan", help="JSON {kernel name: family}, or what k3lab decode plan --json prints."),
]

NARROW = 140
"""Columns below which a table keeps only what the question needs."""
COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow", "not judged": "dim"}
_MAX_LINES = 16


def titled(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table with its columns: words, which fold, then figures."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right")
    return table


def us(ns: int | None) -> str:
    """Nanoseconds as microseconds with one decimal; a dash where there is no figure."""
    return "-" if ns is None else f"{round(ns / 1000, 1) + 0.0:.1f}"  # + 0.0: no minus before a zero


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def made_up(verdict: str, synthetic: bool) -> str:
    """What a pass of a synthetic trace has after it."""
    return " (synthetic)" if synthetic and verdict == "pass" else ""


def word(verdict: str, synthetic: bool) -> str:
    """The verdict in its colour; a pass of a synthetic trace does not look like one of a real run."""
    if tail := made_up(verdict, synthetic):
        return f"[dim]{verdict}{tail}[/]"
    return f"[{COLOURS[verdict]}]{verdict}[/]"


def line(console: Console, text: str, indent: str = "", style: str | None = None) -> None:
    """A plain line: wrapped under itself on a terminal, whole in a pipe, so that ``grep`` finds it.

    ``style`` colours its first word.
    """
    from rich.text import Text

    if console.is_terminal:
        text = textwrap.fill(text, console.width, initial_indent=indent, subsequent_indent=f"{indent}  ",
                             break_long_words=False, break_on_hyphens=False)  # fmt: skip
    else:
        text = indent + text
    told = Text(text)
    if style:
        told.stylize(style, 0, len(text.split(" ", 1)[0]))
    console.print(told, soft_wrap=True)


def lines(console: Console, title: str, texts: list[str], most: int = _MAX_LINES) -> None:
    """A title and plain lines under it, the first of many; nothing where there are none."""
    if texts:
        console.print(f"[bold]{title}[/]")
        for text in texts[:most]:
            line(console, text, "  ")
        if len(texts) > most:
            console.print(f"  ... {len(texts) - most} more (--json has all)", markup=False)
