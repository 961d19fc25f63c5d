"""A drafter beside a target's cache: its own rows lie in pages of their own, under the target's block table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import InputError
from ...kernels.collectives import Collectives
from ..auto import embedded
from ..caches import DecodeCache
from ..weights import RankWeights
from .paged import block_hidden, inject_rows, product
from .reference import Drafts, context_rows, draft_tokens
from .weights import DraftWeights


class Drafter:
    """Drafts for the requests of a :class:`~k3lab.decode.caches.DecodeCache`; what runs on the device can be captured."""

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
        pages = next(iter(cache.mla.values())).shape[0] if cache.mla else cache.blocks
        # a rank holds the rows of all tokens, the target's cache where contexts are shared a part of each block's
        shape = (pages, cache.block_size * cache.dcp, weights.card.row)
        self.pages = [
            torch.zeros(shape, dtype=weights.context_proj.dtype, device=target.device) for _ in weights.layers
        ]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose residual it reads."""
        return self.weights.card.target_layer_ids

    def _places(self, slot: int, start: int, stop: int) -> Tensor:
        """Rows of the flattened pages that hold a request's positions."""
        position, size = torch.arange(start, stop), self.pages[0].shape[1]
        blocks = torch.tensor(self.cache.blocks_of(slot), dtype=torch.long)
        return (blocks[position // size] * size + position % size).to(self.target.device)

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
        for pages, rows in zip(self.pages, context_rows(self.weights, residuals, positions, product), strict=True):
            pages.flatten(0, 1)[where] = rows

    def inject_block(self, slots: Tensor, start: Tensor, residuals: list[Tensor], tokens: int) -> None:
        """The device side of :meth:`inject` for all rows of a step, accepted or not; can be captured.

        Args:
            slots: int64 [B].
            start: int [B], contexts before the step.
            residuals: after each tapped layer, [B * tokens, H].
            tokens: of each request.
        """
        inject_rows(self.weights, residuals, self.pages, self.cache.block_table[slots], start, tokens)

    def save(self, slot: int) -> list[Tensor]:
        """A copy of the rows behind a request's context, [length, row] a layer: what :func:`~k3lab.decode.saved.save` does not hold."""
        where = self._places(slot, 0, self.cache.length(slot))
        return [pages.flatten(0, 1)[where] for pages in self.pages]

    @torch.inference_mode()
    def restore(self, slot: int, rows: Sequence[Tensor]) -> None:
        """Put rows back, once the target's context is (:func:`~k3lab.decode.saved.restore`)."""
        where = self._places(slot, 0, self.cache.length(slot))
        for pages, kept in zip(self.pages, rows, strict=True):
            pages.flatten(0, 1)[where] = kept

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
    def draft_block(
        self, slots: Tensor, last: Tensor, count: int, *, temperature: float = 0.0, seeds: Tensor | None = None
    ) -> Drafts:
        """The device side of :meth:`draft`: no check, shapes that depend on the number of requests alone; can be captured.

        Args:
            slots: int64 [B].
            last: int64 [B].
            count: drafts a request.
            temperature: 0 drafts the likeliest tokens.
            seeds: int64 [B], for a temperature above 0.
        """
        context, table = self.cache.context[slots], self.cache.block_table[slots]
        masks = last.new_full((last.shape[0], count - 1), self.weights.card.mask_token_id)
        ids = torch.cat([last[:, None], masks], dim=1)
        inputs = embedded(ids.flatten(), self.target.embed, self.comm).view(*ids.shape, -1)
        hidden = block_hidden(self.weights, inputs, self.pages, table, context, self.comm)
        after = context.long()[:, None] + torch.arange(1, count + 1, device=last.device)
        return draft_tokens(
            self.weights, hidden, self.target.lm_head, last, self.comm,
            temperature=temperature, seeds=seeds, positions=after, product=product,
        )  # fmt: skip

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
        self.weights.card.check_drafts(count)
        where = torch.tensor(list(slots), device=self.target.device)
        return self.draft_block(where, last, count, temperature=temperature, seeds=seeds)
