"""The part of a decode run that drafts: beside either backend, eagerly, and on a GPU from a captured graph too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..kernels import InputError, ModelCard
from ..kernels.collectives import Collectives, StandIn
from ..kernels.mla.family import BLOCK_SIZE
from .caches import DecodeCache
from .checkpoint.shards import Checkpoint
from .dispatch import Dispatcher
from .dspark.acceptance import acceptance
from .dspark.captured import SpeculationGraphs
from .dspark.card import K3_DSPARK, SKIPPED, SMALL_DSPARK, DraftCard, draft_tensors
from .dspark.decoder import SpeculativeDecoder
from .dspark.drafter import Drafter
from .dspark.weights import DraftWeights, load_draft, random_rank_draft
from .graphs import kernel_names
from .operators import Operators
from .prefill import fill_context
from .ranges import profiler_range
from .run_options import RunOptions
from .scope import Scope, StepShape
from .weights import RankWeights

DRAFTINGS = 5
"""Times that a block's drafting alone is timed."""


@dataclass(frozen=True)
class Speculated:
    """What a run with drafts produced."""

    tokens: list[list[int]]
    """Per request, cut to what was asked for."""
    step_ns: list[int]
    """Wall times: draft, verify, accept."""
    told: dict[str, Any]
    """Acceptance, its label first, and steps that the specialised backend left to auto."""
    graph_tokens: list[list[int]] | None = None
    """Of the captured loop."""
    graph_step_ns: list[int] = field(default_factory=list)
    """Its times, by the host's clock: draft, verify, accept."""
    kernels: list[str] = field(default_factory=list)
    """Of its graph; empty where none was captured."""


