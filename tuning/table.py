"""A table: one study for each problem and engine of a family, and for each problem the engine that wins.

A few anchor rows of every shape come first, with nothing known; the studies after them begin with the winners
of their neighbours. One set of worker processes serves all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from ..kernels.contract import Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GpuCard
from ..kernels.space import Config, config_digest
from .between import decide, decide_predicted, held, hold
from .identity import STUDIES, Objective, default_path
from .jobs import DEFAULT_EVALUATOR
from .outcome import SetupError
from .propose import BATCH, adapted, for_search
from .stop import Stop
from .study import TuningStudy, best_of, glance
from .supervisor import Limits
from .table_rows import Row, Winner, row_of
from .tune import TuneRequest, check_request, identity_of, require_gpu, tune
from .workers import Workers, check_jobs

ANCHORS = 4
"""Row counts of each shape that are tuned first."""
STARTS = 6
"""Most winners of other studies that one begins with."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TableRequest:
    """What to tune."""

    family: Family
    problems: tuple[Problem, ...]
    engines: tuple[Engine, ...]
    gpu: GpuCard
    objective: Objective
    trials: int
    """Ended trials that each study shall hold."""
    later_trials: int | None = None
    """The same for studies that begin with winners of others; None: as many."""
    folder: Path = STUDIES
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    evaluator: str = DEFAULT_EVALUATOR
    jobs: int = 1
    budget_s: float | None = None
    """Seconds after which no further trial begins."""
    fresh: bool = False
    """Begin studies of kernels that have changed anew; the old ones are kept under other names."""
    fixed: Config = field(default_factory=dict)
    """Parameters held at one value in all studies; an engine without one of them, or that value, is left out."""
    gpus: int = 1
    """GPUs of this host that measure, the first that no other tuner uses; what is compared to the last percent is timed on one."""
    known: tuple[Winner, ...] = ()
    """Winners of another table: its own studies begin with those that are legal there, like with each other's."""

    def request(self, problem: Problem, engine: Engine, trials: int) -> TuneRequest:
        """The request of one study."""
        path = default_path(self.family, engine, problem, self.gpu, self.objective, self.fixed, folder=self.folder)
        return TuneRequest(
            self.family, engine, problem, self.gpu, self.objective, trials, path, self.seed, self.limits, self.evaluator,
            fixed=dict(self.fixed), jobs=self.jobs, gpus=self.gpus,
        )  # fmt: skip

    def refuses(self, problem: Problem, engine: Engine) -> str | None:
        """Why the engine is not tuned for the problem, or None."""
        if reason := engine.refuses(problem, self.gpu.arch):
            return reason
        try:
            engine.space(problem, self.gpu).restricted(self.fixed)
        except InputError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class TableResult:
    """What is there, and what is missing."""

    request: TableRequest
    ended: str
    """``done``, ``interrupted`` or ``budget``."""
    rows: tuple[Row, ...]
    """One a problem that has a winner."""
    missing: tuple[str, ...]
    """Problems without one, and why."""
    skipped: dict[str, list[str]]
    """Why an engine was not tuned: the reason and the problems it holds for."""
    new_trials: int

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "family": self.request.family.name,
            "gpu": self.request.gpu.name,
            "objective": self.request.objective,
            "evidence": self.request.objective,
            "studies": str(self.request.folder),
            "ended": self.ended,
            "new_trials": self.new_trials,
            "rows": [row.to_json() for row in self.rows],
            "missing": list(self.missing),
            "skipped": self.skipped,
        }


def anchor_rows(rows: Sequence[int]) -> list[int]:
    """The first and the last row count, and some evenly between."""
    ordered = sorted(set(rows))
    count = min(ANCHORS, len(ordered))
    return [ordered[round(place * (len(ordered) - 1) / max(1, count - 1))] for place in range(count)]


def in_order(problems: Sequence[Problem]) -> list[tuple[Problem, bool]]:
    """The problems as they are tuned, and whether each is an anchor: those first, then the others, shape by shape."""
    keys = [problem.key for problem in problems]
    anchors = [problem.rows in anchor_rows([o.rows for o in problems if o.key == problem.key]) for problem in problems]
    ordered = sorted(range(len(problems)), key=lambda n: (not anchors[n], keys.index(keys[n]), problems[n].rows))
    return [(problems[number], anchors[number]) for number in ordered]


