"""Draft, verify, accept and inject in one graph: a replay is a whole speculative step, and nothing of it needs the host.

The host gives blocks before a step and reads tokens and counts after it, which it may do later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels import InputError
from ...kernels.collectives import Collectives
from ..caches import DecodeCache
from ..graphs import Capture
from ..operators import Operators
from ..step import MAX_ROWS, MAX_VERIFY, forward
from ..weights import RankWeights
from .acceptance import Acceptance
from .drafter import Drafter
from .reference import Drafts


class SpeculationGraphs:
    """Speculative steps for several numbers of requests, all with ``drafts`` drafts each."""

    def __init__(
        self,
        weights: RankWeights,
        cache: DecodeCache,
        comm: Collectives,
        operators: Callable[[int], Operators],
        drafter: Drafter,
        acceptance: Acceptance,
        *,
        drafts: int,
        sizes: Sequence[int],
        draft_temperature: float = 0.0,
    ) -> None:
        """Capture.

        Args:
            weights: of the target, this rank's.
            cache: with a padding slot, and snapshots for drafts + 1 tokens.
            comm: the tensor-parallel group.
            operators: rows to the operators of the target's step.
            drafter: beside the cache.
            acceptance: who accepts.
            drafts: a request and step.
            sizes: requests of the steps to capture.
            draft_temperature: 0 drafts the likeliest tokens.

        Raises:
            InputError: sizes that a step or the cache does not hold.
        """
        q_len = drafts + 1
        drafter.weights.card.check_drafts(drafts)
        if cache.padding is None or q_len > min(MAX_VERIFY, cache.max_verify):
            raise InputError(f"{drafts} drafts: the cache needs a padding slot and snapshots for {q_len} tokens")
        if not sizes or min(sizes) < 1 or max(sizes) * q_len > MAX_ROWS:
            raise InputError(
                f"steps of {list(sizes)} requests with {q_len} tokens: 1 to {MAX_ROWS} rows can be captured"
            )
        self.weights, self.cache, self.comm, self.drafter, self.acceptance = weights, cache, comm, drafter, acceptance
        self._operators, self.drafts, self.temperature = operators, drafts, draft_temperature
        self.sizes, most, device = tuple(sorted(set(sizes))), max(sizes), weights.device

        def whole(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self._slots, self._live = whole(most, value=cache.padding), whole(most, dtype=torch.int32)
        self._seeds, self._last, self._next = whole(most), whole(most), whole(most, drafts)
        # what drafts were sampled from: accepting them needs it
        vocabulary = weights.card.vocab_size if draft_temperature else 0
        self._from = torch.zeros(most, drafts, vocabulary, dtype=torch.float32, device=device)
        self.tokens, self.counts = whole(most, q_len), whole(most)
        self.capture = Capture(device)
        self._first = {size: self.capture(self._draft(size)) for size in reversed(self.sizes)}
        self._steps = {size: self.capture(self._step(size)) for size in reversed(self.sizes)}
        self._size, self._held, self._count = self.sizes[0], list[int](), 0

    def _keep(self, size: int, made: Drafts) -> None:
        self._next[:size].copy_(made.tokens)
        if made.logits is not None:
            self._from[:size].copy_(made.logits)

    def _drafted(self, size: int) -> Drafts:
        return self.drafter.draft_block(
            self._slots[:size], self._last[:size], self.drafts, temperature=self.temperature, seeds=self._seeds[:size]
        )

    def _draft(self, size: int) -> Callable[[], None]:
        def body() -> None:
            self._keep(size, self._drafted(size))

        return body

    def _step(self, size: int) -> Callable[[], None]:
        q_len, cache = self.drafts + 1, self.cache
        slots, live, seeds, last = self._slots[:size], self._live[:size], self._seeds[:size], self._last[:size]
        operators, wanted, greedy = self._operators(size * q_len), self.drafter.taps, self.acceptance.greedy

        def body() -> None:
            start, seen = cache.context[slots], dict[int, Tensor]()

            def tap(layer: int, residual: Tensor) -> None:
                if layer in wanted:
                    seen[layer] = residual

            drafts = self._next[:size]
            ids = torch.cat([last[:, None], drafts.clamp(min=0)], dim=1).flatten()
            out = forward(self.weights, cache, ids, slots, operators, self.comm, q_len=q_len, tap=tap, tokens=greedy)
            positions = start.long()[:, None] + torch.arange(1, q_len + 1, device=ids.device)
            sampled = Drafts(drafts, self._from[:size] if self.temperature else None)
            if greedy:
                made = self.acceptance.verify_tokens(sampled, out.view(size, q_len), seeds, positions)
            else:
                made = self.acceptance.verify(sampled, out.view(size, q_len, -1), seeds, positions)
            self.tokens[:size].copy_(made.tokens)
            self.counts[:size].copy_(made.counts)
            cache.advance(slots, made.counts.to(torch.int32) * live)
            residuals = [seen[layer] for layer in wanted]
            self.drafter.inject_block(slots, start, residuals, q_len)
            last.copy_(made.tokens.gather(1, made.counts[:, None] - 1).squeeze(1))
            self._keep(size, self._drafted(size))

        return body

    def begin(self, slots: Sequence[int], last: Sequence[int], seeds: Sequence[int]) -> None:
        """Requests that decode together from now on; drafts for their first step are made.

        Args:
            slots: in the cache, their context injected.
            last: each one's last token, which the target has not seen.
            seeds: of each.

        Raises:
            InputError: more requests than any captured step has.
        """
        size = next((size for size in self.sizes if size >= len(slots)), None)
        if size is None:
            raise InputError(f"no captured step holds {len(slots)} requests; the largest has {self.sizes[-1]}")
        assert self.cache.padding is not None
        self._size, self._held, self._count = size, list(slots), len(slots)
        rest = size - self._count
        for tensor, values, fill in (
            (self._slots, slots, self.cache.padding), (self._live, [1] * self._count, 0), (self._last, last, 0),
            (self._seeds, seeds, 0),
        ):  # fmt: skip
            tensor[:size].copy_(torch.tensor([*values, *[fill] * rest], dtype=tensor.dtype))
        self._first[size]()

    def reserve(self) -> None:
        """Blocks for the next step, as many as if all its drafts were accepted; raises InputError where the cache is full."""
        self.cache.begin(self._held, self.drafts + 1)

    def replay(self) -> None:
        """One step, on the device alone."""
        self._steps[self._size]()

    def step(self) -> list[list[int]]:
        """One step; what each request puts out."""
        self.reserve()
        self.replay()
        counts = self.counts[: self._count].tolist()
        self.cache.note_accepted(self._held, counts)
        tokens = self.tokens[: self._count].tolist()
        return [row[:count] for row, count in zip(tokens, counts, strict=True)]
