"""Greedy decoding of a batch on one rank: eager on any device, or replayed from a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.collectives import Collectives, StandIn
from .caches import DecodeCache
from .operators import Operators
from .ranges import profiler_range
from .saved import restore, save
from .step import forward, no_range, step
from .weights import RankWeights

Progress = Callable[[int, int], None]
"""Called with (steps done, steps)."""
Prepare = Callable[[Sequence[int]], None]
"""Brings requests that were just admitted to the context that decoding starts from."""


@dataclass(frozen=True)
class Decoded:
    """What a greedy run produced."""

    tokens: list[list[int]]
    """Per request."""
    step_ns: list[int]
    """Wall time of a step (eager) or device time of a replay (graph), integer nanoseconds."""


def next_tokens(logits: Tensor, weights: RankWeights, comm: Collectives) -> Tensor:
    """The likeliest token of each row, the lower id among equals.

    A rank alone in place of a group has only its own part of the vocabulary to choose from: its gather
    repeats that part.
    """
    if isinstance(comm, StandIn):
        logits = logits[..., : weights.lm_head.shape[0]]
    # argmax leaves open which of equals it returns
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1] - 1).amin(-1)


def decode_eager(
    weights: RankWeights,
    cache: DecodeCache,
    first: Tensor,
    tokens: int,
    operators: Operators,
    comm: Collectives,
    progress: Progress | None = None,
    prepare: Prepare | None = None,
) -> Decoded:
    """``tokens`` plain steps from the ids ``first`` [requests]; the requests are admitted, prepared and released here."""
    slots = [cache.add() for _ in range(first.shape[0])]
    if prepare:
        prepare(slots)
    ids, produced, times = first, [], []
    for index in range(tokens):
        start = time.perf_counter_ns()
        with profiler_range(f"decode step {index}"):
            logits = step(weights, cache, ids[:, None], slots, operators, comm, mark=profiler_range)
            cache.accept(slots, [1] * len(slots))
            ids = next_tokens(logits[:, 0], weights, comm)
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
            operators.check()
        times.append(time.perf_counter_ns() - start)
        produced.append(ids)
        if progress:
            progress(index + 1, tokens)
    for slot in slots:
        cache.release(slot)
    return Decoded(torch.stack(produced, dim=1).tolist(), times)


class GraphDecoder:
    """A plain step in a CUDA graph: static ids, slots and caches; a replay appends one token a request."""

    WARM_UP = 3

    def __init__(
        self,
        weights: RankWeights,
        cache: DecodeCache,
        requests: int,
        operators: Operators,
        comm: Collectives,
        prepare: Prepare | None = None,
    ) -> None:
        """Admit and prepare the requests, warm up, capture. The cache serves nothing else while this object lives."""
        self.weights, self.cache, self.operators, self.comm = weights, cache, operators, comm
        self.slots = [cache.add() for _ in range(requests)]
        if prepare:
            prepare(self.slots)
        # an empty context needs no copy of it
        self._prepared = [save(cache, slot, rows=False) if cache.length(slot) else None for slot in self.slots]
        device = weights.device
        self.ids = torch.zeros(requests, dtype=torch.int64, device=device)
        self._where = torch.tensor(self.slots, device=device)
        self._ones = torch.ones(requests, dtype=torch.int32, device=device)
        cache.reserve(self.slots, 1)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                self._body()
                self._restart()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            self._body()
        self._restart()

    def _body(self) -> None:
        logits = forward(
            self.weights, self.cache, self.ids, self._where, self.operators, self.comm, q_len=1, mark=no_range
        )
        self.ids.copy_(next_tokens(logits, self.weights, self.comm))
        self.cache.advance(self._where, self._ones)

    def _restart(self) -> None:
        """The requests as they were prepared: no token was accepted yet."""
        for slot, saved in zip(self.slots, self._prepared, strict=True):
            if saved:
                restore(self.cache, slot, saved)
            else:
                self.cache.forget(slot)

    def decode(self, first: Tensor, tokens: int) -> Decoded:
        """``tokens`` replays from the ids ``first`` [requests], with device times by CUDA events."""
        self._restart()
        self.cache.reserve(self.slots, tokens)
        self.ids.copy_(first)
        produced = torch.empty(tokens, len(self.slots), dtype=torch.int64, device=self.ids.device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(tokens + 1)]
        marks[0].record()
        for index in range(tokens):
            with profiler_range(f"decode step {index}"):
                self.graph.replay()
            marks[index + 1].record()
            produced[index].copy_(self.ids)
            self.cache.note_accepted(self.slots, [1] * len(self.slots))
        torch.cuda.synchronize(self.ids.device)
        self.operators.check()
        times = [round(before.elapsed_time(after) * 1e6) for before, after in pairwise(marks)]
        return Decoded(produced.T.tolist(), times)

    def close(self) -> None:
        """Release the requests."""
        for slot in self.slots:
            self.cache.release(slot)
