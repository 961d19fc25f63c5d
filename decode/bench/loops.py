"""What decodes a batch: captured steps on a GPU, the same bodies without one; greedily, or with drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...kernels.collectives import Collectives
from ...kernels.mla.family import BLOCK_SIZE
from ..caches import DecodeCache
from ..dispatch import Dispatcher, StepWork
from ..dspark.acceptance import acceptance
from ..dspark.captured import SpeculationGraphs
from ..dspark.decoder import SpeculativeDecoder
from ..dspark.drafter import Drafter
from ..graphs import Capture
from ..greedy import GreedyGraph, next_tokens
from ..operators import Operators
from ..prefill import fill_context
from ..run_options import RunOptions
from ..speculate_run import DRAFTINGS, drafter_weights, fitted_card
from ..weights import RankWeights


class Loop(Protocol):
    """One backend's way to decode a batch; every call ends when the device has."""

    cache: DecodeCache
    capture: Capture

    def open(self) -> int:
        """A slot, with the made-up context where one is asked for."""
        ...

    def first(self, slot: int, ids: Sequence[int], seed: int) -> int:
        """Prefill a prompt; the token behind it."""
        ...

    def begin(self, slots: Sequence[int], last: Sequence[int], seeds: Sequence[int]) -> None:
        """Requests that decode together from now on, with each one's last token."""
        ...

    def step(self) -> list[list[int]]:
        """One step; what each request puts out."""
        ...

    def drafting_s(self) -> list[float]:
        """Seconds that drafting alone takes for the requests that decode, a few times; none without drafts."""
        ...


def cache_of(weights: RankWeights, options: RunOptions) -> DecodeCache:
    """For a batch of ``options``."""
    return DecodeCache(
        weights.card, tp=weights.tp, max_requests=options.rows, max_context=options.context, dtype=weights.dtype, cache_dtype=options.cache_dtype,
        max_verify=options.drafts + 1, device=weights.device, block_size=BLOCK_SIZE, padding=True, dcp=options.dcp,
    )  # fmt: skip


class PlainLoop:
    """The likeliest token, one a step."""

    def __init__(self, dispatcher: Dispatcher, operators: Operators, options: RunOptions) -> None:
        """``dispatcher`` prefills, ``operators`` decode."""
        self.cache, self._dispatcher, self._options = dispatcher.cache, dispatcher, options
        self._graph = GreedyGraph(dispatcher.weights, self.cache, options.rows, operators, dispatcher.comm)
        self.capture = self._graph.capture

    def open(self) -> int:
        """See :class:`Loop`."""
        return _opened(self.cache, self._options)

    def first(self, slot: int, ids: Sequence[int], seed: int) -> int:
        """See :class:`Loop`."""
        logits = self._dispatcher.run(StepWork(prompts={slot: ids}))[slot]
        return int(next_tokens(logits, self._dispatcher.weights, self._dispatcher.comm)[0])

    def begin(self, slots: Sequence[int], last: Sequence[int], seeds: Sequence[int]) -> None:
        """See :class:`Loop`."""
        self._graph.begin(slots, torch.tensor(last))

    def step(self) -> list[list[int]]:
        """See :class:`Loop`."""
        return self._graph.step()

    def drafting_s(self) -> list[float]:
        """See :class:`Loop`."""
        return []


class DraftedLoop:
    """Verify, accept, inject and draft in one replay."""

    def __init__(self, dispatcher: Dispatcher, operators: Operators, options: RunOptions) -> None:
        """As :class:`PlainLoop`; the drafter's weights are made or loaded here."""
        self.cache, self._options, target = dispatcher.cache, options, dispatcher.weights
        card = fitted_card(target.card)
        self._drafter = Drafter(drafter_weights(card, target, options), target, self.cache, dispatcher.comm)
        accepts = acceptance(options.drafts, options.temperature, options.acceptance_length)
        how: dict[str, Any] = {"drafts": options.drafts, "draft_temperature": options.temperature}
        self._decoder = SpeculativeDecoder(dispatcher, self._drafter, accepts, **how)
        self._graphs = SpeculationGraphs(
            target, self.cache, dispatcher.comm, lambda _rows: operators, self._drafter, accepts, sizes=[options.rows], **how
        )  # fmt: skip
        self.capture = self._graphs.capture
        self._held: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ())

    def open(self) -> int:
        """See :class:`Loop`."""
        slot = _opened(self.cache, self._options)
        if self._options.fill:
            self._drafter.fill(slot, self._options.fill, seed=self._options.seed)
        return slot

    def first(self, slot: int, ids: Sequence[int], seed: int) -> int:
        """See :class:`Loop`."""
        token = self._decoder.join(self._decoder.prefill({slot: ids}), [seed])[0]
        self._decoder.requests.clear()  # the graphs decode them
        return token

    def begin(self, slots: Sequence[int], last: Sequence[int], seeds: Sequence[int]) -> None:
        """See :class:`Loop`."""
        self._held = (slots, last, seeds)
        self._graphs.begin(*self._held)
        self._wait()

    def step(self) -> list[list[int]]:
        """See :class:`Loop`."""
        return self._graphs.step()

    def drafting_s(self) -> list[float]:
        """See :class:`Loop`. Call it before the first step after :meth:`begin`."""
        return [_timed(lambda: self.begin(*self._held)) for _ in range(DRAFTINGS)]

    def _wait(self) -> None:
        if self.capture.device.type == "cuda":
            torch.cuda.synchronize(self.capture.device)


def _timed(what: Callable[[], None]) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def _opened(cache: DecodeCache, options: RunOptions) -> int:
    slot = cache.add()
    if options.fill:
        fill_context(cache, [slot], options.fill, seed=options.seed)
    return slot


def loop_of(dispatcher: Dispatcher, operators: Operators, options: RunOptions) -> Loop:
    """Captured for ``options.rows`` requests."""
    made = DraftedLoop if options.drafts else PlainLoop
    return made(dispatcher, operators, options)


def prompts_of(
    options: RunOptions, vocabulary: int, comm: Collectives, *, part: int | None, number: int
) -> list[list[int]]:
    """Random ids of a round, [rows][prompt]; ``part``: of a rank alone, whose part of the vocabulary has so many."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
    first = comm.rank * part if part else 0
    ids = first + torch.randint(0, part or vocabulary, (options.rows, options.prompt), generator=generator)
    return ids.tolist()  # type: ignore[no-any-return]
