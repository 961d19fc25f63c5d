"""``k3lab trace kernels``: what Nsight Compute measured of each launch; kernels one by one, and no layer time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import lines

if TYPE_CHECKING:
    from rich.console import Console

_NONE = "not measured"
_NO_LAYER_TIME = "launches ran one by one under Nsight Compute: durations compare kernels and are no layer time"


def _number(value: float | None, unit: float = 1, digits: int = 0) -> str:
    return _NONE if value is None else f"{value / unit:.{digits}f}"


def render_kernels(console: Console, data: dict[str, Any]) -> None:
    """Print one row a launch."""
    from rich.markup import escape
    from rich.table import Table

    from ..traces.names import short_name

    gpus = ", ".join(data["gpus"]) or "GPU not named"
    console.print(f"{data['file']}: {data['format']}, {len(data['launches'])} launches, {gpus}", markup=False)
    table = Table(title="Launches", title_justify="left")
    for column in ("launch", "kernel", "family"):
        table.add_column(column, overflow="fold")
    for column in ("us", "DRAM read MB", "written MB", "GB/s", "DRAM %", "registers", "static smem", "dynamic smem"):
        table.add_column(column, justify="right")
    for row in data["launches"]:
        table.add_row(
            row["launch"], escape(short_name(row["name"], 48)), row["family"] or "",
            _number(row["duration_ns"], 1e3, 2), _number(row["dram_read_bytes"], 1e6, 3),
            _number(row["dram_written_bytes"], 1e6, 3), _number(row["dram_bytes_per_s"], 1e9, 1),
            _number(row["dram_percent"], 1, 1), _number(row["registers"]), _number(row["shared_static_bytes"]),
            _number(row["shared_dynamic_bytes"]),
        )  # fmt: skip
    console.print(table)
    lines(console, "Notes", data["notes"])


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("kernels")
    def kernels(
        file: Annotated[Path, typer.Argument(help="Output of ncu --csv, or a .ncu-rep.")],
        plan: Annotated[Path | None, typer.Option("--plan", help="JSON that maps kernel names to families.")] = None,
        as_json: Json = False,
    ) -> None:
        """Show what Nsight Compute measured of each launch: time, DRAM bytes, registers, shared memory."""
        from ..traces.families import family_of, read_plan
        from ..traces.readers.opening import read_ncu
        from .output import plain

        families = read_plan(plan) if plan is not None else None
        report = read_ncu(file)
        data = {
            "file": report.path,
            "format": report.format,
            "gpus": list(report.gpus),
            "launches": [plain(item) | {"family": family_of(item.name, families)} for item in report.launches],
            "notes": [_NO_LAYER_TIME, *report.notes],
        }
        emit(data, as_json, render_kernels)
