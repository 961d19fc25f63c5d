"""``k3lab decode traffic`` and ``decode replay``: made-up agent sessions, and sessions through both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .decode_inputs import Accept, BundlePath, Gpu, bundle_of, progress_bar, real_card
from .output import Json, emit
from .words import counted

if TYPE_CHECKING:
    from rich.console import Console

Data = dict[str, Any]
BOTH = ("auto", "latency_specialized")


def traffic_command(
    out: Path = typer.Argument(help="File to write, JSON lines."),
    force: bool = typer.Option(False, "--force", help="Write over a file that is there."),
    sessions: int = typer.Option(8, "--sessions", help="Users."),
    turns: int = typer.Option(6, "--turns", help="Mean turns a session."),
    system: int = typer.Option(4000, "--system", help="Tokens of a system prompt."),
    systems: int = typer.Option(2, "--systems", help="Different system prompts."),
    prompt: int = typer.Option(800, "--prompt", help="Median new tokens a turn."),
    output: int = typer.Option(250, "--output", help="Median tokens put out a turn."),
    pause: float = typer.Option(4.0, "--pause", help="Mean seconds between turns."),
    arrivals: float = typer.Option(2.0, "--arrivals", help="Mean seconds between sessions' starts."),
    context: int = typer.Option(65536, "--context", help="Longest session, tokens."),
    seed: int = typer.Option(0, "--seed", help="Of everything."),
    as_json: Json = False,
) -> None:
    """Write made-up agent sessions: lengths and pauses of a seed's, a recording of nothing."""
    from ..decode.traffic.synthetic import Shape, synthetic
    from ..kernels import InputError
    from ..kernels.whole_file import write_whole

    shape = Shape(sessions, turns, system, systems, prompt, output, pause, arrivals, context)
    if out.exists() and not force:
        raise InputError(f"{out} is there already; --force writes over it")
    made = synthetic(shape, seed)
    try:
        write_whole(out, "".join(json.dumps(one.to_json()) + "\n" for one in made.sessions))
    except OSError as error:
        raise InputError(f"cannot write {out} ({error.strerror})") from None
    count = sum(len(one.turns) for one in made.sessions)
    data = {"file": str(out), "digest": made.digest, "sessions": sessions, "turns": count, "longest": made.context, "synthetic": True}  # fmt: skip
    emit(data, as_json, lambda console, told: console.print(
        f"{told['file']}: SYNTHETIC traffic {told['digest']}, {counted(told['sessions'], 'session')}, {counted(told['turns'], 'turn')},"
        f" up to {told['longest']} tokens", markup=False, soft_wrap=True,
    ))  # fmt: skip


