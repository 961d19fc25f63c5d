"""``k3lab trace kernels``: what Nsight Compute measured of each launch; kernels one by one, and no layer time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .trace_words import Names, Plan, count, lines, titled

if TYPE_CHECKING:
    from rich.console import Console

_NONE = "not measured"
_COLUMNS = (
    ("us", "duration_ns", 1e3, 2), ("DRAM read MB", "dram_read_bytes", 1e6, 3),
    ("written MB", "dram_written_bytes", 1e6, 3), ("GB/s", "dram_bytes_per_s", 1e9, 1), ("DRAM %", "dram_percent", 1, 1),
    ("registers", "registers", 1, 0), ("static smem", "shared_static_bytes", 1, 0),
    ("dynamic smem", "shared_dynamic_bytes", 1, 0),
)  # fmt: skip
"""Title, key, unit and digits of what a launch may have; a column that no launch has is told in a note."""
_NO_LAYER_TIME = "launches ran one by one under Nsight Compute: durations compare kernels and are no layer time"


def _number(value: float | None, unit: float = 1, digits: int = 0) -> str:
    return _NONE if value is None else f"{value / unit:.{digits}f}"


def render_kernels(console: Console, data: dict[str, Any]) -> None:
    """Print one row a launch."""
    from rich.markup import escape

    from ..traces.names import short_name

    gpus = ", ".join(data["gpus"]) or "GPU not named"
    console.print(f"{data['file']}: {data['format']}, {count(len(data['launches']), 'launch', 'launches')}, {gpus}",
                  markup=False)  # fmt: skip
    measured = [item for item in _COLUMNS if any(row[item[1]] is not None for row in data["launches"])]
    table = titled("Launches", ("launch", "kernel", "family"), [column for column, *_ in measured])
    for row in data["launches"]:
        figures = (_number(row[key], unit, digits) for _, key, unit, digits in measured)
        table.add_row(row["launch"], escape(short_name(row["name"], 48)), row["family"] or "?", *figures)
    console.print(table)
    missing = [item[0] for item in _COLUMNS if item not in measured]
    lines(console, "Notes", [*([f"{_NONE}: {', '.join(missing)}"] if missing else []), *data["notes"]])


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("kernels")
    def kernels(
        file: Annotated[Path, typer.Argument(help="Output of ncu --csv, or a .ncu-rep.")],
        plan: Plan = None,
        names: Names = None,
        as_json: Json = False,
    ) -> None:
        """Show what Nsight Compute measured of each launch: time, DRAM bytes, registers, shared memory."""
        from ..traces.families import gather_names
        from ..traces.readers.opening import read_ncu
        from .output import plain

        known = gather_names(plan, names)
        report = read_ncu(file)
        data = {
            "file": report.path,
            "format": report.format,
            "gpus": list(report.gpus),
            "launches": [plain(item) | {"family": known.family(item.name)} for item in report.launches],
            "notes": [_NO_LAYER_TIME, *report.notes],
        }
        emit(data, as_json, render_kernels)
