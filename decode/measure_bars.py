"""Measuring the bars of :mod:`k3lab.decode.bars`: one rank alone, graphs of a part of its layers and of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.collectives import Collectives, StandIn
from ..kernels.gpu_cards import GpuCard
from ..kernels.mla.family import BLOCK_SIZE
from ..kernels.model_card import LayerKind
from .bars import KINDS, Graph, Slope, depths, layer_floor_us, routing_fault, slope, step_floor_us
from .caches import DecodeCache
from .choices import StepForm
from .graphs import Capture, kernel_names
from .kernel_times import REPLAYS, NotSeenError, Ran, Tracer, a_layer
from .operators import Operators
from .prefill import fill_context
from .run_options import cache_dtype
from .step import forward
from .weights import MoeMlp, RankWeights

SAMPLES = 30
Timer = Callable[[Callable[[], None], int], list[float]]
"""Microseconds of so many runs, each by itself."""
Say = Callable[[str, int, int], None]


def by_events(run: Callable[[], None], samples: int) -> list[float]:
    """Device time of each run."""
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in pairwise(marks)]


@dataclass(frozen=True)
class Load:
    """What a step has to do."""

    requests: int
    q_len: int
    context: int
    dcp: int = 1
    """Ranks that share each context: one, or all."""
    kv_dtype: str = StepForm.cache_dtype
    """Of the MLA rows."""

    @property
    def rows(self) -> int:
        """Token rows."""
        return self.requests * self.q_len

    @property
    def form(self) -> StepForm:
        """Of its step, which hands out tokens: as greedy decoding and verification do."""
        return StepForm(self.q_len, self.kv_dtype, self.context + self.q_len, self.dcp, "tokens")


def some_layers(weights: RankWeights, kind: LayerKind, count: int) -> RankWeights:
    """The same weights, of ``count`` MoE layers of one kind alone; nothing is copied."""
    card = weights.card
    chosen = [one for at, one in enumerate(weights.layers) if card.kind_of(at) == kind and isinstance(one.mlp, MoeMlp)]
    part = replace(
        card, name=f"{card.name}-{count}-{kind}", num_hidden_layers=count, first_k_dense=0,
        mla_layers=tuple(range(count)) if kind == "mla" else (),
    )  # fmt: skip
    return replace(weights, card=part, layers=tuple(chosen[:count]))


class Counting:
    """Operators that count the distinct experts of every layer, on the host: for a step outside the timing."""

    def __init__(self, operators: Operators) -> None:
        """Wrap."""
        self._operators = operators
        self.distinct: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def router(self, x: Tensor, mlp: MoeMlp, comm: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        """The operators' own; ids are looked at."""
        ids, chosen, latent = self._operators.router(x, mlp, comm)
        self.distinct.append(len(ids.unique()))
        return ids, chosen, latent


