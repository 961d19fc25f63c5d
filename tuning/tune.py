"""The search: propose, evaluate in a worker, store; resumable at any moment."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.contract import Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GpuCard
from ..kernels.space import Config, Space
from . import propose
from .choose import Choice, choose
from .compiling import digests
from .environment import environment
from .finals import run_finals
from .identity import Objective, StudyIdentity, default_path
from .jobs import DEFAULT_EVALUATOR, Job, Kind, location_of
from .outcome import Outcome, Status, failure
from .progress import Progress, Silent
from .stop import Stop
from .study import TrialRecord, TuningStudy, best_of
from .supervisor import Limits
from .workers import Workers

if TYPE_CHECKING:
    from ..kernels.device import Device


@dataclass(frozen=True)
class TuneRequest:
    """What to tune, for what, and how long."""

    family: Family
    engine: Engine
    problem: Problem
    gpu: GpuCard
    objective: Objective
    trials: int
    """Ended trials the study shall hold in the end, those of earlier runs included."""
    study: Path | None = None
    """The study's file; by default one under ``studies/`` named after the rest."""
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    evaluator: str = DEFAULT_EVALUATOR
    proposer: propose.Proposer | None = None
    """Where configs come from; by default brute force in small spaces; in large ones the cost model's guidance where it is measured, else TPE."""
    fresh: bool = False
    """Begin a new study; one of that name is kept under another."""
    fixed: Config = field(default_factory=dict)
    """Parameters held at one value: the search stays in that part of the space."""
    jobs: int = 1
    """Processes that compile ahead of those that measure, or that predict."""
    gpus: int = 1
    """GPUs of this host that measure, the first that no other tuner uses; what is compared to the last percent is timed on one."""

    @property
    def path(self) -> Path:
        """The study's file."""
        return self.study or default_path(self.family, self.engine, self.problem, self.gpu, self.objective, self.fixed)

    @property
    def space(self) -> Space:
        """The space, as far as it is searched.

        Raises:
            InputError: see :meth:`k3lab.kernels.space.Space.restricted`.
        """
        return self.engine.space(self.problem, self.gpu).restricted(self.fixed)

    def trial_job(self, config: Config, number: int) -> Job:
        """The job of the trial of that number."""
        kind: Kind = "measure" if self.objective == "measured" else "predict"
        return self.job(kind, config, seed=self.seed + number)

    def job(self, kind: Kind, config: Any, *, arch: str | None = None, seed: int | None = None) -> Job:
        """A job of this request for the worker."""
        return Job(
            kind=kind,
            family=self.family.name,
            location=location_of(self.family),
            engine=self.engine.name,
            problem=self.problem.to_json(),
            config=dict(config),
            arch=arch or self.gpu.arch,
            gpu=self.gpu.name,
            seed=self.seed if seed is None else seed,
            digests=digests(self.engine),
        )


@dataclass(frozen=True)
class TuneResult:
    """What a search found."""

    path: Path
    identity: dict[str, Any]
    ended: str
    """``trials`` (the number asked for is reached), ``exhausted`` (no config is left), ``interrupted`` or ``budget``."""
    new_trials: int
    statuses: dict[str, int]
    """Trials of the whole study by status."""
    choice: Choice | None
    """None where no trial succeeded."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "study": str(self.path),
            **{name: self.identity[name] for name in ("family", "engine", "problem", "gpu", "objective")},
            "evidence": self.identity["objective"],
            "ended": self.ended,
            "new_trials": self.new_trials,
            "trials": sum(self.statuses.values()),
            "statuses": self.statuses,
            "choice": self.choice.to_json() if self.choice else None,
        }


def check_request(request: TuneRequest) -> Space:
    """The space, after the checks that need neither worker nor GPU.

    Raises:
        InputError: fewer than one trial, or an engine that refuses the problem.
    """
    if request.trials < 1:
        raise InputError(f"trials is {request.trials}, must be at least 1")
    if reason := request.engine.refuses(request.problem, request.gpu.arch):
        raise InputError(
            f"{request.family.name}/{request.engine.name} refuses {request.problem.label} on {request.gpu.name}: {reason}"
        )
    return request.space


def require_gpu(gpu: GpuCard) -> Device:
    """The GPU here, which must be that one.

    Raises:
        InputError: there is none, or another.
    """
    from ..kernels.device import require

    here = require(f"the measured objective for {gpu.name}")
    if here.card is None or here.card.name != gpu.name:
        raise InputError(
            f"the GPU here is {here.name}: a measured study for {gpu.name} needs one; "
            f"use --gpu {here.card.name.lower() if here.card else '...'} or --objective predicted"
        )
    return here


def identity_of(request: TuneRequest) -> StudyIdentity:
    """What the request's study is a study of, with the kernel as it is now."""
    return StudyIdentity.of(
        request.family, request.engine, request.problem, request.gpu, request.objective, request.fixed
    )


