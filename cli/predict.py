"""``k3lab predict``: an engine's time, or a whole layer's, on a GPU that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .select import GPU_NAMES, ConfigText, EngineName, Kind, Model, Rows, Tp, model_card, select_engine

if TYPE_CHECKING:
    from rich.console import Console

    from ..kernels.gpu_cards import GpuCard

Name = Annotated[str | None, typer.Argument(help="Family; see 'k3lab kernels'. None: a whole layer.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("predict")(predict)


def predict(
    name: Name = None, tp: Tp = 16, rows: Rows = 8, kind: Kind = None, engine: EngineName = None, config: ConfigText = None,
    model: Model = "k3", gpu: Annotated[str, typer.Option("--gpu", help=f"GPU card: {GPU_NAMES}.")] = "GB300",
    results: Annotated[Path, typer.Option("--results", help="Folder whose tables name the winners of a layer.")] = Path("results"),
    as_json: Json = False,
) -> None:  # fmt: skip
    """Predict an engine's time, or without a family a MoE layer's kernel by kernel; the model's error stands beside it."""
    from ..kernels.errors import InputError
    from ..kernels.gpu_cards import gpu_card

    card = gpu_card(gpu)
    if name is None:
        if engine or config:
            raise InputError("--engine and --config are of one family: name it, or leave them out for the layer")
        emit(layer_data(model, tp, rows, kind or "kda", card, results), as_json, render_layer)
        return
    emit(one_data(name, model, tp, rows, kind, engine, config, card), as_json, render_one)


