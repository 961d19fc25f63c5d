"""A trace as a notebook shows it: verdict, the costliest findings, one family's share, a typical layer drawn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..kernels import InputError, Problem
from ..kernels.device import discover
from .shown import Shown


def default_budget(gpu: str | None, tp: int) -> str:
    """The budget that fits a GPU and TP size, or the target's."""
    from ..traces.budget import load_budget
    from ..traces.errors import TraceError

    name = f"{(gpu or 'gb300').lower()}-tp{tp}"
    try:
        load_budget(name)
    except TraceError:
        return "gb300-tp16"
    return name


def made_trace(folder: Path, problem: Problem) -> tuple[Path, str]:
    """A trace of the demo model on the GPU here, or a synthetic one, and which of both in words.

    Raises:
        InputError: the demo model did not run.
    """
    from ..traces import synthesize
    from .demo import Step, run_step

    if discover() is None:
        return synthesize(folder / "synthetic_trace.json.gz", layers=8, steps=12), "a synthetic trace, no GPU here"
    path = folder / "trace.json.gz"
    command = ("decode", "run", "--model", "demo", "--rows", str(problem.rows), "--tokens", "8", "--trace", str(path))
    if run_step(Step("trace", command), shown=False) or not path.is_file():
        raise InputError(f"no trace was made; `k3lab {' '.join(command)}` says why")
    return path, "the demo model"


def shown_trace(family: str, problem: Problem, path: Path | None, budget: str | None) -> Shown:
    """The trace against its budget; without a path one is made.

    Args:
        family: whose share is told.
        problem: its TP size chooses the budget, its rows those of the demo model.
        path: a trace of any kind that ``k3lab trace check`` opens.
        budget: by name or path; by default the one that fits the GPU here.

    Raises:
        TraceError: no usable trace, or no such budget.
    """
    here = discover()
    named = budget or default_budget(here.card.name if here and here.card else None, problem.tp)
    if path is not None:
        return _shown(family, path, named, path.name)
    with tempfile.TemporaryDirectory() as folder:
        made, words = made_trace(Path(folder), problem)
        return _shown(family, made, named, words)


def _shown(family: str, path: Path, budget: str, title: str) -> Shown:
    from ..traces.errors import TraceError
    from ..traces.figure import layer_figure
    from .trace_layout import lay_out
    from .trace_svg import inline_svg
    from .verdict_data import verdict_data

    data: dict[str, Any] = verdict_data(path, budget)
    rows: list[tuple[str, Any]] = [("verdict", data["word"]), ("because", data["line"])]
    rows += [(f"finding {place}", text) for place, text in enumerate(data["findings"][:3], 1)]
    for group in data["classes"]:
        own = [kernel["us"] for kernel in group["all"] if kernel["family"] == family]
        if own:
            of = f"{sum(own):.1f} of {group['us']:.1f} us in {len(own)} of {group['count']} kernels"
            rows.append((f"{family} in {(group['kind'] or 'unknown').upper()}", of))
    try:
        drawing = inline_svg(lay_out(layer_figure(path, budget=budget)))
    except TraceError as error:
        drawing = ""
        rows.append(("not drawn", str(error)))
    return Shown(f"trace of {title} against {budget}", data, rows, drawing=drawing)
