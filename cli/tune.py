"""``k3lab tune``: search an engine's space for a problem on a GPU, alone or with other workers, or a whole layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .select import GPU_NAMES, MAX_SEED, EngineName, Kind, Model, Tp

if TYPE_CHECKING:
    from rich.console import Console

    from ..kernels.gpu_cards import GpuCard
    from ..tuning.progress import Progress
    from ..tuning.tune import TuneRequest, TuneResult

FamilyName = Annotated[str, typer.Argument(metavar="FAMILY", help="Family, as `k3lab kernels` lists it.")]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help=f"GPU to tune for: {GPU_NAMES} (default: the GPU here, else gb300).")
]
Objective = Annotated[
    str | None,
    typer.Option("--objective", help="measured or predicted (default: measured if that GPU is here, else predicted)."),
]
StudyFile = Annotated[Path | None, typer.Option("--study", help="Study file (default: one under studies/).")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage", help="PostgreSQL database that any number of workers tune in, postgresql://user@host/database; --study is a name in it then (default: K3LAB_STORAGE).",
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of the search and of the inputs.")]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix", help="Hold a parameter at one value, name=value; repeatable. Such a study is one of its own."
    ),
]
CompileLimit = Annotated[float, typer.Option("--compile-limit", help="Wall limit of one compilation, in seconds.")]
MeasureLimit = Annotated[float, typer.Option("--measure-limit", help="Wall limit of one check or timing, in seconds.")]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        help="Processes that compile ahead of the one that measures, or that predict; the result does not depend on it "
        "(default: one a CPU but one, at most 16).",
    ),
]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus", min=1, max=16, help="GPUs of this host that measure, of one model; each is locked against a second tuner.",
    ),
]  # fmt: skip


def target(gpu: str | None, objective: str | None) -> tuple[GpuCard, str]:
    """The GPU card and the objective that were asked for, or the best of both that is possible here.

    Raises:
        InputError: an unknown GPU or objective.
    """
    from ..kernels.errors import InputError
    from ..kernels.gpu_cards import gpu_card

    if objective not in (None, "measured", "predicted"):
        raise InputError(f"unknown objective {objective!r}; objectives: measured, predicted")
    card = gpu_card(gpu) if gpu else None
    if card is not None and objective is not None:
        return card, objective
    from ..kernels.device import discover

    here = discover()
    if card is None:
        card = here.card if here and here.card else gpu_card("gb300")
    measurable = here is not None and here.card == card
    return card, objective or ("measured" if measurable else "predicted")


def make_request(
    family: str, model: str, tp: int, rows: int, kind: str | None, gpu: str | None, engine: str | None,
    objective: str | None, study: Path | None, seed: int, compile_limit: float, measure_limit: float, trials: int = 1,
    fix: list[str] | None = None, jobs: int | None = None, gpus: int = 1,
) -> TuneRequest:  # fmt: skip
    """The request the options describe.

    Raises:
        InputError: any of them is wrong.
    """
    from ..tuning.supervisor import Limits
    from ..tuning.tune import TuneRequest
    from ..tuning.workers import check_jobs, default_jobs
    from .select import parse_fixed, select_engine

    jobs = default_jobs() if jobs is None else jobs
    check_jobs(jobs)

    chosen = select_engine(family, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    card, aim = target(gpu, objective)
    limits = Limits(compile_s=compile_limit, measure_s=measure_limit)
    fixed = parse_fixed(fix, chosen.space(card)) if fix else {}
    return TuneRequest(
        chosen.family, chosen.engine, chosen.problem, card, aim, trials, study, seed, limits, fixed=fixed, jobs=jobs, gpus=gpus,  # type: ignore[arg-type]
    )  # fmt: skip


def render(console: Console, data: dict[str, Any]) -> None:
    """Print what a search found."""
    counts = ", ".join(f"{count} {status}" for status, count in data["statuses"].items()) or "none"
    console.print(f"study {data['study']}: {data['trials']} trials ({counts}), {data['new_trials']} of them new")
    endings = {
        "exhausted": "ended early: no legal config is left to try",
        "interrupted": "interrupted: the same command goes on where it stopped",
        "budget": "the time is spent: the same command goes on where it stopped",
    }
    if data["ended"] in endings:
        console.print(endings[data["ended"]])
    if data["choice"] is None:
        console.print(f"no config ended ok; see `k3lab study show {data['study']}`", markup=False)
        return
    render_choice(console, data["choice"])


def render_choice(console: Console, choice: dict[str, Any]) -> None:
    """Print a choice with its reason."""
    from rich.table import Table

    config = " ".join(f"{name}={value}" for name, value in choice["config"].items())
    console.print(f"chosen: {choice['value_us']:.2f} us ({choice['evidence']})  {config}", markup=False)
    console.print(f"because {choice['reason']}", markup=False)
    if choice.get("flip_rate") is not None:
        console.print(
            f"flip rate {choice['flip_rate']:.0%}: how often a repetition of the finals, by their own spread, would choose another config"
        )
    if choice["default_us"] is None:
        console.print(f"the default config ended as {choice['default_status']}")
    else:
        console.print(
            f"default {choice['default_us']:.2f} us, {choice['margin_over_default']:.1%} saved ({choice['evidence']})"
        )
    table = Table("trial", f"us ({choice['evidence']})", "band", "config", title="finalists")
    for one in choice["finalists"]:
        mark = " (chosen)" if one["digest"] == choice["digest"] else " (default)" if one["is_default"] else ""
        text = " ".join(f"{name}={value}" for name, value in one["config"].items())
        table.add_row(f"{one['trial']}{mark}", f"{one['value_us']:.2f}", f"{one['band']:.1%}", text)
    console.print(table)


def exit_code(data: dict[str, Any]) -> int:
    """0, or 130 after an interrupt, or 1 where every config failed."""
    if data["ended"] == "interrupted":
        return 130
    return 0 if data["choice"] else 1


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("tune")
    def tune_command(
        family: Annotated[str | None, typer.Argument(metavar="FAMILY", help="Family, as `k3lab kernels` lists it; none with --layer.")] = None,
        tp: Tp = 16,
        rows: Annotated[
            str | None, typer.Option("--rows", help="Token rows in the step, 1 to 64 (default: 8); with --layer a list (default: 1-8,12,16,24,32,48,64).")
        ] = None,
        kind: Kind = None,
        model: Model = "k3",
        gpu: Gpu = None,
        engine: EngineName = None,
        objective: Objective = None,
        trials: Annotated[int, typer.Option("--trials", help="Trials the study shall hold in the end.")] = 40,
        fix: Fix = None,
        study: StudyFile = None,
        seed: Seed = 0,
        compile_limit: CompileLimit = 120.0,
        measure_limit: MeasureLimit = 90.0,
        jobs: Jobs = None,
        gpus: Gpus = 1,
        layer: Annotated[bool, typer.Option("--layer", help="All families, kinds and rows, what promises the layer most first.")] = False,
        for_: Annotated[str | None, typer.Option("--for", help="Begin no trial after so long: 48h, 90m or 30s; the same command goes on.")] = None,
        storage: Storage = None,
        fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew; the old study is renamed, not lost.")] = False,
        as_json: Json = False,
    ) -> None:  # fmt: skip
        """Search an engine's configs with Optuna; the same command resumes a study that was stopped, or joins one that is shared."""
        from ..kernels import env
        from ..kernels.errors import InputError
        from ..tuning.progress import for_terminal
        from .layer import duration, tune_all

        storage = storage or env.storage()
        for_s = duration(for_) if for_ else None
        if layer:
            if family or engine or study or fix or fresh:
                raise InputError(
                    "--layer tunes all families and engines: name no family, engine, study or parameter, and not --fresh"
                )
            tune_all(
                model,
                tp,
                rows,
                kind,
                gpu,
                objective,
                trials,
                seed,
                compile_limit,
                measure_limit,
                jobs,
                gpus,
                for_s,
                storage,
                as_json,
            )
        if family is None:
            raise InputError("name a family (`k3lab kernels` lists them), or --layer for all")
        request = make_request(
            family, model, tp, 8 if rows is None else one_number(rows), kind, gpu, engine, objective, None if storage else study, seed, compile_limit,
            measure_limit, trials, fix, jobs, gpus,
        )  # fmt: skip
        if storage and fresh:
            raise InputError("--fresh is for files; in a database another study is begun with --study NAME")
        data = run(replace(request, fresh=fresh), for_terminal(as_json), for_s, storage, study).to_json()
        emit(data, as_json, render)
        raise typer.Exit(exit_code(data))


def one_number(text: str) -> int:
    """The row count of a single problem.

    Raises:
        InputError: it is no whole number.
    """
    from ..kernels.errors import InputError

    try:
        return int(text)
    except ValueError:
        raise InputError(f"--rows is {text!r}, must be one whole number (a list only with --layer)") from None


def run(
    request: TuneRequest, progress: Progress, for_s: float | None, storage: str | None, study: Path | None
) -> TuneResult:
    """The search, in a file or in a database, with an end or without."""
    from ..tuning.stop import Stop
    from ..tuning.tune import tune

    stop = Stop(for_s)
    with stop.listening():
        if storage is None:
            return tune(request, progress, stop=stop)
        from ..tuning.shared_study import Shared
        from ..tuning.shared_tune import tune_shared

        return tune_shared(request, Shared(storage, study.name if study else None), progress, stop=stop)