class Bench:
    """Steps of a rank's weights under a load."""

    def __init__(self, weights: RankWeights, comm: Collectives, load: Load, *, seed: int) -> None:
        """Token ids are the same on all ranks; a rank alone has those of its own part of the vocabulary."""
        self.weights, self.comm, self.load, self._seed = weights, comm, load, seed
        generator = torch.Generator().manual_seed(seed)
        part = weights.embed.shape[0]
        first, count = (comm.rank * part, part) if isinstance(comm, StandIn) else (0, part * comm.size)
        ids = first + torch.randint(0, count, (load.rows,), generator=generator)
        self._ids = ids.to(weights.device)

    def _cache(self, weights: RankWeights) -> tuple[DecodeCache, Tensor]:
        load = self.load
        cache = DecodeCache(
            weights.card, tp=weights.tp, max_requests=load.requests, max_context=load.context + load.q_len, dtype=weights.dtype,
            max_verify=load.q_len, block_size=BLOCK_SIZE, device=weights.device, dcp=load.dcp,
            cache_dtype=cache_dtype(load.kv_dtype),
        )  # fmt: skip
        slots = [cache.add() for _ in range(load.requests)]
        if load.context:
            fill_context(cache, slots, load.context, seed=self._seed)
        cache.reserve(slots, load.q_len)
        return cache, torch.tensor(slots, device=weights.device)

    def _captured(self, weights: RankWeights, operators: Operators) -> tuple[Capture, Callable[[], None]]:
        """A step of some of the layers, and what runs it."""
        cache, slots = self._cache(weights)

        def body() -> None:
            forward(weights, cache, self._ids, slots, operators, self.comm, q_len=self.load.q_len, tokens=True)

        capture = Capture(weights.device)
        return capture, capture(body)

    def graph(self, weights: RankWeights, operators: Operators, timer: Timer, samples: int) -> tuple[Graph, list[str]]:
        """A step of some of the layers, captured and timed; and the kernels that it launches."""
        capture, run = self._captured(weights, operators)
        names = kernel_names(capture.graphs[0]) if capture.graphs else []
        times = timer(run, samples)
        operators.check()
        launches = len(names) if capture.graphs else None
        return Graph(len(weights.layers), tuple(times), launches), names

    def traced(self, operators: Operators, tracer: Tracer, kinds: Sequence[LayerKind]) -> dict[str, Any]:
        """What each kernel takes, in a layer by kind and in the whole step; ``not_traced``: why nothing can be said."""

        def ran(weights: RankWeights) -> list[list[Ran]]:
            _, run = self._captured(weights, operators)
            seen = tracer(run, REPLAYS)
            operators.check()
            return seen

        layers: dict[str, list[dict[str, Any]]] = {}
        try:
            for kind in kinds:
                few, many = depths(self.weights.card, kind)
                seen = [ran(some_layers(self.weights, kind, count)) for count in (few, many)]
                layers[kind] = a_layer(seen[0], seen[1], many - few)
            return {"layers": layers, "step": a_layer((), ran(self.weights), 1), "not_traced": None}
        except NotSeenError as error:  # what was timed stands without it
            return {"layers": {}, "step": [], "not_traced": str(error)}

    def captured(self, operators: Operators) -> tuple[list[str], Callable[[], None]]:
        """A step of all layers: the kernels of its graph, none without a GPU, and what runs it."""
        capture, run = self._captured(self.weights, operators)
        return kernel_names(capture.graphs[0]) if capture.graphs else [], run

    @torch.inference_mode()
    def logits(self, operators: Operators) -> Tensor:
        """Of one step of all layers, eagerly, from the context that every step here begins with: [rows, V]."""
        cache, slots = self._cache(self.weights)
        return forward(self.weights, cache, self._ids, slots, operators, self.comm, q_len=self.load.q_len)

    def distinct(self, operators: Operators) -> float:
        """Experts a layer hits, in the mean over all MoE layers."""
        counting = Counting(operators)
        self.logits(counting)
        return sum(counting.distinct) / len(counting.distinct)

    def layer(
        self, operators: Operators, kind: LayerKind, timer: Timer, samples: int
    ) -> tuple[Slope, dict[str, float], list[Graph]]:
        """A layer's slope, and the kernels that the larger graph has more of, a layer."""
        graphs, names = [], []
        for count in depths(self.weights.card, kind):
            made, found = self.graph(some_layers(self.weights, kind, count), operators, timer, samples)
            graphs.append(made)
            names.append(Counter(found))
        more = graphs[1].layers - graphs[0].layers
        return slope(*graphs), {name: count / more for name, count in (names[1] - names[0]).items()}, graphs

    def table(
        self,
        name: str,
        operators: Operators,
        gpu: GpuCard,
        timer: Timer,
        samples: int,
        kinds: Sequence[LayerKind],
        say: Say,
    ) -> dict[str, Any]:
        """All figures of one backend."""
        weights, load, layers = self.weights, self.load, dict[str, Any]()
        card, tp = weights.card, weights.tp
        for kind in kinds:
            say(f"{load.rows} rows, {name}: {kind} layers", 0, 1)
            one, names, graphs = self.layer(operators, kind, timer, samples)
            floor = layer_floor_us(card, tp, load.rows, load.q_len, kind, gpu, stock=name == "auto")
            layers[kind] = {
                "us": one.us, "launches": one.launches, "floor_us": floor, "share_of_floor": floor / one.us if one.us > 0 else None,
                "kernels": names, "graphs": [
                    {"layers": graph.layers, "us": graph.us, "spread": graph.spread, "launches": graph.launches} for graph in graphs
                ],
            }  # fmt: skip
        say(f"{load.rows} rows, {name}: all layers", 0, 1)
        whole, _ = self.graph(weights, operators, timer, samples)
        distinct = self.distinct(operators)
        return {
            "layers": layers, "step_us": whole.us, "step_spread": whole.spread, "step_launches": whole.launches,
            "step_floor_us": step_floor_us(card, tp, load.rows, load.q_len, gpu), "distinct_experts": distinct,
            "routing_fault": routing_fault(card, load.rows, distinct),
        }  # fmt: skip


