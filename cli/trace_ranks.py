"""``k3lab trace ranks``: the ranks of one run side by side, and who waited for whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import Gpu, Layers, MaybeBudget, Names, Plan, Rows, Tp, line, lines, titled, us, word

if TYPE_CHECKING:
    from rich.console import Console

_LAYERS_SHOWN = 8


def _ranks(data: dict[str, Any]) -> Any:
    from rich.markup import escape

    judged = data["budget"] is not None
    gpus = list(dict.fromkeys(row["gpu"] or "GPU not named" for row in data["ranks"]))
    alike = len(gpus) == 1  # then one word in the title leaves the room to the file
    title = f"Ranks ({gpus[0]})" if alike else "Ranks"
    table = titled(title, ("rank", "file", *([] if alike else ["GPU"]), *(["verdict"] if judged else [])),
                   ("steps", "step us", "layers", "slowest us"))  # fmt: skip
    for row in data["ranks"]:
        periods = row["completion_periods_ns"]
        numbers = (str(row["steps"]), us(row["step_ns"]), str(row["layers"]), us(max(periods, default=None)))
        told = [word(row["verdict"], row["synthetic"])] if judged else []
        gpu = [] if alike else [escape(row["gpu"] or "GPU not named")]
        table.add_row(str(row["rank"]), escape(row["file"]), *gpu, *told, *numbers)
    return table


def _spread(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.markup import escape

    table = titled(title, ("name",), ("largest", "smallest", "spread", "slowest rank"))
    for row in rows:
        kind = f" ({row['kind']})" if row.get("kind") else ""
        name = f"class {row['name']}{kind}, {row['layers']} layers" if "layers" in row else row["name"]
        table.add_row(escape(name), us(row["largest_ns"]), us(row["smallest_ns"]), us(row["spread_ns"]),
                      "-" if row["slowest_rank"] is None else str(row["slowest_rank"]))  # fmt: skip
    return table


def _waits(console: Console, skew: dict[str, Any]) -> None:
    if skew["refused"]:
        line(console, f"Who waited for whom: not said; {skew['refused']}")
        return
    table = titled("Who waited for whom (us a step, medians)", ("rank",),
                   ("made the others wait", "waited itself", "last to arrive"))  # fmt: skip
    for row in sorted(skew["ranks"], key=lambda row: (-row["caused_ns"], row["rank"])):
        table.add_row(
            str(row["rank"]), us(row["caused_ns"]), us(row["waited_ns"]), f"{row['last']} of {skew['collectives']}"
        )
    console.print(table)
    console.print(
        f"clocks brought together by {skew['collectives']} collectives in {skew['steps']} steps, "
        f"{us(skew['residual_ns'])} us left over; waiting a step whose cause is unclear: {us(skew['undecided_ns'])} us",
        markup=False,
    )
    for row in skew["transfers"]:
        console.print(
            f"  {row['name']}: {row['each_step']} a step, transfer about {us(row['shortest_ns'])} us", markup=False
        )


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the verdict, the ranks, their spread, and the waiting."""
    world = f" of {data['world']}" if data["world"] else ""
    head = f"{len(data['ranks'])}{world} ranks"
    if data["budget"]:
        console.print(
            f"{word(data['verdict'], data['synthetic'])} {head} against {data['budget']['name']}", highlight=False
        )
    else:
        console.print(head, markup=False)
    lines(console, "Reasons", data["reasons"])
    console.print(_ranks(data))
    if data["classes"]:
        console.print(_spread("Completion period by class over ranks, us", data["classes"]))
        worst = sorted(data["layers"], key=lambda row: (-row["spread_ns"], row["number"]))[:_LAYERS_SHOWN]
        console.print(_spread("Layers with the largest spread over ranks, us", worst))
    _waits(console, data["skew"])
    lines(console, "Notes", data["notes"])


def register(app: typer.Typer) -> None:
    """Add ``ranks`` to the group of ``k3lab trace``."""

    @app.command("ranks")
    def ranks(
        files: Annotated[list[Path], typer.Argument(help="Traces, one a rank, or files that hold several.")],
        budget: MaybeBudget = None,
        world: Annotated[
            int | None, typer.Option("--world", help="Ranks of the run, where the files do not say.")
        ] = None,
        gpu: Gpu = None,
        tp: Tp = None,
        rows: Rows = None,
        layers: Layers = None,
        plan: Plan = None,
        names: Names = None,
        as_json: Json = False,
    ) -> None:
        """Compare the ranks of one run: layer times, their spread, and who waited for whom; a pass needs all ranks."""
        from ..traces.ranks import check_ranks

        report = check_ranks(
            files, budget, world=world, layers=layers, gpu=gpu, tp=tp, rows=rows, plan=plan, names=names
        )
        emit(report.to_json(), as_json, render)
        if budget is not None and report.verdict != "pass":
            raise typer.Exit(1)
