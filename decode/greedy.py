"""Greedy decoding of a batch on one rank: eager on any device, or replayed from a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import Collectives
from .caches import DecodeCache
from .dispatch import Dispatcher, StepWork
from .graphs import Capture
from .likeliest import likeliest_of
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
    """See :func:`~k3lab.decode.likeliest.likeliest_of`: for logits that a step handed out."""
    return likeliest_of(logits, weights.lm_head.shape[0], comm)


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
            ids = step(weights, cache, ids[:, None], slots, operators, comm, mark=profiler_range, tokens=True)[:, 0]
            cache.accept(slots, [1] * len(slots))
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


def decode_dispatched(
    dispatcher: Dispatcher,
    prompts: Tensor,
    tokens: int,
    check: Callable[[], None],
    progress: Progress | None = None,
    prepare: Prepare | None = None,
) -> Decoded:
    """``tokens`` plain steps behind prompts, each judged by the dispatcher; requests are admitted and released here.

    Args:
        dispatcher: with the backend; a prompt but for its last token is a step of its own.
        prompts: int64 [requests, prompt].
        tokens: of each request.
        check: is called where the host has synchronised.
        progress: is told of every step.
        prepare: brings empty slots to a context that the prompts follow.
    """
    cache = dispatcher.cache
    slots = [cache.add() for _ in range(prompts.shape[0])]
    if prepare:
        prepare(slots)
    if prompts.shape[1] > 1:
        for slot, row in zip(slots, prompts[:, :-1].tolist(), strict=True):
            dispatcher.run(StepWork(prompts={slot: row}))
    ids, produced, times = prompts[:, -1].tolist(), [], []
    for index in range(tokens):
        start = time.perf_counter_ns()
        with profiler_range(f"decode step {index}"):
            work = StepWork(tokens={slot: [one] for slot, one in zip(slots, ids, strict=True)})
            told = dispatcher.run(work, tokens=True)
            cache.accept(slots, [1] * len(slots))
            chosen = torch.cat([told[slot] for slot in slots])
        if chosen.is_cuda:
            torch.cuda.synchronize(chosen.device)
            check()
        times.append(time.perf_counter_ns() - start)
        ids = chosen.tolist()
        produced.append(chosen)
        if progress:
            progress(index + 1, tokens)
    for slot in slots:
        cache.release(slot)
    return Decoded(torch.stack(produced, dim=1).tolist(), times)


class GreedyGraph:
    """A plain step of so many requests in a CUDA graph, with its choice of tokens; fewer are filled up with the padding slot.

    Without a GPU its body is simply run.
    """

    def __init__(
        self, weights: RankWeights, cache: DecodeCache, requests: int, operators: Operators, comm: Collectives
    ) -> None:
        """Warm up and capture.

        Raises:
            InputError: a cache without a padding slot.
        """
        if cache.padding is None:
            raise InputError("a captured loop needs a cache with a padding slot: DecodeCache(padding=True)")
        self.weights, self.cache, self.operators, self.comm, self.requests = weights, cache, operators, comm, requests
        self._padding = cache.padding
        device = weights.device
        self.ids = torch.zeros(requests, dtype=torch.int64, device=device)
        # captured on the padding slot: no request is disturbed
        self._where = torch.full((requests,), cache.padding, dtype=torch.int64, device=device)
        self._live = torch.zeros(requests, dtype=torch.int32, device=device)
        self._held: list[int] = []
        self.capture = Capture(device)
        self.replay = self.capture(self._body)

    def _body(self) -> None:
        chosen = forward(
            self.weights, self.cache, self.ids, self._where, self.operators, self.comm, q_len=1, mark=no_range, tokens=True
        )  # fmt: skip
        self.ids.copy_(chosen)
        self.cache.advance(self._where, self._live)

    def begin(self, slots: Sequence[int], last: Tensor) -> None:
        """Requests that decode together from now on, and each one's last token, int64 [len(slots)].

        Raises:
            InputError: more requests than the graph has.
        """
        count = len(slots)
        if count > self.requests:
            raise InputError(f"the captured step holds {self.requests} requests, not {count}")
        self._held = list(slots)
        self._where.fill_(self._padding)
        self._live.zero_()
        self._where[:count].copy_(torch.tensor(self._held))
        self._live[:count].fill_(1)
        self.ids.zero_()
        self.ids[:count].copy_(last)

    def note(self) -> None:
        """The host's side of a replay."""
        self.cache.note_accepted(self._held, [1] * len(self._held))

    def step(self) -> list[list[int]]:
        """Blocks, a replay, and the token that each request puts out; raises InputError where the cache is full."""
        self.cache.reserve(self._held, 1)
        self.replay()
        tokens = self.ids[: len(self._held)].tolist()
        self.note()
        return [[token] for token in tokens]


class GraphDecoder:
    """Requests that decode from a CUDA graph as often as asked, always from the context that they were prepared with."""

    def __init__(
        self,
        weights: RankWeights,
        cache: DecodeCache,
        requests: int,
        operators: Operators,
        comm: Collectives,
        prepare: Prepare | None = None,
    ) -> None:
        """Admit and prepare the requests, warm up, capture. The cache serves nothing else while this object lives.

        Raises:
            InputError: a cache without a padding slot.
        """
        self.cache, self.operators = cache, operators
        self.slots = [cache.add() for _ in range(requests)]
        if prepare:
            prepare(self.slots)
        # an empty context needs no copy of it
        self._prepared = [save(cache, slot, rows=False) if cache.length(slot) else None for slot in self.slots]
        self._graph = GreedyGraph(weights, cache, requests, operators, comm)

    @property
    def capture(self) -> Capture:
        """Of its step."""
        return self._graph.capture

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
        graph = self._graph
        graph.begin(self.slots, first)
        produced = torch.empty(tokens, len(self.slots), dtype=torch.int64, device=graph.ids.device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(tokens + 1)]
        marks[0].record()
        for index in range(tokens):
            with profiler_range(f"decode step {index}"):
                graph.replay()
            marks[index + 1].record()
            produced[index].copy_(graph.ids)
            graph.note()
        torch.cuda.synchronize(graph.ids.device)
        self.operators.check()
        times = [round(before.elapsed_time(after) * 1e6) for before, after in pairwise(marks)]
        return Decoded(produced.T.tolist(), times)

    def close(self) -> None:
        """Release the requests."""
        for slot in self.slots:
            self.cache.release(slot)
