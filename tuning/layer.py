"""Tuning a whole layer: every family, kind and row count, what promises the layer most first.

What a problem promises is what its default config is predicted to take above the bytes it must move, times the share
of the model's layers that hold it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..kernels.contract import Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GpuCard
from ..kernels.model_card import ModelCard
from .identity import STUDIES, Objective
from .jobs import DEFAULT_EVALUATOR, Job
from .shared_study import Shared
from .stop import Stop
from .supervisor import Limits
from .table import TableRequest, tune_table
from .table_rows import Winner
from .tune import require_gpu
from .workers import Workers, check_jobs

ONCE_A_STEP = ("lm_head",)
"""Families that a step holds once, not once a layer."""


@dataclass(frozen=True)
class LayerRequest:
    """What to tune."""

    card: ModelCard
    tp: int
    rows: tuple[int, ...]
    gpu: GpuCard
    objective: Objective
    trials: int
    """Trials that each study shall hold."""
    families: tuple[Family, ...]
    folder: Path = STUDIES
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    evaluator: str = DEFAULT_EVALUATOR
    jobs: int = 1
    gpus: int = 1
    """GPUs of this host that measure, the first that no other tuner uses; what is compared to the last percent is timed on one."""
    for_s: float | None = None
    """Seconds after which no further trial begins."""
    shared: Shared | None = None
    """The database that other workers tune in, too; None: studies are files of this machine."""

    def table(self, item: Item, known: Sequence[Winner]) -> TableRequest:
        """The request for one problem of the queue."""
        return TableRequest(
            item.family, (item.problem,), item.engines, self.gpu, self.objective, self.trials, None, self.folder, self.seed, self.limits,
            self.evaluator, self.jobs, gpus=self.gpus, known=tuple(one for one in known if any(one.engine == e.name for e in item.engines)),
        )  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One problem of the queue."""

    family: Family
    problem: Problem
    engines: tuple[Engine, ...]
    """Those that serve it."""
    default_us: float | None
    """Predicted for the default config; None where no engine's could be predicted: such problems come last."""
    floor_us: float
    share: float
    """Part of the model's layers that hold it."""
    between: bool = False
    """The time is interpolated between the fewest and the most rows of the shape, not predicted itself."""

    @property
    def gain_us(self) -> float:
        """What a layer of average kind could win, in microseconds."""
        return 0.0 if self.default_us is None else max(0.0, self.default_us - self.floor_us) * self.share

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "family": self.family.name, "problem": self.problem.to_json(), "label": self.problem.label,
            "engines": [engine.name for engine in self.engines], "default_us": self.default_us, "interpolated": self.between, "floor_us": round(self.floor_us, 3),
            "share": round(self.share, 4), "gain_us": round(self.gain_us, 3),
        }  # fmt: skip


def share_of(card: ModelCard, family: Family, kind: str | None) -> float:
    """Part of the model's layers that hold a family of a kind: kinds named after a layer kind lie in those layers alone.

    Other kinds (routing profiles, number formats) are variants of every layer: each counts as if it were the one in use.
    """
    layers: list[str] = [*card.layer_kinds]
    if family.name in ONCE_A_STEP:
        return 1 / len(layers)
    if kind == "restart":  # the layers that begin a block of attention residuals
        return card.num_attn_res_blocks / len(layers)
    for name in (family.name, kind):
        if name in ("kda", "mla"):
            return layers.count(name) / len(layers)
    return 1.0


