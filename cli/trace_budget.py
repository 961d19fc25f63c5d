"""``k3lab trace budget``: the budgets there are, one of them in figures, or one derived for a GPU, TP and rows of yours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit, write_file
from .trace_words import line, lines, titled, us

if TYPE_CHECKING:
    from rich.console import Console

_CONDITIONS = ("gpu", "tp", "rows")
_LARGEST = 4096


def derive(gpu: str, tp: int, rows: int) -> dict[str, Any]:
    """A budget for another GPU, TP or number of rows, as the package's own derived ones were made.

    Raises:
        InputError: no card of such a GPU, or the model cannot be split so.
    """
    from ..kernels.errors import InputError
    from ..kernels.gpu_cards import gpu_card
    from . import budget_files

    card = gpu_card(gpu)
    if not 1 <= rows <= _LARGEST:
        raise InputError(f"--rows is {rows}; a step has 1 to {_LARGEST} rows")
    made = budget_files.derived(card, tp, rows)
    made["name"] = f"{card.name.lower()}-tp{tp}-rows{rows}"
    made["conditions"].append(f"read bandwidth of the {card.name}: {card.read_bandwidth_source}")
    return made


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the list of budgets, or one of them with its shares."""
    from rich.markup import escape

    for budget in data["budgets"]:
        rows = f"{budget['rows']} rows" if budget["rows"] else "any rows"
        line(console, f"{budget['name']}: {budget['gpu']}, TP{budget['tp']}, {rows}, {budget['evidence'] or 'yours'}")
        for kind, limit in budget["layers"].items():
            figures = [f"{limit['kernels']} kernels"] if limit["kernels"] else []
            figures += [f"{us(limit['period_ns'])} us"] if limit["period_ns"] else []
            line(console, f"{kind} layer: {', '.join(figures)}", "  ")
    if len(data["budgets"]) == 1:
        budget = data["budgets"][0]
        for kind, limit in budget["layers"].items():
            if shares := limit.get("families"):
                table = titled(f"Shares of a {kind} layer", ("family",), ("kernels", "us"))
                for name, share in shares.items():
                    table.add_row(escape(name), str(share["kernels"] or "-"), us(share["period_ns"]))
                console.print(table)
        split = budget["split"]
        notes = [*([budget["source"]] if budget["source"] else []), *budget["conditions"]]
        lines(console, "Notes", [*notes, *([f"shares are {split['evidence']}: {split['rule']}"] if split else [])])
    if data["out"]:
        line(console, f"wrote {data['out']}; k3lab trace check FILE --budget {data['out']}")


def register(app: typer.Typer) -> None:
    """Add ``budget`` to the group of ``k3lab trace``."""

    @app.command("budget")
    def budget_command(
        name: Annotated[str | None, typer.Argument(help="A budget's name, or its JSON file. Default: all.")] = None,
        gpu: Annotated[str | None, typer.Option("--gpu", help="Derive one for this GPU, as H200.")] = None,
        tp: Annotated[int | None, typer.Option("--tp", help="And this tensor-parallel size.")] = None,
        rows: Annotated[int | None, typer.Option("--rows", help="And so many rows (tokens) of a step.")] = None,
        out: Annotated[Path | None, typer.Option("--out", help="JSON file to write it to.")] = None,
        as_json: Json = False,
    ) -> None:
        """List the budgets, show one, or derive one for a GPU, TP and rows of yours from the published layer."""
        from ..kernels.errors import InputError
        from ..traces.budget import budget_names, load_budget, parse_budget

        said = [word for word, value in zip(_CONDITIONS, (gpu, tp, rows), strict=True) if value is not None]
        if said and name is not None:
            raise InputError("give the name of a budget, or --gpu, --tp and --rows to derive one")
        if out is not None and out.suffix != ".json":
            raise InputError(f"cannot write {out}: the name must end in .json")
        if gpu is not None and tp is not None and rows is not None:
            found = [derive(gpu, tp, rows)]
            parse_budget(found[0])
        elif said:
            missing = [f"--{word}" for word in _CONDITIONS if word not in said]
            raise InputError(f"a derived budget needs {', '.join(missing)} too")
        else:
            found = [load_budget(word).to_json() for word in ([name] if name is not None else budget_names())]
        if out is not None:
            if len(found) != 1:
                raise InputError("--out takes one budget: name one, or derive it with --gpu, --tp and --rows")
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, json.dumps(found[0], indent=1) + "\n")
        emit({"budgets": found, "out": out}, as_json, render)
