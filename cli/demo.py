"""``k3lab demo``: the main job on the real shapes, step by step; each step is a command you can type."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..kernels.errors import InputError
from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console

FAMILY = "attention_projection"
PROBLEM = ("--tp", "16", "--rows", "8")
MARKER = ".k3lab-demo"
"""Written into the demo's folder: only a folder that has it is emptied again."""
STEP_LIMIT_S = 900.0
LATE = 124
"""Exit code of a step that was stopped at its limit."""


@dataclass(frozen=True)
class Step:
    """One command of the demo."""

    title: str
    command: tuple[str, ...]
    """Arguments of ``k3lab``."""
    note: str = ""
    """What to know before reading the output."""
    may_fail: bool = False
    """Exit 1 is an answer (a verdict), not the end of the demo."""


def prepare(folder: Path) -> None:
    """An empty folder of the demo's own.

    Raises:
        InputError: it holds something else, or cannot be written.
    """
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / MARKER).exists():
                raise InputError(f"{folder} holds something that is not a demo's; name another --out folder")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}; name another --out folder") from error


def _tune(folder: Path, gpu: str, objective: str, trials: int) -> tuple[tuple[str, ...], Path]:
    study = folder / "studies" / f"{FAMILY}-{gpu.lower()}-{objective}.sqlite3"
    what = ("tune", FAMILY, *PROBLEM, "--gpu", gpu, "--objective", objective, "--trials", str(trials))
    return (*what, "--study", str(study)), study


def steps_without_gpu(folder: Path, trials: int) -> list[Step]:
    """Interpreter, real compilations for GB300, predictions, twins."""
    tune, study = _tune(folder, "GB300", "predicted", trials)
    bundle, trace = folder / "bundle", folder / "synthetic_trace.json.gz"
    return [
        Step("What this machine can do", ("doctor",)),
        Step(
            "Check the engine against its twin, at the real shape of one TP16 rank",
            ("check", FAMILY, *PROBLEM, "--engine", "triton"),
            "No GPU: the Triton kernels run on Triton's interpreter.",
        ),
        Step("What the compiler makes of it for GB300", ("compile", FAMILY, *PROBLEM, "--arch", "sm_103a")),
        Step(
            f"Tune for GB300: {trials} configs",
            tune,
            "Every candidate is compiled for sm_103a; times are predicted by a cost model, not measured.",
        ),
        Step("Export the winner as a bundle", ("export", str(study), "--out", str(bundle))),
        Step(
            "Which launches of the real model the bundle tunes",
            ("decode", "plan", *PROBLEM, "--bundle", str(bundle), "--accept", "predicted", "--gpu", "GB300"),
        ),
        Step(
            "Run the decode path of a small K3",
            ("decode", "run", "--model", "small", "--tp", "4", "--rows", "2", "--tokens", "8", "--backend", "latency_specialized"),
            "On the CPU every family falls back to its twin, and each fallback says why.",
        ),
        Step(
            "Judge a decode trace by the 13 kernels / 69 us layer budget",
            ("trace", "check", str(trace), "--budget", "gb300-tp16"),
            "The trace is synthetic: a generator wrote it, no GPU was involved.",
            may_fail=True,
        ),
        Step("Write the report", ("report", "--out", str(folder / "report"), "--study", str(study.parent),
                                  "--bundle", str(bundle), "--trace", str(trace))),
    ]  # fmt: skip