def problems_of(
    request: LayerRequest, say: Callable[[str], None]
) -> list[tuple[Family, Problem, tuple[Engine, ...], float]]:
    """Every problem of every family that an engine serves, with those engines and the problem's share of the layers."""
    found: dict[tuple[str, Problem], tuple[Family, Problem, tuple[Engine, ...], float]] = {}
    for family in request.families:
        if not family.engines:
            say(f"{family.name} has no engine yet")
            continue
        for kind in family.kinds or (None,):
            refused: dict[int, str] = {}
            for rows in request.rows:
                try:
                    problem = family.problem(request.card, tp=request.tp, rows=rows, kind=kind)
                except InputError as error:
                    refused[rows] = str(error)
                    continue
                engines = tuple(
                    engine for engine in family.engines if engine.refuses(problem, request.gpu.arch) is None
                )
                if engines:
                    found.setdefault(
                        (family.name, problem), (family, problem, engines, share_of(request.card, family, kind))
                    )
                else:
                    say(f"left out: no engine of {family.name} serves {problem.label} on {request.gpu.name}")
            if refused:
                counts = ", ".join(map(str, refused))
                say(f"left out: {family.name} {kind or ''} at rows {counts}: {next(iter(refused.values()))}")
    return list(found.values())


def queue(
    request: LayerRequest, workers: Workers, say: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
) -> list[Item]:
    """The problems, what promises most first: the same on every machine.

    Only the fewest and the most rows of a shape are compiled and predicted; between them what lies above the byte floor is
    interpolated by the rows. An order needs no more, and hundreds of problems are compiled for it no longer.

    Args:
        request: what to tune.
        workers: that predict.
        say: hears what is left out.
        stopped: whether the run was asked to end; problems that are not predicted by then come last.
    """
    asked = problems_of(request, say)
    shapes: dict[tuple[str, str], list[int]] = {}
    for place, (family, problem, _, _) in enumerate(asked):
        shapes.setdefault((family.name, json.dumps(problem.key, sort_keys=True)), []).append(place)
    found: dict[int, float | None] = {}

    def floor(place: int) -> float:
        return asked[place][0].traffic(asked[place][1]).bytes / request.gpu.read_bandwidth * 1e6

    def predicted(places: Sequence[int]) -> None:
        jobs = [_default_job(request, *asked[place][:3]) for place in places]
        for job in jobs:
            workers.submit(job)
        found.update({
            place: None if stopped() else workers.result(job).value for place, job in zip(places, jobs, strict=True)
        })  # fmt: skip

    by_rows = [sorted(places, key=lambda place: asked[place][1].rows) for places in shapes.values()]
    predicted(sorted({end for places in by_rows for end in (places[0], places[-1])}))
    alone: list[int] = []
    between: set[int] = set()
    for places in by_rows:
        low, high = places[0], places[-1]
        for place in places[1:-1]:
            first, last = found[low], found[high]
            if first is None or last is None:
                alone.append(place)
                continue
            rows = [asked[one][1].rows for one in (low, place, high)]
            part = (rows[1] - rows[0]) / (rows[2] - rows[0])
            found[place] = floor(place) + (1 - part) * (first - floor(low)) + part * (last - floor(high))
            between.add(place)
    predicted(alone)
    items = [
        Item(family, problem, engines, found[place], floor(place), share, place in between)
        for place, (family, problem, engines, share) in enumerate(asked)
    ]
    return sorted(items, key=lambda one: (-one.gain_us, one.family.name, one.problem.label))


def _default_job(request: LayerRequest, family: Family, problem: Problem, engines: tuple[Engine, ...]) -> Job:
    """Predicting the default config of the family's default engine, or of the first that serves the problem."""
    first = next((one for one in engines if one.name == family.default_engine), engines[0])
    table = TableRequest(family, (problem,), engines, request.gpu, "predicted", 1, evaluator=request.evaluator)
    ask = table.request(problem, first, 1)
    return ask.job("predict", ask.space.default)