def tune(
    request: TuneRequest, progress: Progress | None = None, *, workers: Workers | None = None, stop: Stop | None = None,
    study: TuningStudy | None = None, finals: bool = True,
) -> TuneResult:  # fmt: skip
    """Run or resume a study until it holds ``request.trials`` ended trials.

    SIGINT and SIGTERM end it after the running trial. Every trial ends in a typed status; a config that
    crashes or hangs costs its own trial.

    Args:
        request: what to tune.
        progress: who watches.
        workers: processes of a run of many studies; by default the study has its own.
        stop: of such a run; by default signals alone end the study.
        study: the request's own, if it is open already; it is left open.
        finals: whether a measured study ends in its own finals; without them nothing is chosen of it.

    Raises:
        InputError: see :func:`check_request` and :meth:`TuningStudy.for_tuning`; or no worker starts.
    """
    progress = progress or Silent()
    space = check_request(request)
    location_of(request.family)
    digests(request.engine)
    measured = request.objective == "measured"
    here = require_gpu(request.gpu) if measured else None
    identity = identity_of(request)
    with contextlib.ExitStack() as open_things:
        if study is None:
            study = open_things.enter_context(TuningStudy.for_tuning(request.path, identity, fresh=request.fresh))
        if workers is None:
            workers = open_things.enter_context(
                Workers(
                    request.limits, measured=measured, evaluator=request.evaluator, jobs=request.jobs, gpus=request.gpus
                )
            )
        if stop is None:
            stop = Stop()
            open_things.enter_context(stop.listening())
        asked = predictor(request, workers, progress) if measured else None
        proposer = request.proposer or propose.for_search(space, request.trials, request.seed, predict=asked)
        before = study.trials()
        total = request.trials if proposer.total is None else min(request.trials, proposer.total)
        title = f"{request.family.name} {request.problem.label} {request.gpu.name} {request.engine.name} ({request.objective})"
        progress.begin(f"{title}, {proposer.name}", before, total)
        try:
            if _moved(study, environment(here)):
                progress.message(
                    "the GPU or its driver is another than in this study's earlier run: the finals are timed again"
                )
            ended = _search(study, request, space, proposer, workers, progress, stop)
            trials = study.trials()
            if measured and finals and ended in ("trials", "exhausted"):
                run_finals(study, request, space, workers, lambda: stop.asked)
            choice = choose(study, space) if finals or not measured else None
            if choice or finals:
                study.set_note("choice", choice.to_json() if choice else None)
        finally:
            progress.end()
        done = sum(trial.finished for trial in trials) - sum(trial.finished for trial in before)
        statuses = Counter(str(trial.outcome.status) for trial in trials if trial.outcome)
        return TuneResult(request.path, study.identity, ended, done, dict(sorted(statuses.items())), choice)


def predictor(request: TuneRequest, workers: Workers, progress: Progress) -> propose.Predict:
    """The cost model as a measured search asks it: configs are compiled by the processes that have no GPU."""

    def predict(configs: Sequence[Config]) -> list[float]:
        progress.message(f"{len(configs)} configs are compiled and predicted before the first is measured")
        jobs = [request.job("predict", config) for config in configs]
        for job in jobs:
            workers.submit(job)
        values = [workers.result(job).checked().value for job in jobs]
        return [math.inf if value is None else value for value in values]

    return predict


def _moved(study: TuningStudy, now: dict[str, Any]) -> bool:
    """Store the environment; whether the GPU or its driver is another than in the run before, which voids the finals."""
    before = study.note("environment")
    moved = bool(
        before
        and before["gpu"]
        and now["gpu"]
        and any(before["gpu"].get(name) != now["gpu"][name] for name in ("name", "driver"))
    )
    if moved:  # the environment last: a process that dies in between leaves the move to be seen again
        study.set_note("finals", None)
        study.set_note("contest", None)
        study.set_note("earlier_environments", [*(study.note("earlier_environments") or []), before])
    study.set_note("environment", now)
    return moved


def _search(
    study: TuningStudy,
    request: TuneRequest,
    space: Space,
    proposer: propose.Proposer,
    workers: Workers,
    progress: Progress,
    stop: Stop,
) -> str:
    """Finish what a dead process left, then propose and evaluate; says why it ended."""
    trials = study.trials()

    def evaluate(trial: TrialRecord) -> None:
        outcome = trial.outcome or _evaluate(request, space, workers, trial)
        study.finish(trial, outcome)
        trials[trial.number] = replace(trial, outcome=outcome, finished=True)
        progress.trial(trials[trial.number], best_of(trials))

    for trial in [trial for trial in trials if not trial.finished]:
        if stop.asked:
            return stop.word
        progress.message(f"trial {trial.number} was left running by a process that died: finishing it")
        evaluate(trial)
    while True:
        if len(trials) >= request.trials:
            return "trials"
        if stop.asked:
            return stop.word
        configs = proposer.ahead(trials, min(workers.depth, request.trials - len(trials)))
        if not configs:
            progress.message(f"no config is left to try after {len(trials)} trials")
            return "exhausted"
        for number, config in enumerate(configs, start=len(trials)):
            workers.submit(request.trial_job(config, number))
        trials.append(study.start(configs[0], space))
        evaluate(trials[-1])


def _evaluate(request: TuneRequest, space: Space, workers: Workers, trial: TrialRecord) -> Outcome:
    if reason := space.illegal(trial.config):  # a resumed trial of a space whose constraints have changed
        return failure(Status.ILLEGAL, reason)
    return workers.result(request.trial_job(trial.config, trial.number)).checked()
