"""``k3lab gate``: what a change does to kernels and to what is on record of them, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .tune import Jobs
from .words import counted

if TYPE_CHECKING:
    from rich.console import Console


def render(console: Console, data: dict[str, Any]) -> None:
    """Print what changed, then what is wrong."""
    if not data["engines"]:
        console.print(f"no engine has changed since {data['base'][:12]}", markup=False)
    else:
        console.print(
            f"since {data['base'][:12]}: {', '.join(data['engines'])}; {counted(data['compiled'], 'case')} compiled before and after",
            markup=False,
        )
    for one in data["cases"]:
        console.print(one["case"], markup=False)
        for line in one["changes"]:
            console.print(f"  {line}", markup=False)
    for line in data["stale"]:
        console.print(f"stale, and says so: {line}", markup=False)
    for line in data["faults"]:
        console.print(f"fail: {line}", markup=False)
    if data["outdated"]:
        console.print('measure again, or say so: k3lab gate --base REF --mark-stale "why"', markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("gate")
    def gate_command(
        base: Annotated[str, typer.Option("--base", help="Commit, branch or tag to compare the working tree with.")],
        results: Annotated[Path, typer.Option("--results", help="Folder of recorded results.")] = Path("results"),
        mark_stale: Annotated[
            str | None, typer.Option("--mark-stale", metavar="WHY", help="Write this reason into result files of changed kernels.")
        ] = None,
        jobs: Jobs = None,
        as_json: Json = False,
    ) -> None:  # fmt: skip
        """Fail on new spills, and on results of kernels that have changed since, unless they are marked stale."""
        from ..kernels import family
        from ..kernels.registry import FAMILIES
        from ..tuning.gate import gate
        from ..tuning.stale import mark, outdated
        from ..tuning.workers import check_jobs, default_jobs

        count = default_jobs() if jobs is None else jobs
        check_jobs(count)
        root = Path(__file__).resolve().parents[1]
        families = [family(name) for name in FAMILIES]
        if mark_stale:
            for one in outdated(results, families):
                if one.marked is None:
                    mark(one.path, [one.engine], mark_stale)
        found = outdated(results, families)
        data = gate(root, base, families, jobs=count)
        unmarked = [str(one) for one in found if one.marked is None]
        data |= {
            "stale": [f"{one} ({one.marked})" for one in found if one.marked is not None],
            "outdated": unmarked,
            "faults": [*data["faults"], *unmarked],
        }
        emit(data, as_json, render)
        raise typer.Exit(1 if data["faults"] else 0)
