"""``k3lab decode traffic``: made-up agent sessions for ``decode bench --workload``."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from .output import Json, emit
from .words import counted


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