def fitted_card(target: ModelCard) -> DraftCard:
    """The published drafter for K3; for a smaller model of its structure one that taps layers evenly.

    Raises:
        InputError: there is no drafter of the model's width.
    """
    base = next((card for card in (K3_DSPARK, SMALL_DSPARK) if card.hidden_size == target.hidden_size), None)
    if base is None:
        raise InputError(f"no drafter for hidden size {target.hidden_size}; there are those of 7168 and 256")
    layers = target.num_hidden_layers
    if base.vocab_size == target.vocab_size and max(base.target_layer_ids) < layers:
        return base
    count = len(base.target_layer_ids)
    taps = tuple(max(0, (index + 1) * layers // count - 1) for index in range(count))
    mask = min(base.mask_token_id, target.vocab_size - 2)
    return replace(
        base, name=f"{target.name}-dspark", vocab_size=target.vocab_size, target_layer_ids=taps, mask_token_id=mask
    )


def check_drafter(target: ModelCard, options: RunOptions, rank_alone: int | None) -> None:
    """Raise InputError for drafts that cannot be run, before anything is made.

    Args:
        target: the model that is drafted for.
        options: of the run.
        rank_alone: the rank that runs in place of a group; None where all do.
    """
    _check_alone(options, rank_alone)
    card = fitted_card(target)
    card.check(target, options.tp)
    card.check_drafts(options.drafts)
    if options.draft_checkpoint:
        Checkpoint.read(options.draft_checkpoint).check(draft_tensors(card), SKIPPED)


def _check_alone(options: RunOptions, rank_alone: int | None) -> None:
    if rank_alone is not None and (options.acceptance_length is None or rank_alone):
        raise InputError(
            "drafts need the whole group: a rank alone has a part of the vocabulary; rank 0 can time them with"
            " --acceptance-length, or use --tp 1"
        )


def drafter_weights(card: DraftCard, target: RankWeights, options: RunOptions) -> DraftWeights:
    """Of the target's rank: from ``options.draft_checkpoint``, or random ones of its seed."""
    place: dict[str, Any] = {"tp": target.tp, "rank": target.rank, "dtype": target.dtype, "device": str(target.device)}
    if options.draft_checkpoint:
        return load_draft(options.draft_checkpoint, card, target.card, **place)
    return random_rank_draft(card, target.card, seed=options.seed, **place)


def speculate(
    weights: RankWeights,
    options: RunOptions,
    prompts: torch.Tensor,
    comm: Collectives,
    operators: Operators,
    say: Callable[[str, int, int], None],
    *,
    scope: Scope | None = None,
    specialized: Callable[[int], Operators] | None = None,
    captured: bool = False,
    recorder: AbstractContextManager[object] | None = None,
) -> Speculated:
    """Decode with drafts until every request has ``options.tokens`` tokens.

    Args:
        weights: of the target, this rank's.
        options: of the run.
        prompts: [rows, prompt].
        comm: the tensor-parallel group.
        operators: of the fallback.
        say: is told how far it is.
        scope: what the specialised backend serves; None: it was not asked for, or cannot run here.
        specialized: its operators by rows.
        captured: whether to decode the same once more from a captured graph.
        recorder: sees the captured loop.

    Raises:
        InputError: what :func:`check_drafter` tells before anything is made.
    """
    _check_alone(options, comm.rank if isinstance(comm, StandIn) else None)
    card = fitted_card(weights.card)
    cache = DecodeCache(
        weights.card, tp=weights.tp, max_requests=options.rows, max_context=options.context, dtype=weights.dtype,
        max_verify=options.drafts + 1, device=weights.device, block_size=BLOCK_SIZE, padding=True, dcp=options.dcp,
        cache_dtype=options.cache_dtype,
    )  # fmt: skip
    drafter = Drafter(drafter_weights(card, weights, options), weights, cache, comm)
    dispatcher = Dispatcher(
        weights, cache, comm, auto=operators, specialized=specialized, scope=scope, chunk=options.chunk,
        backend="latency_specialized" if scope else "auto",
    )  # fmt: skip
    decoder = SpeculativeDecoder(
        dispatcher,
        drafter,
        acceptance(options.drafts, options.temperature, options.acceptance_length),
        drafts=options.drafts,
        draft_temperature=options.temperature,
    )

    def prepare(slots: Sequence[int]) -> None:
        fill_context(cache, slots, options.fill, seed=options.seed)
        for slot in slots:
            drafter.fill(slot, options.fill, seed=options.seed)

    seeds = [options.seed + request for request in range(options.rows)]
    decoder.admit(prompts.tolist(), seeds, prepare if options.fill else None)
    times: list[int] = []
    while (least := min(len(one.tokens) for one in decoder.requests)) < options.tokens:
        say("token", least, options.tokens)
        start = time.perf_counter_ns()
        decoder.step()
        if weights.device.type == "cuda":
            torch.cuda.synchronize(weights.device)
            operators.check()
        times.append(time.perf_counter_ns() - start)
    eager = [row.tokens[: options.tokens] for row in decoder.requests]
    looped = _looped(decoder, options, dispatcher, prepare, recorder) if captured else None
    told = decoder.to_json()
    told |= {"drafter": card.name, "drafter_weights": str(options.draft_checkpoint or "random")}
    told |= {"backend_steps": dispatcher.tally.to_json() if scope else None}
    del told["tokens"]
    if looped is None:
        return Speculated(eager, times, told)
    tokens, graph_ns, told["drafter_ns"], kernels = looped
    return Speculated(eager, times, told, tokens, graph_ns, kernels)


def _looped(
    decoder: SpeculativeDecoder,
    options: RunOptions,
    dispatcher: Dispatcher,
    prepare: Callable[[Sequence[int]], None],
    recorder: AbstractContextManager[object] | None,
) -> tuple[list[list[int]], list[int], int, list[str]]:
    """The same requests from a captured loop: tokens, times of the steps, the median of a block's drafting alone, kernels."""
    cache, drafter, device = dispatcher.cache, decoder.drafter, dispatcher.weights.device
    seeds = [one.seed for one in decoder.requests]
    again = SpeculativeDecoder(
        dispatcher, drafter, decoder.acceptance, drafts=options.drafts, draft_temperature=options.temperature
    )
    operators = dispatcher.operators_of(StepShape((options.drafts,) * options.rows))
    graphs = SpeculationGraphs(
        dispatcher.weights, cache, dispatcher.comm, lambda _rows: operators, drafter, decoder.acceptance,
        drafts=options.drafts, sizes=[options.rows], draft_temperature=options.temperature,
    )  # fmt: skip
    for one in decoder.requests:
        cache.release(one.slot)
    again.admit(decoder.prompts, seeds, prepare if options.fill else None)
    requests = again.requests

    def begin() -> None:
        graphs.begin([one.slot for one in requests], [one.last for one in requests], seeds)

    def timed(what: Callable[[], object]) -> int:
        start = time.perf_counter_ns()
        what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            operators.check()
        return time.perf_counter_ns() - start

    def one_step() -> None:
        for one, out in zip(requests, graphs.step(), strict=True):
            one.tokens += out

    drafting = [timed(begin) for _ in range(DRAFTINGS)]
    times: list[int] = []
    with recorder or nullcontext():
        while min(len(one.tokens) for one in requests) < options.tokens:
            with profiler_range(f"decode step {len(times)}"):
                times.append(timed(one_step))
    names = kernel_names(graphs.capture.graphs[-1]) if graphs.capture.graphs else []
    return [one.tokens[: options.tokens] for one in requests], times, int(statistics.median(drafting)), names
