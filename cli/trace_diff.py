"""``k3lab trace diff``: what changed between two traces, class by class and kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import Names, lines, us

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[tuple[str, ...], dict[str, Any]]
"""The first cells of a table's row, and the change it tells."""

_COMPARED = ("changed", "no change beyond the spread")


def _change(item: dict[str, Any]) -> tuple[str, str, str, str]:
    beyond = {True: "yes", False: "no", None: "-"}[item["beyond_the_spread"]]
    return us(item["a_ns"]), us(item["b_ns"]), us(item["delta_ns"]), beyond


def _table(title: str, first: tuple[str, ...], rows: Sequence[Row]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in first:
        table.add_column(column, overflow="fold")
    for column in ("a us", "b us", "change us", "beyond the spread"):
        table.add_column(column, justify="right")
    for cells, item in rows:
        table.add_row(*map(escape, cells), *_change(item))
    return table


def _kernel_rows(found: dict[str, Any]) -> list[Row]:
    from ..traces.names import short_name

    rows: list[Row] = []
    for kernel in found["kernels"]:
        names = [short_name(name, 40) for name in (kernel["a"], kernel["b"]) if name]
        name = " -> ".join(dict.fromkeys(names)) if kernel["state"] in ("renamed", "replaced") else names[-1]
        rows.append(((name, kernel["family"] or "?", kernel["state"]), kernel["increment"]))
    return rows


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the verdict and its reasons, then the classes, their families and kernels, then notes."""
    console.print(f"{data['verdict']}: {data['a']['file']} (a) against {data['b']['file']} (b)", markup=False)
    lines(console, "Reasons", data["reasons"])
    for device in data["devices"]:
        for found in device["classes"]:
            name = found["a"] if found["a"] == found["b"] else f"{found['a']} and {found['b']}"
            kind = f" ({found['kind']})" if found["kind"] else ""
            counts = found["layers"]
            many = f"{counts[0]} layers" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]} layers"
            whole: list[Row] = [((word,), found[key]) for word, key in (
                ("completion period", "completion_period"), ("idle", "idle"),
                ("overlap on one stream", "overlap_same_stream"), ("overlap across streams", "overlap_cross_stream"))]  # fmt: skip
            whole += [((f"family {item['family']}",), item["increment"]) for item in found["families"]]
            console.print(_table(f"Class {name}{kind}, {many}: a layer", ("time",), whole))
            console.print(_table("Kernels of it", ("kernel", "family", "state"), _kernel_rows(found)))
        steps: list[Row] = [
            ((f"step of {device['kernels_a_step'][0]} and {device['kernels_a_step'][1]} kernels",), device["step"])
        ]
        console.print(_table(f"Device {device['device']}", ("time",), steps))
    console.print(f"Rule: {data['rule']}", markup=False)
    lines(console, "Notes", data["notes"])


def diff(
    a: Annotated[Path, typer.Argument(help="The trace before.")],
    b: Annotated[Path, typer.Argument(help="The trace after.")],
    layers: Annotated[int | None, typer.Option("--layers", help="Layers of a step, if known.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="JSON that maps kernel names to families.")] = None,
    names: Names = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compare although the GPU, the ranks, the rows or the layers differ.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two traces of like layers: exit 0 where they were compared, 1 where they cannot be."""
    from ..traces.diff import diff_json, diff_traces

    data = diff_json(diff_traces(a, b, layers=layers, plan=plan, tables=names, force=force))
    emit(data, as_json, render)
    if data["verdict"] not in _COMPARED:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add ``diff`` to the group of ``k3lab trace``."""
    app.command("diff")(diff)
