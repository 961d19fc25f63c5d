"""``k3lab trace calls``: kernels per step and per layer by count, where a file tells no order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import Plan, lines

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 40


def _rate(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def render_calls(console: Console, data: dict[str, Any]) -> None:
    """Print the totals, one row a kernel, and what the counts do not tell."""
    from rich.markup import escape
    from rich.table import Table

    console.print(
        f"{data['file']}: {data['calls']} kernel calls, {_rate(data['per_step'])} a step and {_rate(data['per_layer'])} a "
        f"layer on {data['steps']} steps of {data['layers']} layers",
        markup=False,
    )
    console.print(
        f"{data['per_layer_of_kernels_in_every_layer']} a layer are of kernels that come a whole number of times a layer; "
        f"the others come {_rate(data['per_step_of_the_others'])} times a step",
        markup=False,
    )
    table = Table(title="Kernels", title_justify="left")
    for column in ("kernel", "family"):
        table.add_column(column, overflow="fold")
    for column in ("calls", "a step", "a layer"):
        table.add_column(column, justify="right")
    from ..traces.names import short_name

    for row in data["kernels"][:_SHOWN]:
        table.add_row(escape(short_name(row["kernel"], 60)), row["family"] or "", str(row["calls"]),
                      _rate(row["per_step"]), _rate(row["per_layer"]))  # fmt: skip
    console.print(table)
    if len(data["kernels"]) > _SHOWN:
        console.print(f"  ... {len(data['kernels']) - _SHOWN} more kernels (--json has all)", markup=False)
    lines(console, "Notes", data["notes"])


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("calls")
    def calls(
        file: Annotated[Path, typer.Argument(help="cuda_gpu_kern_sum CSV of nsys stats, or any trace.")],
        steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps that were recorded.")],
        layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of a step.")],
        plan: Plan = None,
        as_json: Json = False,
    ) -> None:
        """Count kernels per step and per layer by name; you say how many steps and layers there are."""
        from ..traces.calls import count_calls
        from ..traces.families import read_plan

        families = read_plan(plan) if plan is not None else None
        emit(count_calls(file, steps=steps, layers=layers, plan=families).to_json(), as_json, render_calls)