def near_first(problem: Problem, others: Sequence[Problem]) -> list[int]:
    """Places of the other problems, the nearest first: of the same shape by rows, then of other shapes by rows."""

    def far(number: int) -> tuple[bool, float, int]:
        other = others[number]
        return other.key != problem.key, abs(math.log2(other.rows / problem.rows)), number

    return sorted(range(len(others)), key=far)


class _Run:
    """One run of the command."""

    def __init__(self, request: TableRequest, workers: Workers, stop: Stop, say: Say) -> None:
        self.request, self.workers, self.stop, self.say = request, workers, stop, say
        self.winners: dict[str, list[tuple[Problem, Config]]] = {
            engine.name: [(one.problem, one.config) for one in request.known if one.engine == engine.name]
            for engine in request.engines
        }
        self.skipped: dict[str, list[str]] = {}
        self.missing: list[str] = []
        self.new_trials = 0
        self.count = 0
        self.of = len(request.problems) * len(request.engines)

    def skip(self, problem: Problem, engine: Engine, reason: str) -> None:
        self.skipped.setdefault(f"{engine.name}: {reason}", []).append(problem.label)

    def starts(self, ask: TuneRequest) -> list[Config]:
        """Winners of this engine's other studies, as far as they are legal here, the nearest problem's first."""
        known = self.winners[ask.engine.name]
        found: dict[str, Config] = {}
        for place in near_first(ask.problem, [problem for problem, _ in known]):
            config = adapted(ask.space, known[place][1])
            if config is not None:
                found.setdefault(config_digest(config), config)
        return list(found.values())[:STARTS]

    def study(self, ask: TuneRequest) -> bool:
        """Run one study, if it is not whole; whether it is now."""
        check_request(ask)
        done, starts, stale = self._known(ask)
        if done is None:
            if self.stop.asked:
                return False
            with TuningStudy.for_tuning(ask.path, identity_of(ask), fresh=stale) as study:
                done = self._tuned(ask, study, starts)
        if done is not None and done["best"]:
            self.winners[ask.engine.name].append((ask.problem, done["best"]["config"]))
        return done is not None

    def _known(self, ask: TuneRequest) -> tuple[dict[str, Any] | None, list[Config] | None, bool]:
        """What a study on disk says of its end (None before it), what it began with, and whether its kernel has changed."""
        if not ask.path.exists():
            return None, None, False
        found = glance(ask.path)
        try:
            identity_of(ask).require(found.identity, ask.path)
        except InputError:
            if not self.request.fresh:
                raise
            return None, None, True
        done = found.notes.get("done")
        return done if done and done["trials"] >= ask.trials else None, found.notes.get("starts"), False

    def _tuned(self, ask: TuneRequest, study: TuningStudy, starts: list[Config] | None) -> dict[str, Any] | None:
        """Go on with an open study to its end; the note that says so, or None where it was stopped before."""
        begun = monotonic()
        if starts is None:
            starts = self.starts(ask)
            study.set_note("starts", starts)  # first: it begins with the same whenever it goes on
        space = ask.space
        legal = [config for config in starts if space.illegal(config) is None]
        search = replace(ask, proposer=for_search(space, ask.trials, ask.seed, legal))
        result = tune(search, workers=self.workers, stop=self.stop, study=study, finals=False)
        self.new_trials += result.new_trials
        if result.ended not in ("trials", "exhausted"):
            return None
        best = best_of([trial for trial in study.trials() if space.illegal(trial.config) is None])
        done = {"trials": ask.trials, "best": {"us": best.value, "config": dict(best.config)} if best else None}
        study.set_note("done", done)
        what = f"best {best.value:.2f} us" if best else "no config ended ok"
        self.say(
            f"[{self.count}/{self.of}] {ask.problem.label} {ask.engine.name}: {what} of {sum(result.statuses.values())} trials "
            f"({result.statuses.get('ok', 0)} ok), {monotonic() - begun:.1f} s"
        )
        return done

    def prefetch(self, problem: Problem, engine: Engine, trials: int) -> None:
        """Let idle processes begin with a study that comes soon, if it is new."""
        ask = self.request.request(problem, engine, trials)
        if self.request.refuses(problem, engine) or ask.path.exists():
            return
        for config in [ask.space.default, *self.starts(ask)][:BATCH]:
            self.workers.submit(ask.job("compile", config), later=1)

    def problem(self, problem: Problem, trials: int, after: Callable[[int], None]) -> Row | None:
        """All studies of a problem, and its winner; None where something is missing."""
        asks = []
        for place, engine in enumerate(self.request.engines):
            self.count += 1
            if reason := self.request.refuses(problem, engine):
                self.skip(problem, engine, reason)
                continue
            if not self.stop.asked:
                after(place)
            ask = self.request.request(problem, engine, trials)
            if not self.study(ask):
                self._missing(problem, f"{engine.name} is not tuned to its end")
                return None
            if glance(ask.path).notes["done"]["best"] is None:
                self.skip(problem, engine, "no config ended ok, as `k3lab study show` tells")
                continue
            asks.append(ask)
        if not asks:
            self._missing(problem, "no engine has a config that ended ok")
            return None
        try:
            return self._winner(problem, asks)
        except SetupError:
            raise
        except InputError as error:
            self._missing(problem, str(error))
            return None

    def _missing(self, problem: Problem, why: str) -> None:
        self.missing.append(f"{problem.label}: {why}")

    def _winner(self, problem: Problem, asks: Sequence[TuneRequest]) -> Row | None:
        contest, news = None, False
        if self.request.objective == "measured":
            contest = held({ask.engine.name: ask.path for ask in asks})
            if contest is None:
                if self.stop.asked:
                    self._missing(problem, "its engines are not compared")
                    return None
                contest, news = hold(asks, self.workers), True
        choices = {ask.engine.name: glance(ask.path).notes.get("choice") for ask in asks}
        made = {name: choice for name, choice in choices.items() if choice is not None}
        order = [engine.name for engine in self.request.family.engines]
        if contest is not None:
            decision = decide(contest, {name: one["digest"] for name, one in made.items()}, order)
        else:
            decision = decide_predicted({name: one["value_us"] for name, one in made.items()}, order)
        row = row_of(self.request.family, problem, self.request.gpu, made[decision.engine], decision, contest)
        if news or contest is None:
            self.say(f"{problem.label}: {row.us:.2f} us ({self.request.objective}), {decision.reason}")
        return row


