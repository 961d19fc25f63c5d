"""``k3lab study``: look at a study, record a whole space as data, or replay samplers on one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .select import EngineName, Kind, Model, Rows, Tp
from .tune import (
    CompileLimit,
    FamilyName,
    Fix,
    Gpu,
    Jobs,
    MeasureLimit,
    Objective,
    Seed,
    Storage,
    StudyFile,
    exit_code,
    make_request,
    render_choice,
)
from .tune import render as render_tuned

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, help="Look at studies and at those of many machines, and record whole spaces as data."
)


def render(console: Console, data: dict[str, Any]) -> None:
    """Print a study."""
    from rich.table import Table

    identity = data["identity"]
    problem = " ".join(f"{name}={value}" for name, value in identity["problem"].items())
    console.print(
        f"{data['study']}: {identity['family']}/{identity['engine']} on {identity['gpu']}, {data['evidence']}",
        markup=False,
    )
    fixed = "".join(f", {name} held at {value}" for name, value in identity.get("fixed", {}).items())
    console.print(problem + fixed, markup=False)
    counts = ", ".join(f"{count} {status}" for status, count in data["statuses"].items()) or "none"
    running = f", {data['running']} running or left running" if data["running"] else ""
    console.print(f"{data['trials']} trials: {counts}{running}")
    if data["top"]:
        table = Table("trial", f"us ({data['evidence']})", "config", title="best trials")
        for trial in data["top"]:
            text = " ".join(f"{name}={value}" for name, value in trial["config"].items())
            table.add_row(str(trial["trial"]), f"{trial['value']:.2f}", text)
        console.print(table)
    if data["importance"]:
        table = Table("parameter", "share of the spread", title="importance, each alone")
        for name, share in data["importance"].items():
            table.add_row(name, f"{share:.0%}")
        console.print(table)
    if data["failures"]:
        table = Table("trials", "status", "reason", title="failures")
        for failure in data["failures"]:
            table.add_row(str(failure["trials"]), failure["status"], failure["reason"])
        console.print(table, markup=False)
    if data["choice"]:
        render_choice(console, data["choice"])


def render_record(console: Console, data: dict[str, Any]) -> None:
    """Print what was recorded."""
    if data["record"]:
        of = f" of {data['legal_configs']} legal ones" if data["legal_configs"] else ""
        console.print(f"recorded {data['configs']} configs{of} ({data['evidence']}) in {data['record']}", markup=False)
    render_tuned(console, data)


@app.command("show")
def show_command(
    study: Annotated[Path, typer.Argument(help="Study file.")],
    top: Annotated[int, typer.Option("--top", min=1, help="Best trials to list.")] = 10,
    as_json: Json = False,
) -> None:
    """Trials, the best of them, what the parameters did, failures by reason, and the choice; also while a tuner is writing."""
    from ..tuning.show import show

    emit(show(study, top), as_json, render)


@app.command("watch")
def watch_command(
    storage: Storage = None,
    study: Annotated[str | None, typer.Option("--study", help="Only the study of that name.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between two looks.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Workers, rate, best and time left of the studies in a database; --json prints once."""
    from .watch import watch

    watch(needed(storage), study, once or as_json, every, as_json)


