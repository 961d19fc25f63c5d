"""``k3lab trace``: what a decode trace shows, layer by layer, and whether it keeps a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import trace_calls, trace_capture, trace_diff, trace_figure, trace_kernels, trace_ranks, trace_synthesize
from .output import Json, emit
from .trace_families import render_families
from .trace_words import Names, lines, us, word

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(help="Traces of decode steps: layers, times, budgets.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Argument(help="torch.profiler JSON; Nsight Systems export (sqlite, parquetdir), report or cuda_gpu_trace."),
]
Layers = Annotated[int | None, typer.Option("--layers", help="Layers of a step, if known.")]
Plan = Annotated[Path | None, typer.Option("--plan", help="JSON that maps kernel names to families.")]
StepUs = Annotated[
    float | None, typer.Option("--step-us", min=0.001, max=1e9, help="A step's time without a profiler, to compare.")
]


def _ns(us: float | None) -> int | None:
    return None if us is None else max(1, round(us * 1000))


def _classes(data: dict[str, Any], judged: bool, synthetic: bool) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Layer classes", title_justify="left")
    for column in ("class", "kind", "layers", "kernels", "completion period us", "most time in"):
        table.add_column(column, overflow="fold")
    if judged:
        table.add_column("verdict")
    for row in data["classes"]:
        top = sorted(row["sequence"], key=lambda item: -item["increment_ns"])[:3]
        parts = ", ".join(f"{item['family'] or _short(item['kernel'])} {us(item['increment_ns'])}" for item in top)
        cells = [row["class"], row["kind"] or "?", str(len(row["layers"])), str(row["kernels"]),
                 us(row["completion_period_ns"]), escape(parts)]  # fmt: skip
        table.add_row(*cells, *([word(row["verdict"], synthetic)] if judged else []))
    return table


def _short(name: str) -> str:
    from ..traces.names import short_name

    return short_name(name, 32)


def _layers(data: dict[str, Any], judged: bool, synthetic: bool) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Layers (us; one typical step each)", title_justify="left")
    for column in ("layer", "class", "kernels", "completion period", "p10", "p90", "wall", "busy", "sum", "overlap",
                   "gap", "start period"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("layer", "class") else "right")
    if judged:
        table.add_column("verdict")
    for row in data["layers"]:
        step = row["typical_step"]
        overlap = step["overlap_same_stream_ns"] + step["overlap_cross_stream_ns"]
        times = (row["completion_period_ns"], row["p10_ns"], row["p90_ns"], step["wall_ns"], step["busy_ns"],
                 step["sum_ns"], overlap, step["gap_ns"], step["start_period_ns"])  # fmt: skip
        cells = [escape(row["name"]), row["class"], str(row["kernels"]), *map(us, times)]
        table.add_row(*cells, *([word(row["verdict"], synthetic)] if judged else []))
    return table


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the verdict, then classes, layers, findings and notes."""
    judged, synthetic = data["budget"] is not None, data["synthetic"]
    if judged:
        first = f": {data['reasons'][0]}" if data["reasons"] else ""
        console.print(
            f"{word(data['verdict'], synthetic)} {data['file']} against {data['budget']['name']}"
            + (f", family {data['family']}" if data["family"] else ""),
            highlight=False,
            end="",
        )
        console.print(first, markup=False)
    else:
        console.print(f"{data['file']}: {data['format']}, {data['kernels']} kernels", markup=False)
    for device in data["devices"]:
        steps, split = device["steps"], device["split"]
        about = f"device {device['device']} ({device['gpu'] or 'GPU not named'}): {steps['used']} of {steps['found']} "
        about += f"steps by {steps['source']}"
        if split["method"]:
            about += f"; {len(device['layers'])} layers by {split['method']}, {split['prefix']} kernels before"
            about += f" and {split['suffix']} after them"
            if (macro := split["macro_period"]) and macro["layers"] > 1:
                about += f"; the classes {' '.join(macro['classes'])} ({macro['kernels']} kernels) come {macro['times']} times"
        console.print(about, markup=False)
        if device["layers"]:
            console.print(_classes(device, judged, synthetic))
            console.print(_layers(device, judged, synthetic))
            render_families(console, device, judged, synthetic)
        lines(console, "Findings", [item["text"] for item in device["findings"]])
    lines(console, "Reasons", data["reasons"])
    lines(console, "Notes", data["notes"])


@app.command("check")
def check(
    file: File,
    budget: Annotated[str, typer.Option("--budget", help="Name of a budget, or its JSON file.")] = "gb300-tp16",
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU, where the trace does not name it.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel size of the run.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Tokens in a step.")] = None,
    layers: Layers = None,
    plan: Plan = None,
    family: Annotated[str | None, typer.Option("--family", help="Hold one family against its share.")] = None,
    names: Names = None,
    step_us: StepUs = None,
    as_json: Json = False,
) -> None:
    """Hold the layers of a trace against a budget, or one family against its share of it: exit 0 only for a pass."""
    from ..traces import check_trace
    from ..traces.collector import undisturbed

    with undisturbed():
        report = check_trace(
            file,
            budget,
            gpu=gpu,
            tp=tp,
            rows=rows,
            layers=layers,
            plan=plan,
            step_ns=_ns(step_us),
            family=family,
            names=names,
        )
        emit(report.to_json(), as_json, render)
    if report.verdict != "pass":
        raise typer.Exit(1)


@app.command("show")
def show(
    file: File,
    layers: Layers = None,
    plan: Plan = None,
    names: Names = None,
    step_us: StepUs = None,
    as_json: Json = False,
) -> None:
    """Show steps, layers and their times, without a budget."""
    from ..traces import inspect_trace

    emit(inspect_trace(file, layers=layers, plan=plan, step_ns=_ns(step_us), names=names).to_json(), as_json, render)


for _module in (trace_ranks, trace_diff, trace_capture, trace_figure, trace_synthesize, trace_calls, trace_kernels):
    _module.register(app)