def one_data(
    name: str, model: str, tp: int, rows: int, kind: str | None, engine: str | None, config: str | None, card: GpuCard
) -> dict[str, Any]:
    """One config's prediction beside its floor.

    Raises:
        InputError: what is named does not exist, or the engine refuses it.
    """
    from ..tuning.compiling import compile_config
    from ..tuning.cost_model import constants_of
    from ..tuning.predict import predict as run_predict

    chosen = select_engine(name, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    point = chosen.config(config, card)
    compiled = compile_config(chosen.engine, chosen.problem, point, card.arch)
    found = run_predict(chosen.family, chosen.engine, chosen.problem, point, card, compiled)
    floor = chosen.family.traffic(chosen.problem).bytes / card.read_bandwidth * 1e6
    return {
        **chosen.to_json(), "label": chosen.problem.label, "config": dict(point), "gpu": card.name, "evidence": "predicted",
        "prediction": found.to_json(), "sharpness": constants_of(chosen.family.name, chosen.engine.name)[0].sharpness,
        "floor_us": round(floor, 3), "floor_bandwidth": card.read_bandwidth_source, "bandwidth": card.read_bandwidth,
    }  # fmt: skip


def render_one(console: Console, data: dict[str, Any]) -> None:
    """Print a prediction with its terms."""
    from ..tuning.cost_model import OVERLAP, TERM_MEANINGS

    found, sharpness = data["prediction"], data["sharpness"]
    console.print(f"{data['family']}/{data['engine']} {data['label']} on {data['gpu']}, predicted", markup=False)
    console.print(f"  time   {found['microseconds']:8.2f} us   model error: {found['error']}", markup=False)
    console.print(
        f"  floor  {data['floor_us']:8.2f} us   bytes over the {data['floor_bandwidth']} bandwidth of {data['bandwidth'] / 1e12:.2f} TB/s"
    )
    for term, value in found["terms"].items():
        if value:
            console.print(f"    {term:<12} {value:8.2f} us   {TERM_MEANINGS[term]}", markup=False)
    console.print(
        f"  {', '.join(OVERLAP)} overlap: of them (sum of t^{sharpness:.2f})^(1/{sharpness:.2f}) counts; the others add"
    )
    if found["uncalibrated"]:
        console.print(f"  never calibrated on {data['gpu']}: {', '.join(found['uncalibrated'])}", markup=False)


def layer_data(model: str, tp: int, rows: int, kind: str, card: GpuCard, results: Path) -> dict[str, Any]:
    """A MoE layer of that kind, family by family, beside the layer's budget where there is one for the GPU, TP and rows.

    Raises:
        InputError: no such kind, TP or rows.
    """
    from ..kernels import InputError, family
    from ..tuning.predict_layer import layer
    from .study_data import LAYER
    from .table_data import recorded_rows

    if kind not in ("kda", "mla"):
        raise InputError(f"layer kind {kind!r} is neither kda nor mla")
    parts = []
    for name, by_kind in LAYER:
        owner = family(name or kind)
        problem = owner.problem(
            model_card(model), tp=tp, rows=rows, kind=kind if by_kind and kind in owner.kinds else None
        )
        parts.append((owner, problem))
    rows_known = recorded_rows(results) if results.is_dir() else []
    winners = {
        (row["family"], row["label"]): (row["engine"], row["config"]) for row in rows_known if row["gpu"] == card.name
    }
    return {
        "model": model, "tp": tp, "rows": rows, "kind": kind, **layer(parts, card, winners), "floor_bandwidth": card.read_bandwidth_source,
        "budget": budget_data(card, tp, rows, kind),
    }  # fmt: skip


def budget_data(card: GpuCard, tp: int, rows: int, kind: str) -> dict[str, Any] | None:
    """The layer's budget: name, evidence, microseconds, kernels, and each family's share; None where there is none."""
    from ..traces.budget import budget_names, load_budget

    for name in budget_names():
        budget = load_budget(name)
        limit = budget.limit(kind) or next(iter(budget.layers.values()))
        if (budget.gpu, budget.tp) == (card.name, tp) and budget.rows in (None, rows) and limit.period_ns:
            return {
                "name": name, "evidence": budget.evidence, "us": limit.period_ns / 1000, "kernels": limit.kernels,
                "families": {owner: share.period_ns / 1000 for owner, share in limit.families.items() if share.period_ns},
            }  # fmt: skip
    return None


def render_layer(console: Console, data: dict[str, Any]) -> None:
    """Print a layer kernel by kernel."""
    from rich.table import Table

    budget = data["budget"]
    table = Table(
        "family", "engine", "of it", "kernel", "blocks x threads", "registers", "us (predicted)", "floor us", "share of the budget",
        title=f"one {data['kind'].upper()} MoE layer on {data['gpu']}, TP{data['tp']}, {data['rows']} rows, {data['evidence']}",
    )  # fmt: skip
    for part in data["parts"]:
        share = (budget or {}).get("families", {}).get(part["family"])
        last = f"{share:.2f}" if share else "-"
        us = "-" if part["us"] is None else f"{part['us']:.2f}"
        head = (part["family"], part["engine"] or "-", part["basis"])
        for number, kernel in enumerate(part["kernels"] or [None]):
            figures = (us, f"{part['floor_us']:.2f}", last) if number == 0 else ("", "", "")
            text = (
                (kernel["kernel"], f"{kernel['blocks']} x {kernel['threads']}", str(kernel["registers"]))
                if kernel
                else ("-", "-", "-")
            )
            table.add_row(*(head if number == 0 else ("", "", "")), *text, *figures)
    console.print(table)
    console.print(
        f"sum {data['sum_us']:.2f} us of {data['launches']} launches, each alone (PDL hides a part of every launch), byte floor "
        f"{data['floor_us']:.2f} us at {data['floor_bandwidth']} bandwidth", markup=False,
    )  # fmt: skip
    if data["link_us"]:
        fitted = (
            f"fitted to ranks on {', '.join(data['link_gpus'])}" if data["link_gpus"] else "guessed, never measured"
        )
        console.print(f"of the sum {data['link_us']:.2f} us are links to other ranks: {fitted}", markup=False)
    if budget:
        verdict = "within" if data["sum_us"] <= budget["us"] else f"{data['sum_us'] - budget['us']:.2f} us over"
        console.print(
            f"budget {budget['us']:.0f} us in {budget['kernels']} kernels ({budget['name']}, {budget['evidence']}): the sum is {verdict}",
            markup=False,
        )
    else:
        console.print("there is no budget for this GPU, TP and row count: `k3lab trace budget` derives one")
    for part in data["parts"]:
        note = part["why"] if part["us"] is None else f"model error {part['error']}"
        console.print(f"  {part['family']}: {note}", markup=False)
    if data["uncalibrated"]:
        console.print(f"never calibrated on {data['gpu']}: {', '.join(data['uncalibrated'])}", markup=False)
    if data["uncalibrated_engines"]:
        console.print(f"by constants of other engines: {', '.join(data['uncalibrated_engines'])}", markup=False)
