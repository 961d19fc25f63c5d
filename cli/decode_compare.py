"""``k3lab decode compare``: ratios of two reports, or the field that forbids one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .decode_bench_view import FEW, behind, marked, times_better
from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console


def compare_command(
    a: Path = typer.Argument(help="A report of `decode bench --out`: what is compared with."),
    b: Path = typer.Argument(help="The other report."),
    as_json: Json = False,
) -> None:
    """Give ratios of B to A if all that decides a number but the backend was the same; else name the fields and exit 1."""
    from ..decode.evaluation.compare import compare, read_report

    data = compare(read_report(a), read_report(b))
    emit(data, as_json, render_compare)
    if not data["comparable"]:
        raise typer.Exit(1)


def render_compare(console: Console, data: dict[str, Any]) -> None:
    """The conditions and a line a measure, or a line a field."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if not data["comparable"]:
        say(f"no ratio: {data['a']} and {data['b']} were not made under the same conditions")
        for one in data["different"]:
            say(f"  {one['field']}: {one['a']} and {one['b']}" + (f" ({one['why']})" if one["why"] else ""))
        return
    say("both: " + ", ".join(f"{name} {value}" for name, value in data["conditions"].items()))
    table = Table("measure", *(f"{key.upper()}: {name or 'backend unknown'}" for key, name in zip("ab", data["backends"], strict=True)), "unit", "times better", "samples")  # fmt: skip
    for name, one in data["ratios"].items():
        cells = (marked(f"{one[key]:.4g}", covered) for key, covered in zip("ab", one["tail_covered"], strict=True))
        table.add_row(name, *cells, one["unit"], times_better(one) or "-", behind(one["samples"]))
    console.print(table)
    if not all(own for one in data["ratios"].values() for own in one["tail_covered"]):
        say(FEW)
    if data["left_out"]:
        say(f"left out, not in both: {', '.join(data['left_out'])}")
