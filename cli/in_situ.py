"""``k3lab study in-situ``: a family's best configs inside the captured layer, on the GPU here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import Compiled, Family, InputError, ModelCard, Problem, family
from ..tuning.in_situ import Candidate, Layer, Replay, try_in_layer
from ..tuning.in_situ_studies import Place, held_over, place_of, profile_problems, store

if TYPE_CHECKING:
    from rich.console import Console

    from ..decode.choices import Tuned
    from ..decode.graphs import StepGraphs
    from ..kernels.gpu_cards import GpuCard

PASSES = 20
"""Replays of a captured step in one series."""
Say = Callable[[str], None]


def compiled_for(place: Place, one: Candidate, problem: Problem) -> Compiled:
    """The candidate, compiled for the place's GPU.

    Raises:
        InputError: its config is illegal for the problem, which may be that of a shorter model.
    """
    from ..tuning.compiling import compile_config

    gpu, engine = place.requests[0].gpu, place.family.engine(one.engine)
    engine.space(problem, gpu).check(one.config)
    return compile_config(engine, problem, one.config, gpu.arch)


def choices_of(places: Mapping[str, Place], layer: Layer, card: ModelCard) -> list[Tuned]:
    """What the decode path launches where a layer of the model is made of these candidates."""
    from ..decode.choices import Tuned

    found = []
    for name, one in layer.items():
        place = places[name]
        problem = problem_of(place.family, place.kind, card, tp=place.problem.tp, rows=place.problem.rows)
        compiled = compiled_for(place, one, problem)
        where = (
            place.family.name,
            place.requests[0].gpu.name,
            f"{problem.label}/{one.engine}/{one.digest}",
            problem.rows,
        )
        found.append(Tuned(place.family.name, place.kind, one.engine, dict(one.config), "measured", compiled, where))
    return found


def problem_of(owner: Family, kind: str | None, card: ModelCard, *, tp: int, rows: int) -> Problem:
    """A family's problem in a plain step of a model."""
    from ..decode.choices import step_kind

    return owner.problem(card, tp=tp, rows=rows, kind=kind or step_kind(owner, card, tp=tp, rows=rows))


LAYERS, MLA_LAYERS = 5, (2, 3, 4)
"""Of the step that is captured: both kinds, some of which follow each other as in the whole model."""


def short(card: ModelCard) -> ModelCard:
    """A model of the same widths, experts and vocabulary with few layers."""
    from dataclasses import replace

    layers = min(LAYERS, card.num_hidden_layers)
    return replace(
        card, name=f"{card.name}-{layers}-layers", num_hidden_layers=layers, mla_layers=tuple(one for one in MLA_LAYERS if one <= layers),
        attn_res_block_size=2, max_position_embeddings=4096,
    )  # fmt: skip


class CapturedStep:
    """Captures steps of a few layers of the model's widths: one rank, alone, on the GPU here."""

    def __init__(self, card: ModelCard, places: Mapping[str, Place], *, tp: int, rows: int) -> None:
        """Draw the weights; captures share them and the cache."""
        import torch

        from ..decode.caches import DecodeCache
        from ..decode.lone import lone_peers
        from ..decode.random_weights import random_rank_weights
        from ..kernels.collectives import StandIn

        self.card = short(card)
        self.places, self.rows = places, rows
        where: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.weights = random_rank_weights(self.card, seed=0, tp=tp, **where)
        self.cache = DecodeCache(self.card, tp=tp, max_requests=rows, max_context=64, padding=True, **where)
        self.comm = StandIn(0, tp)
        self.peers = lone_peers(self.card, tp=tp, rows=rows, device="cuda")
        self.last: StepGraphs | None = None
        """Of the newest capture."""

    def __call__(self, layer: Layer) -> Replay:
        """A captured step of the layer's kernels; a replay is microseconds a layer, the median of :data:`PASSES`."""
        import torch

        from ..decode.graphs import StepGraphs
        from ..decode.tuned import TunedOperators

        operators = TunedOperators(
            self.card, choices_of(self.places, layer, self.card), dtype=torch.bfloat16, device="cuda", peers=self.peers
        )
        operators.take(self.weights)
        graphs = StepGraphs(self.weights, self.cache, self.comm, lambda rows: operators, sizes=(self.rows,))
        self.last = graphs
        nobody = torch.zeros(
            (0, 1), dtype=torch.int64, device="cuda"
        )  # the padding slot alone: no request is disturbed

        def replay() -> float:
            spent = []
            for _ in range(PASSES):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graphs.step(nobody, [])
                end.record()
                end.synchronize()
                spent.append(begin.elapsed_time(end) * 1000 / self.card.num_hidden_layers)
            operators.check()
            return statistics.median(spent)

        return replay


