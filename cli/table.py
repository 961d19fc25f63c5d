"""``k3lab tune-table``: studies of many problems and engines, and the engine that wins each problem."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .select import KIND_HELP, Model
from .tune import CompileLimit, FamilyName, Fix, Gpu, Gpus, Jobs, MeasureLimit, Objective, Seed

if TYPE_CHECKING:
    from rich.console import Console

    from ..kernels.contract import Engine, Family, Problem
    from ..kernels.gpu_cards import GpuCard
    from ..kernels.space import Config

MOST_NUMBERS = 1024


def numbers(text: str, option: str) -> list[int]:
    """``1-8,12`` as numbers, each once, in ascending order.

    Raises:
        InputError: no numbers and ranges between commas, a range that runs backwards, or too many.
    """
    from ..kernels.errors import InputError

    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", part)
        if not match:
            raise InputError(f"{option} is a list of numbers and ranges such as 1-8,12,16, not {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise InputError(f"{option} has the range {part.strip()!r}, which runs backwards")
        if last - first >= MOST_NUMBERS:
            raise InputError(f"{option} has the range {part.strip()!r}, more than {MOST_NUMBERS} numbers")
        found.update(range(first, last + 1))
    return sorted(found)


def words(text: str, option: str) -> list[str]:
    """``a,b`` as words, each once, in their order.

    Raises:
        InputError: an empty word.
    """
    from ..kernels.errors import InputError

    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InputError(f"{option} is a list of names such as kda,mla, not {text!r}")
    return list(dict.fromkeys(found))


def chosen_engines(owner: Family, text: str) -> tuple[Engine, ...]:
    """``all``, or the engines of a list.

    Raises:
        InputError: no such engine, or the family has none.
    """
    from ..kernels.errors import InputError

    if not owner.engines:
        raise InputError(f"family {owner.name} has no engine yet, only its twin; 'k3lab kernels' lists what there is")
    if text == "all":
        return tuple(owner.engines)
    return tuple(owner.engine(name) for name in words(text, "--engines"))


def chosen_problems(owner: Family, model: str, tp: str, kind: str | None, rows: str) -> tuple[Problem, ...]:
    """The problems of every TP size, kind and row count, each once.

    Raises:
        InputError: a list cannot be read, or the family has no such problem.
    """
    from .select import model_card

    kinds: list[str | None] = [*words(kind, "--kind")] if kind else [None]
    card = model_card(model)
    sizes, counts = numbers(tp, "--tp"), numbers(rows, "--rows")
    problems = [
        owner.problem(card, tp=size, rows=count, kind=one) for size in sizes for one in kinds for count in counts
    ]
    return tuple(dict.fromkeys(problems))


def fixed_in(texts: list[str] | None, engines: tuple[Engine, ...], problem: Problem, card: GpuCard) -> Config:
    """Parameters of ``--fix name=value`` options, as the first engine that has them all spells their values.

    Raises:
        InputError: not name=value, or no engine has such a parameter and value.
    """
    from ..kernels.errors import InputError
    from .select import parse_fixed

    wrong: InputError | None = None
    for engine in engines if texts else ():
        try:
            return parse_fixed(texts, engine.space(problem, card))
        except InputError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    return {}


def render(console: Console, data: dict[str, Any]) -> None:
    """Print the table."""
    from rich.table import Table

    names = sorted({name for row in data["rows"] for name in row["alternatives"]})
    table = Table(
        "problem", "engine", "config", f"us ({data['evidence']})", "chain", "hidden", "floor", *names, "other engines",
        title=f"{data['family']} on {data['gpu']}, {data['evidence']}",
    )  # fmt: skip
    for row in data["rows"]:
        problem = row["problem"]
        others = " ".join(f"{name} {us:.2f}" for name, us in row["engines"].items() if name != row["engine"])
        beside = [f"{row['alternatives'][name]:.2f}" if name in row["alternatives"] else "-" for name in names]
        table.add_row(
            " ".join(str(problem[name]) if name == "kind" else f"{name}{problem[name]}" for name in ("kind", "tp", "rows") if name in problem),
            row["engine"], " ".join(f"{name}={value}" for name, value in row["config"].items()), f"{row['us']:.2f}",
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in ("chain_us", "hidden_us")), f"{row['floor_us']:.2f}", *beside, others,
        )  # fmt: skip
    console.print(table)
    for reason, labels in data["skipped"].items():
        console.print(f"left out: {reason}: {', '.join(labels)}", markup=False)
    for line in data["missing"]:
        console.print(f"missing: {line}", markup=False)
    if data["ended"] != "done":
        why = "the budget is spent" if data["ended"] == "budget" else "interrupted"
        console.print(
            f"{why}: the same command goes on where it stopped; studies are in {data['studies']}", markup=False
        )
    if data["results"]:
        console.print(f"results: {data['results']}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("tune-table")
    def tune_table_command(
        family: FamilyName,
        tp: Annotated[str, typer.Option("--tp", help="Tensor-parallel sizes: numbers and ranges, such as 4,8,16.")] = "16",
        kind: Annotated[str | None, typer.Option("--kind", help=f"Kinds, such as kda,mla. {KIND_HELP}")] = None,
        rows: Annotated[str, typer.Option("--rows", help="Token rows: numbers and ranges, such as 1-8,12,16,24,32,48,64.")] = "1-8,12,16,24,32,48,64",
        engines: Annotated[str, typer.Option("--engines", help="Engines, such as triton,cute_mma, or all.")] = "all",
        model: Model = "k3",
        gpu: Gpu = None,
        objective: Objective = None,
        trials: Annotated[int, typer.Option("--trials", help="Trials that each study shall hold in the end.")] = 40,
        later_trials: Annotated[
            int | None, typer.Option("--later-trials", help="The same for studies that begin with winners of others (default: as many).")
        ] = None,
        budget_seconds: Annotated[
            float | None, typer.Option("--budget-seconds", help="Begin no trial after so many seconds; the same command goes on.")
        ] = None,
        studies: Annotated[Path, typer.Option("--studies", help="Folder of the studies.")] = Path("studies"),
        results: Annotated[
            Path | None, typer.Option("--results", help="Also write the table as a result file, such as results/h200/FAMILY_table.json.")
        ] = None,
        add: Annotated[
            bool, typer.Option("--add", help="Keep rows of other problems that the result file has, if they were measured under the same conditions.")
        ] = False,
        begin_with: Annotated[
            Path | None, typer.Option("--begin-with", help="Result file of another table: studies begin with its winners that are legal in them.")
        ] = None,
        fix: Fix = None,
        seed: Seed = 0,
        compile_limit: CompileLimit = 120.0,
        measure_limit: MeasureLimit = 90.0,
        jobs: Jobs = None,
        gpus: Gpus = 1,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Begin studies of kernels that have changed anew; the old ones are renamed, not lost.")
        ] = False,
        as_json: Json = False,
    ) -> None:  # fmt: skip
        """Tune several engines on many problems, and let them compete for each; the same command goes on where it stopped."""
        from ..kernels import InputError
        from ..kernels import family as find_family
        from ..tuning.supervisor import Limits
        from ..tuning.table import TableRequest, tune_table
        from ..tuning.table_file import check_results, write_result
        from ..tuning.table_rows import winners_of
        from ..tuning.workers import default_jobs
        from .tune import target

        if add and results is None:
            raise InputError("--add keeps rows of a result file: name it with --results")
        owner = find_family(family)
        chosen = chosen_engines(owner, engines)
        card, aim = target(gpu, objective)
        problems = chosen_problems(owner, model, tp, kind, rows)
        request = TableRequest(
            owner, problems, chosen, card, aim, trials, later_trials, studies, seed,  # type: ignore[arg-type]
            Limits(compile_s=compile_limit, measure_s=measure_limit), jobs=default_jobs() if jobs is None else jobs, gpus=gpus,
            budget_s=budget_seconds, fresh=fresh, fixed=fixed_in(fix, chosen, problems[0], card), known=winners_of(begin_with, owner) if begin_with else (),
        )  # fmt: skip
        if results is not None:
            check_results(results, request, add=add)

        def say(text: str) -> None:
            if not as_json:
                print(text, file=sys.stderr, flush=True)

        table = tune_table(request, say)
        written = results if results is not None and table.rows else None
        if written is not None:
            write_result(written, table, add=add)
        data = {**table.to_json(), "results": str(written) if written else None}
        emit(data, as_json, render)
        if table.ended == "interrupted":
            raise typer.Exit(130)
        raise typer.Exit(1 if table.missing and table.ended != "budget" else 0)
