"""``k3lab decode eval``: the user's problem files through both backends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..tuning.stop import ended_by_sigterm
from .decode_inputs import Accept, BundlePath, Gpu, KvDtype, bundle_of, kept_alone, progress_bar, real_card
from .output import Json, emit
from .words import counted

if TYPE_CHECKING:
    from rich.console import Console

Data = dict[str, Any]


@ended_by_sigterm()
def eval_command(
    problems: Path = typer.Argument(help="JSON lines in the form of AIME, GPQA, MRCR or token ids; see docs/evaluation.md."),
    model: str | None = typer.Option(None, "--model", help="small (default), k3, or the path of a config.json."),
    checkpoint: Path | None = typer.Option(None, "--checkpoint", help="Folder in the published form, in place of random weights."),
    tokenizer: Path | None = typer.Option(None, "--tokenizer", help="tokenizer.json or its folder (default: the checkpoint's)."),
    template: Path | None = typer.Option(None, "--chat-template", help="Jinja file (default: the folder's chat_template.jinja)."),
    stop: list[str] | None = typer.Option(None, "--stop", help="Token, as text, that ends an output; may be repeated."),
    tokens: int = typer.Option(4096, "--tokens", help="Of an output at most."),
    rows: int = typer.Option(8, "--rows", help="Requests in a step at most, 1 to 64."),
    repeats: int = typer.Option(1, "--repeats", help="Outputs a problem and backend; more than one needs a temperature."),
    temperature: float = typer.Option(0.0, "--temperature", help="Of sampling; 0 takes the likeliest token."),
    seed: int = typer.Option(0, "--seed", help="Of sampling, choices' orders and random weights."),
    margin: float = typer.Option(0.02, "--margin", help="Loss of mean score that does not matter."),
    tp: int | None = typer.Option(None, "--tp", help="Tensor-parallel size: ranks that torchrun started (default), or 1."),
    transport: str | None = typer.Option(None, "--transport", help="Of kernels that publish: symmetric (default) or multicast, under torchrun."),
    kv_dtype: KvDtype = "bfloat16",
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    out: Path | None = typer.Option(None, "--out", help="Keep every output here as it ends; the same command goes on from it."),
    strict: bool = typer.Option(False, "--strict", help="Exit 1 where nothing could be concluded, too."),
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say whether latency_specialized loses quality against auto: paired scores, and long outputs followed for drift."""
    from ..decode.evaluation.evaluate import EvalOptions, Record, check_prompts, check_record, evaluate
    from ..decode.evaluation.places import places
    from ..decode.evaluation.problems import read_problems
    from ..decode.evaluation.text import Text
    from ..decode.group import join, started
    from ..decode.run_options import check_kv_dtype
    from ..decode.sharding import check_rank
    from ..kernels import InputError, device
    from ..kernels.gpu_cards import gpu_card
    from ..tuning.environment import environment

    options = EvalOptions(tokens, rows, repeats, temperature, seed, margin)
    options.check()
    file = read_problems(problems)
    if checkpoint and model:
        raise InputError("--checkpoint has a model of its own; give it without --model")
    gpu_card(gpu)
    card = real_card(str(checkpoint / "config.json") if checkpoint else model or "small", 1)
    where = tokenizer or (checkpoint if checkpoint and (checkpoint / "tokenizer.json").exists() else None)
    text = Text(where, template, stop or ()) if where else None
    if text is None and (template or stop):
        raise InputError("--chat-template and --stop speak of text; give the model's --tokenizer")
    # what cannot be asked or kept is told before weights are loaded
    context = check_prompts(file, options, text, vocabulary=card.vocab_size, context=card.max_position_embeddings)
    if transport == "loopback":
        raise InputError(
            "transport loopback is for one rank alone; answers come from all ranks: symmetric or multicast"
        )
    loaded, size = bundle_of(bundle, accept), started() if tp is None else tp
    check_rank(card, size, 0)
    check_kv_dtype(kv_dtype)
    group = join(size, device.discover(), transport=transport)
    if group is None or group.alone:
        raise InputError(
            f"answers come from all ranks: torchrun --nproc-per-node {size} -m k3lab.cli.main decode eval, or --tp 1"
        )
    try:
        own = out if group.rank == 0 else None
        if own:
            check_record(own)
        with kept_alone(own), progress_bar() as told:
            here = places(
                card, group, checkpoint=checkpoint, bundle=loaded, gpu=gpu, rows=rows, seed=seed, context=context, kv_dtype=kv_dtype, say=told
            )  # fmt: skip
            settings = {
                **here.conditions, "problems": file.digest, "tokens": tokens, "rows": rows, "repeats": repeats,
                "temperature": temperature, "seed": seed, "template": text.template_source if text else None,
                "stops": sorted(text.stops) if text else [],
            }  # fmt: skip
            record = Record(own, settings)
            report = group.together("the evaluation", lambda: evaluate(
                file, options, here.backends, text=text, record=record, say=told, host=group.host,
            ))  # fmt: skip
    finally:
        group.close()
    if group.rank:  # of torchrun's processes one prints
        return
    data = {
        "notes": list(here.notes), "settings": settings, "file": str(problems), "bundle": here.bundle,
        "environment": environment(group.device), "ranks": group.words, **report,
    }  # fmt: skip
    emit(data, as_json, render_eval)
    undecided = [*report["scores"].values(), report["drift"]]
    if not report["ok"] or (strict and any(one["verdict"] == "inconclusive" for one in undecided)):
        raise typer.Exit(1)


def render_eval(console: Console, data: Data) -> None:
    """Notes, a line of scores a form, the windows, what the path left to auto."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    settings = data["settings"]
    for line in data["notes"]:
        say(f"note: {line}")
    say(
        f"{data['file']} ({settings['problems']}), {settings['model']}, weights {settings['weights']}, on {settings['device']}, {data['ranks']}"
    )
    table = Table("form", "problems", "auto", "latency_specialized", "difference", "95 % interval", "verdict")
    for form, one in data["scores"].items():
        low, high = one["interval"]
        table.add_row(
            form, str(one["problems"]), f"{one['first']:.3f}", f"{one['second']:.3f}", f"{one['difference']:+.3f}",
            f"{low:+.3f} .. {high:+.3f}", one["verdict"],
        )  # fmt: skip
    console.print(table)
    followed = data["drift"]
    for one in followed["windows"]:
        nats, repeats = one["nats_a_token"], one["repeated"]
        say(
            f"tokens {one['begin']}-{one['end']}: {counted(one['problems'], 'problem')}, {one['alike']:.0%} the same so far,"
            f" nats a token {nats[0]:.3f} and {nats[1]:.3f}, repeated {repeats[0]:.1%} and {repeats[1]:.1%}"
        )
    say(f"long outputs: {followed['verdict']}" + (f", up to token {followed['last']}" if followed["last"] else ""))
    if data["outputs_of_earlier_runs"]:
        say(
            f"  {counted(data['outputs_of_earlier_runs'], 'output')} of earlier runs: what those left to auto is not in this report"
        )
    for backend, steps in data["steps"].items():
        for one in (steps or {}).get("fallbacks", []):
            say(f"  {backend} left {counted(one['count'], 'step')} to auto: {one['reason']}")