def tune_table(
    request: TableRequest, say: Say | None = None, *, stop: Stop | None = None, workers: Workers | None = None
) -> TableResult:
    """Run or resume all studies of a table; what is there already is not done again.

    SIGINT, SIGTERM and the budget end it after the running trial. A run over several tables has a ``stop`` and ``workers`` of
    its own, which serve them all: to start them takes longer than a small table.

    Raises:
        InputError: an empty or wrong request, a study that is damaged or of another kernel, no worker.
    """
    if not request.problems or not request.engines:
        raise InputError("a table needs at least one problem and one engine")
    check_jobs(request.jobs)
    for name, value in (("trials", request.trials), ("later trials", request.later_trials)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}, must be at least 1")
    if request.budget_s is not None and not request.budget_s > 0:
        raise InputError(f"the budget is {request.budget_s:g} s, must be more than 0")
    measured = request.objective == "measured"
    if measured:
        require_gpu(request.gpu)
    listening: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if stop is None:
        stop = Stop(request.budget_s)
        listening = stop.listening()
    rows = []
    serving: contextlib.AbstractContextManager[Workers]
    if workers is None:
        serving = Workers(
            request.limits, measured=measured, evaluator=request.evaluator, jobs=request.jobs, gpus=request.gpus
        )
    else:
        workers.forget()  # what an earlier table asked for ahead and did not come to
        serving = contextlib.nullcontext(workers)
    with serving as mine, listening:
        run = _Run(request, mine, stop, say or (lambda text: None))
        cells = in_order(request.problems)
        counts = [request.trials if anchor else request.later_trials or request.trials for _, anchor in cells]
        queue = [(problem, engine, count) for (problem, _), count in zip(cells, counts, strict=True) for engine in request.engines]  # fmt: skip
        for number, ((problem, _), count) in enumerate(zip(cells, counts, strict=True)):

            def after(place: int, number: int = number) -> None:
                following = number * len(request.engines) + place + 1
                if following < len(queue):
                    run.prefetch(*queue[following])

            if (row := run.problem(problem, count, after)) is not None:
                rows.append(row)
        places = {problem: place for place, problem in enumerate(request.problems)}
        rows.sort(key=lambda row: places[row.problem])
        ended = stop.word if stop.asked and run.missing else "done"
        return TableResult(request, ended, tuple(rows), tuple(run.missing), run.skipped, run.new_trials)
