"""``k3lab decode``: what a step launches, and running one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import typer

from .decode_bars import bars_command
from .decode_bench import bench_command
from .decode_compare import compare_command
from .decode_eval import eval_command
from .decode_inputs import Accept, BundlePath, Dcp, Gpu, KvDtype, bundle_of, card_of, progress_bar
from .decode_pair import pair_command
from .decode_trace import traced_differences
from .decode_traffic import traffic_command
from .decode_view import render_checkpoint, render_plan, render_run, render_scope
from .output import Json, emit

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
"""What a server may keep its caches in; which of them are served is the scope's to say."""

app = typer.Typer(help="Plan and run the decode path.", no_args_is_help=True)


def _backend(backend: str | None, bundle: Path | None) -> str:
    """A bundle asks for the tuned path; without either, ``auto``."""
    return backend or ("latency_specialized" if bundle else "auto")


def _objective(gpu: str) -> Literal["measured", "predicted"]:
    """How this machine can tune for the GPU."""
    from ..kernels.device import discover

    here = discover()
    return "measured" if here and here.card and here.card.name.lower() == gpu.lower() else "predicted"


@app.command("plan")
def plan_command(
    tp: int = typer.Option(16, "--tp", help="Tensor-parallel size."),
    rows: int = typer.Option(8, "--rows", help="Token rows of the step, 1 to 64."),
    model: str = typer.Option("k3", "--model", help="k3, small, demo, or the path of a config.json."),
    backend: str | None = typer.Option(None, "--backend", help="auto or latency_specialized (default with --bundle)."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    drafts: int = typer.Option(0, "--drafts", help="Of a verify step: rows are a multiple of drafts + 1."),
    dcp: Dcp = 1,
    kv_dtype: KvDtype = "bfloat16",
    logits: bool = typer.Option(False, "--logits", help="Of a step that hands out logits, for sampling; else tokens."),
    full: bool = typer.Option(False, "--full", help="List every launch of every layer kind; JSON always does."),
    as_json: Json = False,
) -> None:
    """Print what a step launches, and which of it is tuned, without a GPU."""
    from ..decode.choices import StepForm
    from ..decode.plan import plan
    from ..decode.run_options import check_kv_dtype
    from ..decode.scope import MAX_DRAFTS
    from ..kernels import InputError

    if not 0 <= drafts <= MAX_DRAFTS or rows % (drafts + 1):
        raise InputError(
            f"drafts {drafts} with rows {rows}: a verify step has 1 to {MAX_DRAFTS} drafts, and whole requests"
        )
    check_kv_dtype(kv_dtype)
    card = card_of(model, tp)
    backend = _backend(backend, bundle)
    loaded = bundle_of(bundle, accept)
    objective = "predicted" if backend == "auto" else _objective(gpu)
    made = plan(
        card,
        tp=tp,
        rows=rows,
        backend=backend,
        bundle=loaded,
        gpu=gpu,
        objective=objective,
        model=model,
        form=StepForm(drafts + 1, kv_dtype, dcp=dcp, head="logits" if logits else "tokens"),
    )
    emit(made.to_json(), as_json, partial(render_plan, full=full))


@app.command("checkpoint")
def checkpoint_command(
    folder: Path = typer.Argument(help="Folder with config.json, the index and the shards."),
    most: int = typer.Option(20, "--most", min=1, help="Faults that are listed; all are counted."),
    as_json: Json = False,
) -> None:
    """Look whether a checkpoint in the published form is whole, by its headers alone."""
    from ..decode.checkpoint.load import survey

    data = survey(folder, most)
    emit(data, as_json, render_checkpoint)
    if data["faults_found"]:
        raise typer.Exit(1)


@app.command("scope")
def scope_command(
    workload: Path = typer.Option(
        help='JSON lines, a step each: {"count": 900, "requests": 4, "drafts": 7, "prefill": 0}; drafts may be a list.'
    ),
    tp: int = typer.Option(16, "--tp", help="Tensor-parallel size."),
    model: str = typer.Option("k3", "--model", help="k3, small, demo, or the path of a config.json."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    sms: int | None = typer.Option(None, "--sms", min=1, help="SMs a rank may use (default: all of the GPU)."),
    ssm_dtype: str = typer.Option("float32", "--ssm-dtype", help="Of the KDA states."),
    kv_dtype: str = typer.Option("bfloat16", "--kv-dtype", help="Of the MLA cache."),
    graph_rows: int = typer.Option(
        64, "--graph-rows", min=0, help="Most rows of a captured graph; 0: none is captured."
    ),
    domain: int | None = typer.Option(None, "--nvlink-ranks", min=1, help="Ranks of one NVLink domain (default: all)."),
    as_json: Json = False,
) -> None:
    """Say which share of the steps of a workload latency_specialized would serve, and why not the others."""
    from ..decode.scope import RankSituation, entry_rows, group_scope
    from ..decode.workload import judge_workload
    from ..kernels import InputError
    from ..kernels.gpu_cards import gpu_card

    for name, dtype in (("ssm-dtype", ssm_dtype), ("kv-dtype", kv_dtype)):
        if dtype not in DTYPES:
            raise InputError(f"--{name} is {dtype!r}; dtypes: {', '.join(DTYPES)}")
    card, chip, loaded = card_of(model, tp), gpu_card(gpu), bundle_of(bundle, accept)
    card.check_tp(tp)
    rows = entry_rows(card, loaded, tp=tp, gpu=chip.name)
    ranks = [
        RankSituation(
            tp=tp, gpu=chip.name, sms=sms or chip.sms, tuned_sms=chip.sms, domain=str(rank // (domain or tp)),
            ssm_dtype=ssm_dtype, kv_dtype=kv_dtype, graph_rows=graph_rows, entry_rows=rows, bundle=str(bundle or ""),
        )
        for rank in range(tp)
    ]  # fmt: skip
    tally = judge_workload(workload, group_scope(ranks))
    data = {"model": card.name, "tp": tp, "gpu": chip.name, "entry_rows": rows, "workload": str(workload)}
    emit({**data, **tally.to_json()}, as_json, render_scope)


@app.command("run")
def run_command(
    model: str | None = typer.Option(
        None, "--model", help="small (default), demo (needs a GPU), k3, or the path of a config.json."
    ),
    checkpoint: Path | None = typer.Option(
        None, "--checkpoint", help="Folder in the published form, in place of a model with random weights."
    ),
    tp: int | None = typer.Option(None, "--tp", help="Tensor-parallel size (default 1, demo 16)."),
    rows: int = typer.Option(2, "--rows", help="Requests in the batch, 1 to 64."),
    tokens: int = typer.Option(8, "--tokens", help="Tokens a request."),
    prompt: int = typer.Option(1, "--prompt", help="Random tokens a request begins with; all but one are prefilled."),
    chunk: int = typer.Option(512, "--chunk", help="Tokens of a prefill chunk."),
    fill: int = typer.Option(0, "--fill-context", help="Tokens of a made-up context before the prompt: for timing."),
    backend: str | None = typer.Option(None, "--backend", help="auto or latency_specialized (default with --bundle)."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    seed: int = typer.Option(0, "--seed", help="Of the random weights and first tokens."),
    drafts: int = typer.Option(
        0, "--drafts", help="Tokens drafted for every request and step, up to 7; 0: plain steps."
    ),
    temperature: float = typer.Option(0.0, "--temperature", help="With drafts: of sampling; 0 takes the likeliest."),
    acceptance_length: float | None = typer.Option(
        None, "--acceptance-length", help="With drafts: SYNTHETIC acceptance of so many mean tokens a step, for timing."
    ),
    draft_checkpoint: Path | None = typer.Option(
        None, "--draft-checkpoint", help="Folder of the drafter, in place of random weights."
    ),
    dcp: Dcp = 1,
    kv_dtype: KvDtype = "bfloat16",
    rank: int | None = typer.Option(
        None, "--rank", help="Run this rank of the group alone, over loopback: no link cost is in its times."
    ),
    of: int | None = typer.Option(None, "--of", help="With --rank: ranks of the group, as --tp."),
    transport: str | None = typer.Option(
        None, "--transport", help="Of kernels that publish: loopback (one rank alone), symmetric, multicast (torchrun)."
    ),
    trace: Path | None = typer.Option(None, "--trace", help="Write a device trace (.json or .json.gz); needs a GPU."),
    as_json: Json = False,
) -> None:
    """Decode some tokens greedily: twins without a GPU, a CUDA graph on one."""
    from ..decode.demo import DEMO_TP
    from ..decode.run import RunOptions, run
    from ..kernels import InputError
    from ..traces.capture import recording

    if checkpoint and model:
        raise InputError("--checkpoint has a model of its own; give it without --model")
    model = str(checkpoint / "config.json") if checkpoint else model or "small"
    if of is not None and tp not in (None, of):
        raise InputError(f"--of {of} and --tp {tp} are both the ranks of the group; give one of them")
    if of is not None and rank is None:
        raise InputError("--of speaks of one rank alone; give --rank, or --tp for all ranks")
    tp = tp if of is None else of
    if tp is None:
        if rank is not None and model != "demo":
            raise InputError("--rank is one rank of a group; give the group's size with --of")
        tp = DEMO_TP if model == "demo" else 1
    card = card_of(model, tp)
    if model == "demo":
        from ..decode.demo import demo_card
        from ..decode.memory import free_memory
        from ..kernels import device

        card = demo_card(free_memory(device.require("--model demo keeps the real widths of K3 and")), tp=tp)
    options = RunOptions(
        tp=tp,
        rows=rows,
        tokens=tokens,
        backend=_backend(backend, bundle),
        seed=seed,
        gpu=gpu,
        trace=trace,
        model=model,
        checkpoint=checkpoint,
        prompt=prompt,
        chunk=chunk,
        fill=fill,
        drafts=drafts,
        temperature=temperature,
        acceptance_length=acceptance_length,
        draft_checkpoint=draft_checkpoint,
        dcp=dcp,
        kv_dtype=kv_dtype,
        rank=rank,
        transport=transport,
    )
    loaded = bundle_of(bundle, accept)
    with progress_bar() as told:
        report = run(card, options, bundle=loaded, progress=told, record=recording)
    if report.rank == 0 or rank is not None:  # of torchrun's processes one prints
        emit(report.to_json(), as_json, render_run)
    traced = report.trace  # of torchrun's processes each has its own
    differ = traced_differences(traced, report.planned_here, len(report.graph_step_ns or ())) if traced else []
    for line in differ:
        typer.echo(f"{traced} against the plan: {line}", err=True)
    if differ or not report.ok:
        raise typer.Exit(1)


app.command("eval")(eval_command)
app.command("bars")(bars_command)
app.command("pair")(pair_command)
app.command("compare")(compare_command)
app.command("traffic")(traffic_command)
app.command("bench")(bench_command)
