"""A KDA and an MLA layer of a model's real widths, on all ranks of a group at once: what one rank measures, and what all found.

The layers stand alternately in a model that is cut down to them. A layer's time is a slope, as in
:mod:`k3lab.decode.bars`. Every replay begins behind a barrier of all ranks; its time is the slowest rank's.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..kernels import InputError, ModelCard
from ..kernels.gpu_cards import GpuCard
from .bars import KINDS, Graph, layer_floor_us, routing_fault
from .launches import counted

if TYPE_CHECKING:
    from torch import Tensor

    from .measure_bars import Bench, Load, Timer
    from .operators import Operators

MOST_PAIRS = 16
MOST_OFF = 0.5
"""Of a backend's logits from ``auto``'s, relatively: rounding and a few other experts stay far below it, another computation does not."""
MEET_CYCLES = 400_000
"""That a GPU idles before the barrier, about 0.2 ms: meanwhile the host queues the barrier and the graph behind it."""
WARM = 3


def pair_card(card: ModelCard, pairs: int) -> ModelCard:
    """The model with ``pairs`` times a KDA and an MLA layer, all of them with experts; its widths stay.

    Raises:
        InputError: fewer pairs than a slope needs, more than :data:`MOST_PAIRS`, or a model without layers of both kinds.
    """
    if not 2 <= pairs <= MOST_PAIRS:
        raise InputError(f"pairs is {pairs}; 2 to {MOST_PAIRS}: a layer's time is a slope between few and many")
    if set(card.layer_kinds) != set(KINDS):
        raise InputError(f"{card.name} has no layers of both kinds, {' and '.join(KINDS)}")
    return replace(
        card, name=f"{card.name}-{pairs}-pairs", num_hidden_layers=2 * pairs, first_k_dense=0,
        mla_layers=tuple(range(1, 2 * pairs, 2)),
    )  # fmt: skip


def together(meet: Callable[[], None]) -> Timer:
    """Device times of runs, each behind a barrier of all ranks on the device; all ranks call it equally often."""
    import torch

    def timed(run: Callable[[], None], samples: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM + samples)]
        for start, end in marks:
            torch.cuda._sleep(MEET_CYCLES)
            meet()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in marks[WARM:]]

    return timed


def by_clock(meet: Callable[[], object]) -> Timer:
    """The host's times, for ranks without a GPU: they say nothing of a kernel."""
    import time

    def timed(run: Callable[[], None], samples: int) -> list[float]:
        found = []
        for _ in range(1 + samples):
            meet()
            start = time.perf_counter_ns()
            run()
            found.append((time.perf_counter_ns() - start) / 1e3)
        return found[1:]

    return timed


def _told(graph: Graph) -> dict[str, Any]:
    return {"layers": graph.layers, "launches": graph.launches, "spread": graph.spread, "samples_us": list(graph.samples_us)}  # fmt: skip


def on_rank(
    bench: Bench, operators: Operators, timer: Timer, samples: int, planned: Mapping[str, int], beside: Tensor | None
) -> tuple[dict[str, Any], Tensor]:
    """What this rank measures of one backend and load; all ranks call it.

    Args:
        bench: of the cut-down model, this rank's weights and the group.
        operators: of the backend.
        timer: of runs that all ranks make together.
        samples: of each graph.
        planned: launches a step of every tuned kernel.
        beside: logits of another backend.

    Returns:
        (JSON-able: graphs of ``layers`` by kind and of the ``step``, ``launches`` against the plan (None without a graph),
        ``distinct_experts``, ``digests`` of the logits of two runs, whether they are ``finite``, ``off``, how far they are from
        those beside; the logits).
    """
    digests = []
    for _ in range(2):
        logits = bench.logits(operators).float().cpu().contiguous()
        operators.check()
        digests.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16])
    layers = {}
    for kind in KINDS:
        _, names, graphs = bench.layer(operators, kind, timer, samples)
        layers[kind] = {"graphs": [_told(graph) for graph in graphs], "kernels": names}
    whole, names_all = bench.graph(bench.weights, operators, timer, samples)
    return {
        "digests": digests, "layers": layers, "step": _told(whole), "distinct_experts": bench.distinct(operators),
        "launches": None if whole.launches is None else counted(planned, names_all),
        "finite": bool(logits.isfinite().all()),
        "off": None if beside is None else ((logits - beside).norm() / beside.norm()).item(),
    }, logits  # fmt: skip