@app.command("pull")
def pull_command(
    storage: Storage = None,
    study: Annotated[str | None, typer.Option("--study", help="Only the study of that name.")] = None,
    studies: Annotated[Path, typer.Option("--studies", help="Folder that gets a file a study.")] = Path("studies"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Rename files that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Copy the studies of a database into files, for `study show`, `tune-table`, `export` and the report."""
    from ..tuning.pull import pull
    from .watch import render_pulled

    emit({"studies": pull(needed(storage), studies, study, fresh=fresh)}, as_json, render_pulled)


def needed(storage: str | None) -> str:
    """The address.

    Raises:
        InputError: there is none.
    """
    from ..kernels import env
    from ..kernels.errors import InputError

    storage = storage or env.storage()
    if storage is None:
        raise InputError("name the database: --storage postgresql://user@host/database, or K3LAB_STORAGE")
    return storage


@app.command("record")
def record_command(
    family: FamilyName,
    out: Annotated[Path, typer.Option("--out", help="File to write, .json.gz.")],
    tp: Tp = 16,
    rows: Rows = 8,
    kind: Kind = None,
    model: Model = "k3",
    gpu: Gpu = None,
    engine: EngineName = None,
    objective: Objective = None,
    sample: Annotated[int | None, typer.Option("--sample", help="Configs to draw (default: all legal ones).")] = None,
    fix: Fix = None,
    study: StudyFile = None,
    seed: Seed = 0,
    compile_limit: CompileLimit = 120.0,
    measure_limit: MeasureLimit = 90.0,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Evaluate a whole space, or a fair sample of it, and keep every outcome with its environment as data."""
    from ..tuning.progress import for_terminal
    from ..tuning.record import record

    request = make_request(
        family,
        model,
        tp,
        rows,
        kind,
        gpu,
        engine,
        objective,
        study,
        seed,
        compile_limit,
        measure_limit,
        fix=fix,
        jobs=jobs,
    )
    data = record(request, out, sample=sample, progress=for_terminal(as_json)).to_json()
    emit(data, as_json, render_record)
    raise typer.Exit(exit_code(data))


@app.command("replay")
def replay_command(
    recordings: Annotated[list[Path], typer.Argument(help="Recorded spaces, .json.gz.")],
    sampler: Annotated[
        list[str] | None, typer.Option("--sampler", help="Only these: random, tpe, guided; repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds of each sampler.")] = 20,
    as_json: Json = False,
) -> None:
    """Run samplers on recorded spaces without a GPU: regret against the true best, and evaluations until within 3 % of it."""
    from ..tuning.replay import SAMPLERS, SHARE, WITHIN, Recorded, replay, verdicts

    spaces = [Recorded.load(path) for path in recordings]
    rows = replay(spaces, sampler or list(SAMPLERS), seeds)
    found = verdicts(rows)
    words = {one.name: str(one.data["evidence"]) for one in spaces}
    emit(
        {"within": WITHIN, "bar_share": SHARE, "evidence": words, "rows": rows, "verdicts": found},
        as_json,
        render_replay,
    )
    raise typer.Exit(1 if any(not one["within_bar"] or one["random_beaten"] is False for one in found) else 0)


def render_replay(console: Console, data: dict[str, Any]) -> None:
    """Print how samplers did, and which one a family gets."""
    from rich.table import Table

    table = Table(
        "space", "evidence", "configs", "sampler", f"evaluations to {data['within']:.0%} (median, most)", "of the space",
        f"regret after {data['bar_share']:.0%}", title="samplers on recorded spaces",
    )  # fmt: skip
    for row in data["rows"]:
        table.add_row(
            row["space"], data["evidence"][row["space"]], str(row["configs"]), row["sampler"], f"{row['evaluations']:g}, {row['most_evaluations']}", f"{row['share']:.1%}",
            f"{row['regret']:.1%}",
        )  # fmt: skip
    console.print(table)
    for one in data["verdicts"]:
        on = (
            f"chosen on {', '.join(one['chosen_on'])}"
            if one["chosen_on"]
            else "the default: no other family is recorded"
        )
        beaten = {True: ", random search is beaten", False: ", random search is NOT beaten", None: ""}[
            one["random_beaten"]
        ]
        small = "" if one["whole_space"] else "; fewer than 200 configs were recorded"
        if data["evidence"][one["space"]] != "measured":
            small += "; its times are predicted by the model that the guided sampler follows"
        kept = "keeps" if one["within_bar"] else "MISSES"
        console.print(
            f"{one['space']}: {one['sampler']} ({on}) {kept} the bar of {data['bar_share']:.0%} with {one['share']:.1%}{beaten}{small}", markup=False,
        )  # fmt: skip


@app.command("in-situ")
def in_situ_command(
    tp: Tp = 16,
    rows: Rows = 8,
    model: Model = "k3",
    studies: Annotated[Path, typer.Option("--studies", help="Folder of the measured studies.")] = Path("studies"),
    only: Annotated[list[str] | None, typer.Option("--family", help="Only this family; repeatable.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Time each family's three best configs inside the captured layer, one replacement at a time; export takes the winner there."""
    import sys

    from ..kernels.device import require
    from .in_situ import in_situ, render
    from .select import model_card

    gpu = require("timing inside the layer").need_card()

    def say(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr, flush=True)

    emit(
        in_situ(model_card(model), gpu, studies, tp=tp, rows=rows, only=only or (), seed=seed, say=say), as_json, render
    )
