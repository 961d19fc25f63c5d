"""``k3lab trace diff``: what changed between two traces, class by class and kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import NARROW, Layers, Names, Plan, count, line, lines, titled, us

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[tuple[str, ...], dict[str, Any]]
"""The first cells of a table's row, and the change it tells."""

_COMPARED = ("changed", "no change beyond the spread")


_PRINTED_NS = 50
"""What prints as a change of 0.1 us or more."""


def _change(item: dict[str, Any]) -> tuple[str, str, str, str]:
    beyond = {True: "yes", False: "no", None: "-"}[item["beyond_the_spread"]]
    delta = us(item["delta_ns"])
    return us(item["a_ns"]), us(item["b_ns"]), delta if delta[0] in "-0" else f"+{delta}", beyond


def _changed(item: dict[str, Any]) -> bool:
    """Whether a change is worth a line: beyond the spread, or of a spread that is not known."""
    known = item["beyond_the_spread"]
    return bool(known) or (known is None and (item["delta_ns"] is None or abs(item["delta_ns"]) >= _PRINTED_NS))


def _table(title: str, first: tuple[str, ...], rows: Sequence[Row]) -> Any:
    from rich.markup import escape

    table = titled(title, first, ("a us", "b us", "change us", "beyond?"))
    for cells, item in rows:
        table.add_row(*map(escape, cells), *_change(item))
    return table


def _kernel_rows(kernels: list[dict[str, Any]], wide: bool) -> list[Row]:
    from ..traces.names import short_name

    rows: list[Row] = []
    for kernel in kernels:
        names = [short_name(name, 40) for name in (kernel["a"], kernel["b"]) if name]
        name = " -> ".join(dict.fromkeys(names)) if kernel["state"] in ("renamed", "replaced") else names[-1]
        cells = (name, kernel["family"] or "?", kernel["state"]) if wide else (name, kernel["state"])
        rows.append((cells, kernel["increment"]))
    return rows


def _class(console: Console, found: dict[str, Any]) -> None:
    """The times of a class; of its families and kernels those that changed, since the answer would drown in the rest."""
    name = found["a"] if found["a"] == found["b"] else f"{found['a']} and {found['b']}"
    kind = f" ({found['kind']})" if found["kind"] else ""
    before, after = found["layers"]
    many = count(before, "layer") if before == after else f"{before} and {after} layers"
    whole: list[Row] = [((word,), found[key]) for word, key in (
        ("completion period", "completion_period"), ("idle", "idle"),
        ("overlap on one stream", "overlap_same_stream"), ("overlap across streams", "overlap_cross_stream"))]  # fmt: skip
    families = [item for item in found["families"] if _changed(item["increment"])]
    whole += [((f"family {item['family']}",), item["increment"]) for item in families]
    console.print(_table(f"Class {name}{kind}, {many}: a layer", ("time",), whole))
    kernels = [kernel for kernel in found["kernels"] if kernel["state"] != "same" or _changed(kernel["increment"])]
    if kernels:
        wide = console.width >= NARROW
        first = ("kernel", "family", "state") if wide else ("kernel", "state")
        console.print(_table(f"Kernels of class {name} that changed", first, _kernel_rows(kernels, wide)))
    if rest := len(found["kernels"]) - len(kernels):
        line(console, f"class {name}: {count(rest, 'kernel')} without a change beyond the spread (--json has all)")


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the verdict and its reasons, the step, then each class with what changed in it, then notes."""
    line(console, f"{data['verdict']}: {data['a']['file']} (a) against {data['b']['file']} (b)")
    lines(console, "Reasons", data["reasons"])
    for device in data["devices"]:
        before, after = device["kernels_a_step"]
        many = count(before, "kernel") if before == after else f"{before} and {after} kernels"
        steps: list[Row] = [((f"step of {many}",), device["step"])]
        console.print(_table(f"Device {device['device']}", ("time",), steps))
        for found in device["classes"]:
            _class(console, found)
    line(console, f"Rule: {data['rule']} (beyond? yes)")
    lines(console, "Notes", data["notes"])


def diff(
    a: Annotated[Path, typer.Argument(help="The trace before.")],
    b: Annotated[Path, typer.Argument(help="The trace after.")],
    layers: Layers = None,
    plan: Plan = None,
    names: Names = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compare although the GPU, the ranks, the rows or the layers differ.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two traces of like layers: exit 0 where they were compared, 1 where they cannot be."""
    from ..traces.diff import diff_json, diff_traces

    data = diff_json(diff_traces(a, b, layers=layers, plan=plan, names=names, force=force))
    emit(data, as_json, render)
    if data["verdict"] not in _COMPARED:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add ``diff`` to the group of ``k3lab trace``."""
    app.command("diff")(diff)
