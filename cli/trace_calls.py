"""``k3lab trace calls``: kernels per step and per layer by count, where a file tells no order."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import Names, Plan, line, lines, titled

if TYPE_CHECKING:
    from rich.console import Console

_WHOLE = 120
_SHOWN = 40


def _rate(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def render_calls(console: Console, data: dict[str, Any]) -> None:
    """Print the totals, one row a kernel, and what the counts do not tell."""
    from rich.markup import escape

    from ..traces.names import short_name

    line(console, f"{data['file']}: {data['calls']} kernel calls, {_rate(data['per_step'])} a step and "
                  f"{_rate(data['per_layer'])} a layer on {data['steps']} steps of {data['layers']} layers")  # fmt: skip
    line(console, f"kernels that come a whole number of times a layer: {data['per_layer_of_kernels_in_every_layer']} a layer; "
                  f"the others: {_rate(data['per_step_of_the_others'])} a step")  # fmt: skip
    table = titled("Kernels", ("kernel", "family"), ("calls", "a step", "a layer"))
    shown = data["kernels"][:_SHOWN]
    times = Counter(short_name(row["kernel"], 60) for row in shown)
    for row in shown:
        name = short_name(row["kernel"], 60)
        if times[name] > 1:  # templates: only the arguments tell them apart
            name = row["kernel"] if len(row["kernel"]) <= _WHOLE else f"{row['kernel'][: _WHOLE - 3]}..."
        table.add_row(escape(name), row["family"] or "?", str(row["calls"]),
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
        names: Names = None,
        as_json: Json = False,
    ) -> None:
        """Count kernels per step and per layer by name; you say how many steps and layers there are."""
        from ..traces.calls import count_calls
        from ..traces.families import gather_names

        known = gather_names(plan, names)
        emit(count_calls(file, steps=steps, layers=layers, names=known).to_json(), as_json, render_calls)