def replay_command(
    workload: Path = typer.Argument(help="Sessions, JSON lines; `k3lab decode traffic` makes some, docs/evaluation.md has the form."),
    model: str | None = typer.Option(None, "--model", help="small (default), k3, or the path of a config.json."),
    checkpoint: Path | None = typer.Option(None, "--checkpoint", help="Folder in the published form, in place of random weights."),
    rows: int = typer.Option(8, "--rows", help="Turns at a time, 1 to 64."),
    backend: str = typer.Option("both", "--backend", help="auto, latency_specialized, or both in one run."),
    keep_gb: float = typer.Option(16.0, "--keep-gb", help="Host memory for contexts between turns."),
    reuse: bool = typer.Option(True, "--reuse/--no-reuse", help="Put contexts back, or compute them again in every turn."),
    real_pauses: bool = typer.Option(False, "--real-pauses", help="Wait where nothing runs; else such time is only counted."),
    seed: int = typer.Option(0, "--seed", help="Of random weights."),
    bundle: BundlePath = None,
    accept: Accept = None,
    gpu: Gpu = "GB300",
    out: Path | None = typer.Option(None, "--out", help="Folder: turns as they end, and a report a backend for decode compare."),
    as_json: Json = False,
) -> None:  # fmt: skip
    """Replay agent sessions: what users see of rate, first token and latency, by backend."""
    from ..decode.evaluation.compare import Conditions
    from ..decode.evaluation.places import places
    from ..decode.traffic.both import measures, replay_all
    from ..decode.traffic.sessions import read_traffic
    from ..kernels import InputError, device
    from ..kernels.gpu_cards import gpu_card
    from ..kernels.whole_file import write_whole
    from ..tuning.environment import environment

    if backend not in (*BOTH, "both"):
        raise InputError(f"unknown backend {backend!r}; backends: {', '.join(BOTH)}, both")
    if not 1 <= rows <= 64 or not 0 <= keep_gb < 1e6:
        raise InputError(f"rows {rows}, keep-gb {keep_gb:g}: rows lie in 1..64, memory is 0 or more")
    if checkpoint and model:
        raise InputError("--checkpoint has a model of its own; give it without --model")
    if not 0 <= seed < 2**32:
        raise InputError(f"seed is {seed}; it is a whole number of 32 bits")
    gpu_card(gpu)
    traffic = read_traffic(workload)
    card = real_card(str(checkpoint / "config.json") if checkpoint else model or "small", 1)
    if traffic.context > card.max_position_embeddings:
        raise InputError(
            f"{workload} grows to {traffic.context} tokens; {card.name} takes {card.max_position_embeddings}"
        )
    loaded, names = bundle_of(bundle, accept), BOTH if backend == "both" else (backend,)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            there = next((name for name in names if (out / f"{name}.turns.jsonl").exists()), None)
        except OSError as error:
            raise InputError(f"cannot make {out} ({error.strerror})") from None
        if there:
            raise InputError(f"{out / there}.turns.jsonl is there already; name another folder, or remove it")
    with progress_bar() as told:
        here = places(card, checkpoint=checkpoint, bundle=loaded, gpu=gpu, rows=rows, seed=seed, say=told)
        ran = replay_all(
            traffic, here.backends, names, out=out, say=told, rows=rows, keep_bytes=int(keep_gb * 1e9), reuse=reuse,
            real_pauses=real_pauses,
        )  # fmt: skip
    found = device.discover()
    conditions = Conditions(
        model=card.name, weights=here.conditions["weights"], gpu=here.conditions["device"], gpus=1, tp=1, dcp=1, transport="none",
        drafts=0, acceptance="none", kv_dtype="bfloat16", ssm_dtype="float32",
        workload=f"{traffic.digest} rows {rows} keep {keep_gb:g} GB{'' if reuse else ' no reuse'}{' real pauses' if real_pauses else ''}",
    )  # fmt: skip
    notes = [*here.notes, *(["SYNTHETIC traffic: made-up sessions"] if "synthetic" in traffic.sessions[0].name else [])]
    reports = {
        name: {
            "conditions": conditions.to_json(), "backend": name, "bundle": here.conditions["bundle"], "notes": notes,
            "environment": environment(found), "measures": measures(one), "seen": one,
        }
        for name, one in ran.items()
    }  # fmt: skip
    if out is not None:
        for name, report in reports.items():
            write_whole(out / f"{name}.json", json.dumps(report, indent=1) + "\n")
    emit({"workload": str(workload), "notes": notes, "reports": reports}, as_json, render_replay)


def render_replay(console: Console, data: Data) -> None:
    """Notes, a line a measure with both backends, contexts and fallbacks."""
    from rich.table import Table

    from ..decode.evaluation.compare import NO_GPU, times_better

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for line in data["notes"]:
        say(f"note: {line}")
    reports = data["reports"]
    names = list(reports)
    one = reports[names[0]]["seen"]
    say(
        f"{data['workload']} ({reports[names[0]]['conditions']['workload']}): {counted(one['turns'], 'turn')},"
        f" {counted(one['output_tokens'], 'token')} put out, contexts to {one['longest_context']} tokens"
    )
    ratio = len(names) == 2 and reports[names[0]]["conditions"]["gpu"] != NO_GPU
    table = Table("measure", *names, "unit", *(["times better"] if ratio else []))
    for measure, first in reports[names[0]]["measures"].items():
        values = [reports[name]["measures"].get(measure, {}).get("value") for name in names]
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        if ratio:
            a, b = values
            times = None if a is None or b is None else times_better(a, b, first["unit"])
            cells.append("-" if times is None else f"{times:.3f}")
        table.add_row(measure, *cells[: len(names)], first["unit"], *cells[len(names) :])
    console.print(table)
    for name in names:
        seen = reports[name]["seen"]
        share = f"{seen['reused_share']:.0%}" if seen["reused_share"] is not None else "none"
        say(
            f"{name}: {share} of the context tokens were put back, {counted(seen['contexts_given_up'], 'context')} given up"
        )
        for fallback in (seen["steps"] or {}).get("fallbacks", []):
            say(f"  {counted(fallback['count'], 'step')} left to auto: {fallback['reason']}")