def _silent(_what: str, _done: int, _of: int) -> None:
    """Nobody is told."""


def measure(
    weights: RankWeights, comm: Collectives, loads: Sequence[Load], backends: dict[str, Callable[[Load], Operators]], gpu: GpuCard,
    *, timer: Timer = by_events, samples: int = SAMPLES, say: Say = _silent, kinds: Sequence[LayerKind] = KINDS,
    seed: int = 0, tracer: Tracer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The table of all loads and backends.

    Args:
        weights: of one rank; ``backends`` turn its experts into the layout that they read, one backend after the other.
        comm: its group, or a stand-in.
        loads: what steps have to do.
        backends: by name, load to operators.
        gpu: for floors.
        timer: times runs.
        samples: of each graph.
        say: is told how far it is.
        kinds: of the layers.
        seed: of token ids and of the made-up context.
        tracer: sees the kernels of a few more replays of each graph, when all of them are timed: a profiler that was there
            once may cost later replays something. None: nobody looks.
    """
    found: list[dict[str, Any]] = [{} for _ in loads]
    for name, make in backends.items():
        for place, load in enumerate(loads):
            found[place][name] = Bench(weights, comm, load, seed=seed).table(
                name, make(load), gpu, timer, samples, kinds, say
            )
    for name, make in backends.items() if tracer else ():
        # auto's hundreds of kernels a layer would take most of a measurement's time, and no bar asks for them
        if name == "auto":
            continue
        for place, load in enumerate(loads):
            say(f"{load.rows} rows, {name}: kernel by kernel", 0, 1)
            assert tracer
            seen = Bench(weights, comm, load, seed=seed).traced(make(load), tracer, kinds)
            found[place][name] |= {"step_kernel_times": seen["step"], "not_traced": seen["not_traced"]}
            for kind, times in seen["layers"].items():
                found[place][name]["layers"][kind] |= {
                    "kernel_times": times, "traced_us": sum(own["us"] for own in times),
                }  # fmt: skip
    table = [
        {
            "rows": load.rows, "requests": load.requests, "tokens_a_request": load.q_len, "context": load.context,
            "dcp": load.dcp, "backends": one, "ratios": _ratios(one),
        }
        for load, one in zip(loads, found, strict=True)
    ]  # fmt: skip
    return {"model": weights.card.name, "tp": weights.tp, "rank": weights.rank, "gpu": gpu.name, "rows": table}


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    """``auto``'s time over the tuned path's, layer by kind and whole step."""
    if not {"auto", "latency_specialized"} <= set(found):
        return {}
    auto, own = found["auto"], found["latency_specialized"]
    layers = {f"{kind} layer": auto["layers"][kind]["us"] / own["layers"][kind]["us"] for kind in own["layers"]}
    return {**layers, "step": auto["step_us"] / own["step_us"]}
