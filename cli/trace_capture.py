"""``k3lab trace capture``: run a command under nsys, or a Python script under torch.profiler, and keep its trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import line, lines

if TYPE_CHECKING:
    from rich.console import Console


def render(console: Console, data: dict[str, Any]) -> None:
    """Say what was written, and how to read it."""
    from ..traces.capture import NO_GPU_NOTE

    if data["trace"] is None:
        line(console, "no trace was written")
    else:
        line(console, f"wrote {data['trace']} ({data['tool']})")
        if NO_GPU_NOTE not in data["notes"]:  # else there is nothing to judge
            console.print(f"judge it: k3lab trace check {data['trace']}", markup=False, soft_wrap=True)
    lines(console, "Notes", data["notes"])


def register(app: typer.Typer) -> None:
    """Add ``capture`` to the group of ``k3lab trace``."""

    @app.command("capture")
    def capture_command(
        out: Annotated[
            Path, typer.Argument(help="Trace to write: .sqlite by nsys, .json or .json.gz by torch.profiler.")
        ],
        command: Annotated[
            list[str], typer.Argument(help="After --: the command to run, as python script.py --steps 25.")
        ],
        timeout: Annotated[
            float, typer.Option("--timeout", help="Seconds after which the command is stopped.")
        ] = 1800.0,
        force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
        capture_range: Annotated[
            str | None, typer.Option("--capture-range", help="nsys: cudaProfilerApi, or the name of an NVTX range.")
        ] = None,
        hardware: Annotated[bool, typer.Option("--hardware", help="nsys: hardware tracing, on Blackwell.")] = False,
        as_json: Json = False,
    ) -> None:
        """Run a command under nsys, else a Python script under torch.profiler; exits as the command does."""
        from ..traces.capture import capture

        done = capture(
            out, command, timeout_s=timeout, force=force, capture_range=capture_range, hardware=hardware, quiet=as_json
        )
        data = {"trace": done.written, "tool": done.tool, "exit_code": done.exit_code, "notes": list(done.notes)}
        emit(data, as_json, render)
        if done.exit_code:
            raise typer.Exit(done.exit_code)
