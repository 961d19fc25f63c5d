"""``k3lab trace``: what a decode trace shows, layer by layer, and whether it keeps a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import (
    trace_budget,
    trace_calls,
    trace_capture,
    trace_diff,
    trace_figure,
    trace_kernels,
    trace_ranks,
    trace_synthesize,
)
from .output import Json, emit
from .trace_families import render_families
from .trace_layers import class_table, layer_table
from .trace_one import render_layer, with_layer
from .trace_words import (
    COLOURS,
    Budget,
    Gpu,
    Layers,
    LayersFrom,
    Names,
    Plan,
    Rows,
    Tp,
    count,
    line,
    lines,
    made_up,
    us,
)

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(help="Traces of decode steps: layers, times, budgets.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Argument(help="torch.profiler JSON; Nsight Systems export (sqlite, parquetdir), report or cuda_gpu_trace."),
]
Layer = Annotated[
    int | None, typer.Option("--layer", help="Show this layer, from 0, kernel by kernel beside the layers like it.")
]
_FINDINGS = 10
_NO_LAYERS = (
    "to have layers: say their number with --layers N, or name NVTX ranges layer_0, layer_1, ... around each (around its "
    "capture, where a graph is replayed)"
)
StepUs = Annotated[
    float | None,
    typer.Option("--step-us", min=0.001, max=1e9, help="A step's time in us without a profiler, to compare."),
]


def _ns(us: float | None) -> int | None:
    return None if us is None else max(1, round(us * 1000))


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the verdict and why, then for each device what costs time, its classes, layers and families; then notes."""
    judged, synthetic, family = data["budget"] is not None, data["synthetic"], data["family"]
    reasons = data["reasons"]
    if judged:
        against = f" {data['file']} against {data['budget']['name']}" + (f", family {family}" if family else "")
        line(console, data["verdict"] + made_up(data["verdict"], synthetic) + against
             + (f": {reasons[0]}" if reasons else ""), style=COLOURS[data["verdict"]])  # fmt: skip
        lines(console, "Reasons", reasons if len(reasons) > 1 else [])  # one alone stands in the first line
    else:
        line(console, f"{data['file']}: {data['format']}, {data['kernels']} kernels")
        lines(console, "Reasons", reasons)
    for device in data["devices"]:
        line(console, _about(device))
        if (layer := data.get("layer")) is not None:
            render_layer(console, device, layer, judged, synthetic)
            continue
        lines(console, "Findings", [item["text"] for item in device["findings"]], _FINDINGS)
        if device["split"]["abstained"]:
            line(console, _NO_LAYERS)
        if device["layers"]:
            console.print(class_table(console, device, judged, synthetic, family))
            console.print(layer_table(console, device, judged, synthetic, family))
            render_families(console, device, judged, synthetic, family)
    lines(console, "Notes", data["notes"])


def _about(device: dict[str, Any]) -> str:
    steps, split = device["steps"], device["split"]
    about = f"device {device['device']} ({device['gpu'] or 'GPU not named'}): {steps['used']} of "
    about += f"{count(steps['found'], 'step')} by {steps['source']}"
    if steps["median_ns"] is not None:
        about += f", {us(steps['median_ns'])} us each"
    if split["method"]:
        about += f"; {count(len(device['layers']), 'layer')} by {split['method']}, {count(split['prefix'], 'kernel')}"
        about += f" before and {split['suffix']} after them"
    return about


@app.command("check")
def check(
    file: File,
    budget: Budget = "gb300-tp16",
    gpu: Gpu = None,
    tp: Tp = None,
    rows: Rows = None,
    layers: Layers = None,
    layers_from: LayersFrom = None,
    layer: Layer = None,
    plan: Plan = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Hold one family of kernels, as experts, against its share.")
    ] = None,
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
            layers_from=layers_from,
        )
        emit(with_layer(report, layer), as_json, render)
    if report.verdict != "pass":
        raise typer.Exit(1)


@app.command("show")
def show(
    file: File,
    layers: Layers = None,
    layers_from: LayersFrom = None,
    layer: Layer = None,
    plan: Plan = None,
    names: Names = None,
    step_us: StepUs = None,
    as_json: Json = False,
) -> None:
    """Show steps, layers and their times, without a budget."""
    from ..traces import inspect_trace

    report = inspect_trace(file, layers=layers, plan=plan, step_ns=_ns(step_us), names=names, layers_from=layers_from)
    emit(with_layer(report, layer), as_json, render)


for _module in (trace_ranks, trace_diff, trace_budget, trace_capture, trace_figure, trace_synthesize, trace_calls,
                trace_kernels):  # fmt: skip
    _module.register(app)