def profile_times(seed: int) -> Callable[[Family, Problem, Sequence[Candidate]], dict[str, tuple[float, float]]]:
    """Times candidates under a routing profile in one contest on the GPU here."""

    def times(owner: Family, problem: Problem, candidates: Sequence[Candidate]) -> dict[str, tuple[float, float]]:
        from ..kernels.device import require
        from ..tuning.compiling import compile_config
        from ..tuning.contest import time_contest
        from ..tuning.outcome import describe
        from ..tuning.policy import CONTEST

        arch = require("timing under routing profiles").arch
        compiled: list[Compiled | str] = []
        for one in candidates:
            try:
                compiled.append(compile_config(owner.engine(one.engine), problem, one.config, arch))
            except Exception as error:  # legal for the problem it won, perhaps not here
                compiled.append(describe(error))
        found = time_contest(owner, problem, compiled, CONTEST, seed, lambda: None)["results"]
        timed = {}
        for one, result in zip(candidates, found, strict=True):
            if (values := result["values_us"]) and not result["failed"]:
                middle = statistics.median(values)
                timed[one.digest] = middle, max((max(values) - min(values)) / middle, *result["spreads"])
        return timed

    return times


def wrong(places: Mapping[str, Place], seed: int) -> Callable[[str, Layer], str]:
    """What is wrong with the config that a place has in a layer, by its family's own check, or nothing."""

    def check(name: str, layer: Layer) -> str:
        from ..tuning.check import check_compiled

        found = check_compiled(places[name].family, compiled_for(places[name], layer[name], places[name].problem), seed)
        return "" if found.ok else str(found.reason)

    return check


def in_situ(
    card: ModelCard, gpu: GpuCard, folder: Path, *, tp: int, rows: int, only: Sequence[str] = (), seed: int = 0, say: Say = lambda text: None,
    capture_of: Callable[[Mapping[str, Place]], Callable[[Layer], Replay]] | None = None,
    times: Any = None, check_of: Callable[[Mapping[str, Place]], Callable[[str, Layer], str]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Try each place's three best configs in the captured layer, and keep the verdicts with its studies.

    Args:
        card: the model, whose families are asked for.
        gpu: the GPU here.
        folder: of the measured studies.
        tp: tensor-parallel size.
        rows: of the step.
        only: families to try; the others keep what they have.
        seed: of inputs.
        say: hears how it goes.
        capture_of: makes layers that can be timed; by default :class:`CapturedStep`.
        times: measures under a routing profile; by default :func:`profile_times`.
        check_of: judges results after timing; by default :func:`wrong`.

    Raises:
        InputError: no place has studies that competed.
    """
    from ..decode.choices import model_families
    from ..kernels.router.profiles import PROFILES

    places: dict[str, Place] = {}
    for name, kind in model_families(card):
        owner = family(name)
        if not owner.engines:
            continue
        problem = problem_of(owner, kind, card, tp=tp, rows=rows)
        label = f"{name} {kind}" if kind else name
        try:
            place = place_of(label, kind, owner, problem, gpu, folder)
            problems = profile_problems(place, card, PROFILES)
            places[label] = held_over(place, problems, times or profile_times(seed)) if problems else place
        except InputError as error:
            say(f"left as it is: {error}")
    tried = {label: place for label, place in places.items() if not only or place.family.name in only}
    if not tried:
        raise InputError(f"no family has measured studies in {folder} that competed: run `k3lab tune-table` first")
    chosen = {label: place.chosen for label, place in places.items()}
    capture = (capture_of or (lambda there: CapturedStep(card, there, tp=tp, rows=rows)))(places)
    check = (check_of or (lambda there: wrong(there, seed)))(places)
    verdicts = []
    for label, place in tried.items():
        (verdict,) = try_in_layer(
            chosen, {label: place.candidates}, capture, lambda layer, label=label: check(label, layer), say=say  # type: ignore[misc]
        )  # fmt: skip
        chosen[label] = Candidate(verdict.winner.engine, verdict.winner.config, verdict.winner.isolated_us)
        verdicts.append(store(place, verdict))
    return {"gpu": gpu.name, "tp": tp, "rows": rows, "evidence": "measured", "verdicts": verdicts}


def render(console: Console, data: dict[str, Any]) -> None:
    """Print both numbers of every config that was tried."""
    from rich.table import Table

    table = Table(
        "place",
        "engine",
        "alone us",
        "layer us",
        "",
        title=f"in the captured layer on {data['gpu']}, TP{data['tp']}, {data['rows']} rows",
    )
    for verdict in data["verdicts"]:
        for one in verdict["entries"]:
            mark = (
                "chosen" if (one["engine"], one["digest"]) == (verdict["engine"], verdict["digest"]) else one["failed"]
            )
            layer = "-" if one["in_situ_us"] is None else f"{one['in_situ_us']:.2f}"
            table.add_row(verdict["place"], one["engine"], f"{one['isolated_us']:.2f}", layer, mark)
    console.print(table)
    for verdict in data["verdicts"]:
        console.print(f"{verdict['place']}: {verdict['reason']}", markup=False)
