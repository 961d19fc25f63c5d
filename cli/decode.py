"""``k3lab decode``: what a step launches, and running one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, console, emit

if TYPE_CHECKING:
    from rich.console import Console

    from ..kernels.bundle.reader import Bundle
    from ..kernels.model_card import ModelCard

app = typer.Typer(help="Plan and run the decode path.", no_args_is_help=True)

BundlePath = Annotated[Path | None, typer.Option("--bundle", help="Folder that `k3lab export` wrote.")]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", help="Also use bundle entries that are only 'predicted', or only 'compiled' for this GPU."
    ),
]
Gpu = Annotated[str, typer.Option("--gpu", help="GPU whose bundle entries are used where none is here.")]


def _card(model: str, tp: int) -> ModelCard:
    """``k3``, ``small``, ``demo``, or the path of a config.json."""
    from ..kernels import K3, SMALL_K3, InputError, ModelCard

    if model == "k3":
        return K3
    if model == "small":
        return SMALL_K3
    if model == "demo":
        from ..decode.demo import demo_card

        return demo_card(tp=tp)
    if not model.endswith(".json"):
        raise InputError(f"unknown model {model!r}; models: k3, small, demo, or the path of a config.json")
    return ModelCard.from_file(model)


def _bundle(path: Path | None, accept: list[str] | None) -> Bundle | None:
    from ..kernels import InputError

    words = set(accept or ())
    if unknown := sorted(words - {"predicted", "compiled"}):
        raise InputError(f"--accept {unknown[0]} is unknown; it takes predicted or compiled")
    if path is None:
        if words:
            raise InputError("--accept speaks of a bundle's entries; give the bundle with --bundle")
        return None
    from ..kernels.bundle.reader import Bundle

    return Bundle.load(path, accept_predicted="predicted" in words, accept_compiled="compiled" in words)


def _backend(backend: str | None, bundle: Path | None) -> str:
    """A bundle asks for the tuned path; without either, ``auto``."""
    return backend or ("latency_specialized" if bundle else "auto")


def _fallback_table(console: Console, fallbacks: list[dict[str, Any]]) -> None:
    from rich.table import Table

    if not fallbacks:
        return
    table = Table(title="Not tuned", title_justify="left")
    for column in ("family", "kind", "why", "what would change it"):
        table.add_column(column, overflow="fold")
    for one in fallbacks:
        table.add_row(one["family"], one["kind"] or "", one["reason"], one["cure"])
    console.print(table)


def render_plan(console: Console, data: dict[str, Any]) -> None:
    """One table a layer kind, then the fallbacks."""
    from rich.table import Table

    where = f"{data['model']} TP{data['tp']} rows {data['rows']} on {data['gpu']}"
    console.print(f"{where}, backend {data['backend']}: {data['launches_per_step']} launches a step")
    for layer in data["layers"]:
        target = f", target {layer['target']['kernels']}" if layer["target"] else ""
        most = (
            f" (up to {layer['kernels_at_most']} with split-K reductions)"
            if layer["kernels_at_most"] > layer["kernels"]
            else ""
        )
        title = f"{layer['kind']} {layer['mlp']} layer, {len(layer['layers'])} of them: {layer['kernels']} launches{most}{target}"
        console.print(title, soft_wrap=True)
        table = Table()
        for column in ("#", "kernel", "family", "stream", "engine", "evidence"):
            table.add_column(column, overflow="fold")
        for launch in layer["launches"]:
            table.add_row(
                str(launch["position"]), launch["kernel"], launch["family"], launch["stream"], launch["engine"],
                launch["evidence"] or ("untuned" if launch["fallback"] else "-"),
            )  # fmt: skip
        console.print(table)
    targets = [layer["target"] for layer in data["layers"] if layer["target"]]
    if targets:
        console.print(f"target: {targets[0]['conditions']}")
    console.print(
        "engine torch: PyTorch operators stand in for the stock kernel; one row may be several device kernels"
    )
    _fallback_table(console, data["fallbacks"])


def render_run(console: Console, data: dict[str, Any]) -> None:
    """Head lines, tokens, times, fallbacks."""
    for line in data["head"]:
        console.print(f"note: {line}")
    console.print(
        f"{data['model']} TP{data['tp']} ({data['ranks']}), {data['rows']} requests, {data['tokens_per_request']} tokens each,"
        f" backend {data['backend']} on {data['device']}, operators: {data['operators']}"
    )
    for request, tokens in enumerate(data["tokens"][:4]):
        shown = " ".join(map(str, tokens[:16])) + (" ..." if len(tokens) > 16 else "")
        console.print(f"  request {request}: {shown}")
    if len(data["tokens"]) > 4:
        console.print(f"  and {len(data['tokens']) - 4} more requests")
    console.print(f"eager step: {data['step_ns_median'] / 1e6:.3f} ms (median, wall time)")
    if data["graph_step_ns"]:
        verdict = "the same tokens" if data["graph_agrees"] else "OTHER TOKENS"
        console.print(
            f"graph step: {data['graph_step_ns_median'] / 1e6:.3f} ms (median, device time), {verdict} as eager"
        )
    for one in data["tuned"]:
        console.print(f"tuned: {one['family']} {one['kind'] or ''} engine {one['engine']} ({one['evidence']})")
    if data["trace"]:
        console.print(f"trace: {data['trace']}")
    _fallback_table(console, data["fallbacks"])


@app.command("plan")
def plan_command(
    tp: int = typer.Option(16, "--tp", help="Tensor-parallel size."),
    rows: int = typer.Option(8, "--rows", help="Token rows of the step, 1 to 64."),
    model: str = typer.Option("k3", "--model", help="k3, small, demo, or the path of a config.json."),
    backend: str | None = typer.Option(None, "--backend", help="auto or latency_specialized (default with --bundle)."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    as_json: Json = False,
) -> None:
    """Print what a step launches, kernel by kernel, without a GPU."""
    from ..decode.plan import plan

    card = _card(model, tp)
    made = plan(card, tp=tp, rows=rows, backend=_backend(backend, bundle), bundle=_bundle(bundle, accept), gpu=gpu)
    emit(made.to_json(), as_json, render_plan)


@app.command("run")
def run_command(
    model: str = typer.Option("small", "--model", help="small, demo (needs a GPU), k3, or the path of a config.json."),
    tp: int | None = typer.Option(None, "--tp", help="Tensor-parallel size (default 1, demo 16)."),
    rows: int = typer.Option(2, "--rows", help="Requests in the batch, 1 to 64."),
    tokens: int = typer.Option(8, "--tokens", help="Tokens a request."),
    backend: str | None = typer.Option(None, "--backend", help="auto or latency_specialized (default with --bundle)."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    seed: int = typer.Option(0, "--seed", help="Of the random weights and first tokens."),
    trace: Path | None = typer.Option(None, "--trace", help="Write a device trace (.json or .json.gz); needs a GPU."),
    as_json: Json = False,
) -> None:
    """Decode some tokens greedily with random weights: twins without a GPU, a CUDA graph on one."""
    from ..decode.demo import DEMO_TP
    from ..decode.run import RunOptions, run

    tp = tp if tp is not None else (DEMO_TP if model == "demo" else 1)
    card = _card(model, tp)
    if model == "demo":
        from ..decode.demo import demo_card
        from ..decode.memory import free_memory
        from ..kernels import device

        card = demo_card(free_memory(device.require("--model demo keeps the real widths of K3 and")), tp=tp)
    options = RunOptions(
        tp=tp, rows=rows, tokens=tokens, backend=_backend(backend, bundle), seed=seed, gpu=gpu, trace=trace
    )
    loaded = _bundle(bundle, accept)
    shown = console(stderr=True)
    with shown.status("starting") as status:
        report = run(
            card, options, bundle=loaded, progress=lambda what, done, of: status.update(f"{what} {done} of {of}")
        )
    emit(report.to_json(), as_json, render_run)
    if not report.ok:
        raise typer.Exit(1)
