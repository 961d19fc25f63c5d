"""``k3lab trace figure``: one layer by stream against its budget, as an HTML page, SVG or PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit, write_file
from .trace_words import Gpu, Layers, MaybeBudget, Names, Plan, Rows, Tp

if TYPE_CHECKING:
    from rich.console import Console

_KINDS = (".html", ".svg", ".png")


def render(console: Console, data: dict[str, Any]) -> None:
    """Say what was drawn."""
    console.print(f"wrote {data['out']}: {data['title']}", markup=False)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


def register(app: typer.Typer) -> None:
    """Add ``figure`` to the group of ``k3lab trace``."""

    @app.command("figure")
    def figure_command(
        file: Annotated[Path, typer.Argument(help="A trace, as for check.")],
        out: Annotated[Path, typer.Option("--out", help="Figure to write: .html, .svg or .png.")],
        layer: Annotated[int | None, typer.Option("--layer", help="Number of the layer.")] = None,
        class_name: Annotated[
            str | None, typer.Option("--class", help="Class, whose most typical layer is shown.")
        ] = None,
        budget: MaybeBudget = None,
        device: Annotated[int | None, typer.Option("--device", help="Device, where the trace has several.")] = None,
        gpu: Gpu = None,
        tp: Tp = None,
        rows: Rows = None,
        layers: Layers = None,
        plan: Plan = None,
        names: Names = None,
        as_json: Json = False,
    ) -> None:
        """Draw one layer by stream against its budget; without --layer or --class the one furthest over, or the slowest."""
        from ..kernels.errors import InputError
        from ..traces.figure import layer_figure
        from .trace_layout import lay_out
        from .trace_png import png
        from .trace_svg import page, svg

        if out.suffix not in _KINDS:
            raise InputError(f"cannot draw {out}: the name must end in {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
        if any(_same(given, out) for given in (file, plan) if given is not None):
            raise InputError(f"{out} is what the figure is made from; name another file")
        said = {"gpu": gpu, "tp": tp, "rows": rows}  # what a budget is held by; without one there is nothing to hold
        if budget is None and any(value is not None for value in said.values()):
            raise InputError("--gpu, --tp and --rows say whether a budget fits; give --budget too")
        found = layer_figure(
            file,
            budget=budget,
            layer=layer,
            class_name=class_name,
            device=device,
            layers=layers,
            plan=plan,
            names=names,
            **(said if budget is not None else {}),
        )
        layout = lay_out(found)
        made = png(layout) if out.suffix == ".png" else (page if out.suffix == ".html" else svg)(layout).encode()
        write_file(out, made)
        data = {
            "out": out, "title": layout.title, "layer": found.number, "class": found.class_name, "kernels": len(found.bars),
            "completion_period_ns": found.period_ns, "budget_ns": found.budget_ns, "gap_ns": found.gap_ns,
            "verdict": found.verdict, "synthetic": found.synthetic,
        }  # fmt: skip
        emit(data, as_json, render)
