"""``k3lab tune --layer``: all families, kinds and rows of a layer."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from .output import emit

if TYPE_CHECKING:
    from rich.console import Console

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
LAYER_ROWS = "1-8,12,16,24,32,48,64"
"""Row counts where none are named."""


def duration(text: str) -> float:
    """Seconds of ``48h``, ``90m``, ``1h30m`` or ``45s``.

    Raises:
        InputError: it is none of these, or nothing.
    """
    from ..kernels.errors import InputError

    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text.strip() or seconds <= 0:
        raise InputError(f"--for is a time such as 48h, 1h30m or 45s, not {text!r}")
    return seconds


def tune_all(
    model: str, tp: int, rows: str | None, kind: str | None, gpu: str | None, objective: str | None, trials: int, seed: int,
    compile_limit: float, measure_limit: float, jobs: int | None, gpus: int, for_s: float | None, storage: str | None, as_json: bool,
) -> NoReturn:  # fmt: skip
    """Tune a layer, print what became of each problem, and end.

    Raises:
        InputError: an option is wrong.
    """
    from ..kernels import family, family_names
    from ..kernels.errors import InputError
    from ..tuning.layer import LayerRequest, tune_layer
    from ..tuning.shared_study import Shared
    from ..tuning.supervisor import Limits
    from ..tuning.workers import default_jobs
    from .select import model_card
    from .table import numbers
    from .tune import target

    if kind:
        raise InputError("--layer tunes all kinds: leave --kind out")
    card, aim = target(gpu, objective)
    request = LayerRequest(
        model_card(model), tp, tuple(numbers(LAYER_ROWS if rows is None else rows, "--rows")), card, aim, trials,  # type: ignore[arg-type]
        tuple(family(name) for name in family_names()), seed=seed, limits=Limits(compile_s=compile_limit, measure_s=measure_limit),
        jobs=default_jobs() if jobs is None else jobs, gpus=gpus, for_s=for_s, shared=Shared(storage) if storage else None,
    )  # fmt: skip

    def say(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr, flush=True)

    data = tune_layer(request, say)
    emit(data, as_json, render)
    if data["ended"] == "interrupted":
        raise typer.Exit(130)
    raise typer.Exit(
        0 if data["ended"] == "budget" or not any(one["state"] == "missing" for one in data["queue"]) else 1
    )


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the queue with what became of it."""
    from rich.table import Table

    table = Table(
        "family", "problem", "gain", "default (predicted)", "floor", "state", f"us ({data['evidence']})", "engine",
        title=f"layer at TP{data['tp']} on {data['gpu']}, what promises most first (microseconds a layer)",
    )  # fmt: skip
    for one in data["queue"]:
        default, us = one["default_us"], one.get("us")
        table.add_row(
            one["family"], one["label"], f"{one['gain_us']:.2f}", "-" if default is None else f"{'~' if one['interpolated'] else ''}{default:.2f}", f"{one['floor_us']:.2f}",
            one["state"], "-" if us is None else f"{us:.2f}", one.get("engine", "-"),
        )  # fmt: skip
    console.print(table)
    for one in data["queue"]:
        if one["state"] == "missing":
            console.print(f"missing: {one['family']} {one['label']}: {one['why']}", markup=False)
    if data["ended"] != "done":
        why = "the time is spent" if data["ended"] == "budget" else "interrupted"
        console.print(f"{why}: the same command goes on where it stopped", markup=False)