def steps_with_gpu(folder: Path, trials: int, gpu: str) -> list[Step]:
    """Everything measured that can be measured here, and the predicted study for GB300 beside it."""
    predicted, predicted_study = _tune(folder, "GB300", "predicted", trials)
    measured, study = _tune(folder, gpu, "measured", trials)
    studies = [study] if gpu == "GB300" else [study, predicted_study]
    bundle, trace = folder / "bundle", folder / "trace.json.gz"
    run = (
        "decode",
        "run",
        "--model",
        "demo",
        "--rows",
        "8",
        "--tokens",
        "8",
        "--bundle",
        str(bundle),
        "--trace",
        str(trace),
    )
    predict = Step(f"Tune for GB300 as well: {trials} configs, predicted", predicted, "Compiled for sm_103a, not run.")
    return [
        Step("What this machine can do", ("doctor",)),
        Step("Check the engines against their twin", ("check", FAMILY, *PROBLEM)),
        Step("Time the default config", ("time", FAMILY, *PROBLEM)),
        Step(f"Tune for {gpu}: {trials} configs, measured", measured),
        *([] if gpu == "GB300" else [predict]),
        Step("Export the winners as a bundle", ("export", *map(str, studies), "--out", str(bundle))),
        Step("Which launches of the real model the bundle tunes", ("decode", "plan", *PROBLEM, "--bundle", str(bundle), "--gpu", gpu)),
        Step("Run a demo model with the real widths of one TP16 rank", run, "Few layers, experts and words; weights are random."),
        Step(
            "Judge the trace of that run by the 13 kernels / 69 us layer budget",
            ("trace", "check", str(trace), "--budget", "gb300-tp16"),
            "The budget is GB300's: on another GPU the count is judged and the time is not.",
            may_fail=True,
        ),
        Step("Write the report", ("report", "--out", str(folder / "report"), "--study", str(study.parent),
                                  "--bundle", str(bundle), "--trace", str(trace), "--gpu", gpu)),
    ]  # fmt: skip


def run_step(step: Step, *, shown: bool) -> int:
    """Run one command in a process of its own; its output is shown as it comes, or kept back."""
    command = [sys.executable, "-m", f"{__package__}.main", *step.command]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.run(
            command, timeout=STEP_LIMIT_S, env=environment, stdout=None if shown else subprocess.DEVNULL
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"k3lab: the step did not end within {STEP_LIMIT_S:g} s", file=sys.stderr)
        return LATE


def run_steps(steps: Sequence[Step], *, shown: bool, console: Console) -> list[dict[str, Any]]:
    """Run them in order; the first that fails ends the demo."""
    results = []
    for number, step in enumerate(steps, 1):
        line = shlex.join(("k3lab", *step.command))
        if shown:
            console.print(f"\n[bold]{number}/{len(steps)}  {step.title}[/]", soft_wrap=True)
            console.print(f"$ {line}", style="cyan", markup=False, soft_wrap=True)
            if step.note:
                console.print(step.note, style="dim", markup=False, soft_wrap=True)
        started = time.monotonic()
        code = run_step(step, shown=shown)
        results.append(
            {"title": step.title, "command": line, "exit": code, "seconds": round(time.monotonic() - started, 1)}
        )
        if code and not (step.may_fail and code == 1):
            break
    return results


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("demo")
    def demo(
        out: Annotated[Path, typer.Option(help="Folder the demo writes to; emptied first if it is a demo's.")] = Path(
            "out/demo"
        ),
        trials: Annotated[int, typer.Option(help="Trials of a study.")] = 40,
        as_json: Json = False,
    ) -> None:
        """Do the main job once: check, tune, export, plan, run, judge a trace, report."""
        from ..kernels.device import discover
        from ..traces import synthesize
        from .output import console

        if trials < 1:
            raise InputError(f"trials is {trials}, must be at least 1")
        device = discover()
        prepare(out)
        if device is not None and device.card is not None:
            steps = steps_with_gpu(out, trials, device.card.name)
        else:
            steps = steps_without_gpu(out, trials)
            synthesize(out / "synthetic_trace.json.gz")
        screen = console()
        started = time.monotonic()
        results = run_steps(steps, shown=not as_json, console=screen)
        failed = next((item for item in results[-1:] if len(results) < len(steps)), None)
        data = {
            "ok": failed is None,
            "gpu": device.name if device else None,
            "seconds": round(time.monotonic() - started, 1),
            "report": str(out / "report" / "index.html") if failed is None else None,
            "steps": results,
        }
        (out / "demo.json").write_text(json.dumps(data, indent=2) + "\n")

        def render(screen: Console, data: dict[str, Any]) -> None:
            if failed:
                screen.print(
                    f"\nstopped: {failed['command']} exited with {failed['exit']}", markup=False, soft_wrap=True
                )
            else:
                screen.print(
                    f"\nDone in {data['seconds']:.0f} s. The report: {Path(data['report']).resolve()}", soft_wrap=True
                )

        emit(data, as_json, render)
        if failed:
            raise typer.Exit(1)
