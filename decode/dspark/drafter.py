"""A drafter beside a target's cache: its own rows lie in pages of their own, under the target's block table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import InputError
from ...kernels.collectives import Collectives
from ...kernels.lm_head.twin import embed
from ..caches import DecodeCache
from ..weights import RankWeights
from .reference import Drafts, context_rows, draft_hidden, draft_tokens
from .weights import DraftWeights


class Drafter:
    """Drafts for the requests of a :class:`~k3lab.decode.caches.DecodeCache`; the reference, not captured."""

    def __init__(self, weights: DraftWeights, target: RankWeights, cache: DecodeCache, comm: Collectives) -> None:
        """Pages for every block of the cache.

        Raises:
            InputError: weights of another rank than the target's, or a drafter of another model.
        """
        weights.card.check(target.card, target.tp)
        if (weights.tp, weights.rank) != (target.tp, target.rank):
            raise InputError(
                f"the drafter's weights are those of rank {weights.rank} of {weights.tp},"
                f" the target's of rank {target.rank} of {target.tp}"
            )
        self.weights, self.target, self.cache, self.comm = weights, target, cache, comm
        shape = (cache.blocks, cache.block_size, weights.card.row)
        self.pages = [
            torch.zeros(shape, dtype=weights.context_proj.dtype, device=target.device) for _ in weights.layers
        ]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose residual it reads."""
        return self.weights.card.target_layer_ids

    def _places(self, slot: int, start: int, stop: int) -> Tensor:
        """Rows of the flattened pages that hold a request's positions."""
        position = torch.arange(start, stop)
        blocks = torch.tensor(self.cache.blocks_of(slot), dtype=torch.long)
        return (
            blocks[position // self.cache.block_size] * self.cache.block_size + position % self.cache.block_size
        ).to(self.target.device)

    @torch.inference_mode()
    def inject(self, slot: int, start: int, residuals: Sequence[Tensor]) -> None:
        """Keep what the target made of accepted positions.

        Args:
            slot: the request.
            start: the first position.
            residuals: after each tapped layer, [n, H] each, of ``n`` positions in a row.
        """
        count = residuals[0].shape[0]
        where = self._places(slot, start, start + count)
        positions = torch.arange(start, start + count, device=self.target.device)
        for pages, rows in zip(self.pages, context_rows(self.weights, residuals, positions), strict=True):
            pages.flatten(0, 1)[where] = rows

    @torch.inference_mode()
    def fill(self, slot: int, tokens: int, *, seed: int = 0) -> None:
        """Make up the rows of the first ``tokens`` positions, as :func:`~k3lab.decode.prefill.fill_context` does the target's."""
        where = self._places(slot, 0, tokens)
        generator = torch.Generator(device=where.device)
        generator.manual_seed(seed)
        for pages in self.pages:
            shape = (tokens, pages.shape[-1])
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=where.device)
            pages.flatten(0, 1)[where] = drawn.to(pages.dtype)

    @torch.inference_mode()
    def draft(
        self, slots: Sequence[int], last: Tensor, count: int, *, temperature: float = 0.0, seeds: Tensor | None = None
    ) -> Drafts:
        """``count`` tokens for each request.

        Args:
            slots: the requests; what they drafted before needs no undoing.
            last: int64 [B]: each one's last token, which the target has not seen.
            count: drafts a request.
            temperature: 0 drafts the likeliest tokens.
            seeds: int64 [B], for a temperature above 0.

        Raises:
            InputError: more drafts than the drafter makes.
        """
        card = self.weights.card
        card.check_drafts(count)
        device = self.target.device
        lengths = torch.tensor([self.cache.length(slot) for slot in slots], device=device)
        positions = lengths[:, None] + torch.arange(count, device=device)
        ids = torch.full((len(slots), count), card.mask_token_id, dtype=torch.int64, device=device)
        ids[:, 0] = last
        embedded = embed(ids.flatten(), self.target.embed, self.comm).view(len(slots), count, -1)
        places = [self._places(slot, 0, self.cache.length(slot)) for slot in slots]
        context = [[pages.flatten(0, 1)[where] for where in places] for pages in self.pages]
        hidden = draft_hidden(self.weights, embedded, context, positions, self.comm)
        return draft_tokens(
            self.weights, hidden, self.target.lm_head, last, self.comm,
            temperature=temperature, seeds=seeds, positions=positions + 1,
        )  # fmt: skip
