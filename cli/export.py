"""``k3lab export``: write bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .words import counted

if TYPE_CHECKING:
    from rich.console import Console


def render_entries(console: Console, data: dict[str, Any]) -> None:
    """Print a bundle's entries."""
    from rich.table import Table

    path = data.get("bundle") or data["path"]
    if predicted := len(data["predicted_entries"]):
        are, them = ("is", "it") if predicted == 1 else ("are", "them")
        entries = counted(predicted, "entry", "entries")
        console.print(f"{entries} {are} only predicted; running {them} needs --accept predicted:")
        for label in data["predicted_entries"]:
            console.print(f"  {label}", markup=False)
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in data["entries"]:
        key = " ".join(f"{name}={value}" for name, value in entry["key"].items())
        groups.setdefault((entry["family"], key, entry["gpu"]), []).append(entry)
    console.print(str(path), markup=False)
    for (family, key, gpu), group in groups.items():
        table = Table(
            "rows", "engine", "config", "us", "evidence", "default us", "cubins", title=f"{family} {key} on {gpu}"
        )
        for entry in sorted(group, key=lambda one: int(one["rows"])):
            default = entry["choice"]["default_us"]
            table.add_row(
                f"<={entry['rows']}",
                entry["engine"],
                " ".join(f"{name}={value}" for name, value in entry["config"].items()),
                f"{entry['choice']['value_us']:.2f}",
                entry["evidence"],
                "-" if default is None else f"{default:.2f}",
                " ".join(f"{build['arch']} ({build['evidence']})" for build in entry["builds"]),
            )
        console.print(table)
    for line in data.get("passed_over", ()):
        console.print(f"passed over: {line}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("export")
    def export_command(
        studies: Annotated[list[Path], typer.Argument(help="Study files, measured or predicted, or folders of them.")],
        out: Annotated[Path, typer.Option("--out", help="Bundle directory to write.")],
        arch: Annotated[
            list[str] | None, typer.Option("--arch", help="Also build for this architecture, e.g. sm_90a.")
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
        add: Annotated[bool, typer.Option("--add", help="Keep the other entries of a bundle that is there.")] = False,
        as_json: Json = False,
    ) -> None:
        """Write the winners of studies as a bundle: cubins, launches, configs, evidence, checksums."""
        from ..tuning.export import export

        emit(export(studies, out, archs=arch or (), force=force, add=add).to_json(), as_json, render_entries)