def _over(graphs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One graph as all ranks ran it: ``us`` of the slowest rank, the median over replays; how far the ranks' medians are apart."""
    slowest = [max(samples) for samples in zip(*(one["samples_us"] for one in graphs), strict=True)]
    medians = [statistics.median(one["samples_us"]) for one in graphs]
    return {
        "layers": graphs[0]["layers"], "launches": graphs[0]["launches"], "us": statistics.median(slowest),
        "over_ranks_us": max(medians) - min(medians),
        "ranks": [
            {"us": median, "spread": one["spread"], "samples_us": one["samples_us"]}
            for median, one in zip(medians, graphs, strict=True)
        ],
    }  # fmt: skip


def _layer(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A layer's slope: of the slowest ranks' times, and of each rank's own medians."""
    few, many = (_over([one["graphs"][place] for one in ranks]) for place in (0, 1))
    more = many["layers"] - few["layers"]
    each = [(last["us"] - first["us"]) / more for first, last in zip(few["ranks"], many["ranks"], strict=True)]
    launches = None if many["launches"] is None else (many["launches"] - few["launches"]) / more
    return {
        "us": (many["us"] - few["us"]) / more, "ranks_us": each, "over_ranks_us": max(each) - min(each),
        "launches": launches, "kernels": ranks[0]["kernels"], "graphs": [few, many],
    }  # fmt: skip


def faults_of(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every rank whose logits have other bits than rank 0's, or in a second run, or mean nothing; or whose graph is not as planned."""
    found = []
    for rank, one in enumerate(ranks):
        first, again = one["digests"]
        if first != ranks[0]["digests"][0]:
            found.append(f"rank {rank} has other logits than rank 0")
        if again != first:
            found.append(f"rank {rank} has other logits in a second run")
        if not one["finite"]:
            found.append(f"rank {rank} has logits that are no finite numbers")
        elif one["off"] is not None and not one["off"] <= MOST_OFF:
            found.append(f"rank {rank} has logits {one['off']:.2g} from auto's, relatively: no rounding")
        found += [f"rank {rank}: {line}" for line in (one["launches"] or {}).get("differences", ())]
    return found


def over_ranks(
    card: ModelCard, load: Load, name: str, ranks: Sequence[Mapping[str, Any]], gpu: GpuCard | None
) -> dict[str, Any]:
    """What all ranks measured of one backend and load, in rank order, as one.

    Args:
        card: of the model, cut down or not: a layer's bytes are the same.
        load: of the step.
        name: of the backend: stock engines read more a layer than a path that shards the router does.
        ranks: of :func:`on_rank`.
        gpu: for the floor; None without one.
    """
    layers = {}
    for kind in KINDS:
        own = _layer([one["layers"][kind] for one in ranks])
        floor = layer_floor_us(card, len(ranks), load.rows, load.q_len, kind, gpu, stock=name == "auto") if gpu else None  # fmt: skip
        layers[kind] = {**own, "floor_us": floor}
    step = _over([one["step"] for one in ranks])
    return {
        "layers": layers, "pair_us": sum(one["us"] for one in layers.values()), "step": step,
        "launches": ranks[0]["launches"], "off_auto": ranks[0]["off"], "distinct_experts": ranks[0]["distinct_experts"], "logits": ranks[0]["digests"][0],
        "routing_fault": routing_fault(card, load.rows, ranks[0]["distinct_experts"]), "faults": faults_of(ranks),
    }  # fmt: skip