def tune_layer(request: LayerRequest, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Tune problem after problem of the queue, until all are done, the time is spent, or a signal ends it.

    In files each problem's engines are compared at once, as :func:`k3lab.tuning.table.tune_table` does; in a database
    the studies are filled, by any number of workers, for `study pull` to fetch.

    Returns:
        JSON-able: ``ended`` (``done``, ``budget`` or ``interrupted``), and the ``queue`` with what became of each problem.

    Raises:
        InputError: a wrong request, no GPU, no worker, no database.
    """
    check_jobs(request.jobs)
    if not request.rows or not request.families:
        raise InputError("a layer needs at least one family and one row count")
    say = say or (lambda text: None)
    if request.objective == "measured":
        require_gpu(request.gpu)
    stop = Stop(request.for_s)
    with stop.listening():
        with Workers(request.limits, measured=False, evaluator=request.evaluator, jobs=request.jobs) as predicting:
            items = queue(request, predicting, say, lambda: stop.asked)
        if not items:
            raise InputError(f"no engine of these families serves any of these rows on {request.gpu.name}")
        total = sum(item.gain_us for item in items)
        say(
            f"{len(items)} problems; the first: {items[0].family.name} {items[0].problem.label}, {items[0].gain_us:.2f} us a layer"
        )
        done: list[dict[str, Any]] = []
        known: list[Winner] = []
        gained = 0.0
        with Workers(
            request.limits, measured=request.objective == "measured", evaluator=request.evaluator, jobs=request.jobs, gpus=request.gpus
        ) as workers:  # fmt: skip
            for item in items:
                if stop.asked:
                    break
                say(
                    f"{item.family.name} {item.problem.label}: {item.gain_us:.2f} us a layer to gain, {gained / total if total else 1:.0%} of all seen to"
                )
                if request.shared:
                    state = _shared(request, item, stop, workers, say)
                else:
                    state = _local(request, item, stop, workers, known, say)
                done.append(state)
                gained += item.gain_us if state["state"] == "done" else 0.0
    ended = "done" if len(done) == len(items) and all(one["state"] != "begun" for one in done) else stop.word
    states = [*done, *({"state": "waiting"} for _ in items[len(done) :])]
    return {
        "gpu": request.gpu.name, "evidence": request.objective, "tp": request.tp, "ended": ended,
        "storage": None if request.shared is None else "shared",
        "studies": str(request.folder), "queue": [item.to_json() | state for item, state in zip(items, states, strict=True)],
    }  # fmt: skip


def _local(
    request: LayerRequest, item: Item, stop: Stop, workers: Workers, known: list[Winner], say: Callable[[str], None]
) -> dict[str, Any]:
    """All engines of a problem in files of this machine, compared with each other."""
    table = tune_table(request.table(item, known), say, stop=stop, workers=workers)
    known += [Winner(row.problem, row.engine, row.config) for row in table.rows]
    if table.rows:
        row = table.rows[0]
        return {"state": "done", "engine": row.engine, "us": round(row.us, 3), "why": row.reason}
    return {"state": "begun" if stop.asked else "missing", "why": "; ".join([*table.missing, *table.skipped])}


def _shared(
    request: LayerRequest, item: Item, stop: Stop, workers: Workers, say: Callable[[str], None]
) -> dict[str, Any]:
    """This worker's part in the studies of a problem's engines."""
    from .progress import Lines
    from .shared_tune import tune_shared

    assert request.shared is not None
    best: list[tuple[float, str]] = []
    workers.forget()
    for engine in item.engines:
        if stop.asked:
            return {"state": "begun"}
        ask = request.table(item, ()).request(item.problem, engine, request.trials)
        result = tune_shared(ask, request.shared, Lines(), stop=stop, workers=workers)
        if result.ended not in ("trials", "exhausted"):
            return {"state": "begun"}
        if result.choice is not None:
            best.append((result.choice.value_us, engine.name))
            say(f"{item.problem.label} {engine.name}: {result.choice.value_us:.2f} us ({request.objective})")
    if not best:
        return {"state": "missing", "why": "no config of any engine ended ok"}
    return {
        "state": "done",
        "engine": min(best)[1],
        "us": round(min(best)[0], 3),
        "why": "engines were not compared: pull, then tune-table",
    }
