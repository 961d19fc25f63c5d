"""``k3lab kernels``: the families of the model, their engines, and what is known of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console


def family_rows(results: Path) -> list[dict[str, Any]]:
    """One row a registered family: title, kinds, twin, engines with their architectures, evidence on record.

    A family that cannot be loaded (a broken package of somebody's) has a row that says why, under ``problem``.
    """
    from ..kernels import InputError, family, family_names
    from .recorded import evidence_of

    rows: list[dict[str, Any]] = []
    for name in family_names():
        try:
            found = family(name)
        except InputError as error:
            title = f"cannot be loaded: {' '.join(str(error).split())}"
            rows.append({"family": name, "title": title, "kinds": [], "twin": "no", "engines": [], "evidence": [],
                         "problem": str(error)})  # fmt: skip
            continue
        rows.append({
            "family": name,
            "title": found.title,
            "kinds": list(found.kinds),
            "twin": "yes",
            "engines": [
                {"name": engine.name, "compiler": engine.compiler, "archs": list(engine.archs),
                 "default": engine.name == found.default_engine}
                for engine in found.engines
            ],
            "evidence": evidence_of(name, results),
            "problem": None,
        })  # fmt: skip
    return rows


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the table of families."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Kernel families of the Kimi K3 decode step", title_justify="left")
    for column in ("family", "what it computes", "twin", "engines", "architectures", "evidence on record"):
        table.add_column(column, overflow="fold")
    for row in data["families"]:
        engines = "\n".join(engine["name"] + (" (default)" if engine["default"] else "") for engine in row["engines"])
        archs = "\n".join(" ".join(engine["archs"]) for engine in row["engines"])
        known = "\n".join(dict.fromkeys(f"{entry['gpu']}: {entry['evidence']}" for entry in row["evidence"]))
        none = "-" if row["problem"] else "none yet"
        title = f"[red]{escape(row['title'])}[/]" if row["problem"] else escape(row["title"])
        table.add_row(row["family"], title, row["twin"], engines or none, archs or "-", known or "none")
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("kernels")
    def kernels(
        results: Path = typer.Option(Path("results"), help="Folder of recorded results."),
        as_json: Json = False,
    ) -> None:
        """List the kernel families: twin, engines, architectures, evidence."""
        emit({"families": family_rows(results)}, as_json, render)
