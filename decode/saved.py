"""What a request is between two steps, taken out of a cache and put back into the same or another one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import InputError
from .caches import DecodeCache


@dataclass(frozen=True)
class SavedRequest:
    """A request after its last accepted token; it has no slot, no snapshot and no block of its own."""

    length: int
    """Accepted tokens, on all ranks together."""
    kda: dict[int, tuple[Tensor, Tensor]]
    """Layer to history and state."""
    rows: dict[int, Tensor] | None
    """Layer to MLA rows [places, kv_lora + rope], those of this rank where contexts are shared; an FP8 cache's as bytes."""
    dcp: int = 1
    """Ranks that share its context: each saves its own part."""


def _pages(cache: DecodeCache, layer: int) -> Tensor:
    """An MLA buffer; as bytes where indexing knows no FP8."""
    buffer = cache.mla[layer]
    return buffer.view(torch.uint8) if buffer.dtype == torch.float8_e4m3fn else buffer


def _held(cache: DecodeCache, length: int) -> int:
    """Rows of a context on one rank; where it does not divide, the last of them is a token's on some ranks alone."""
    return -(-length // cache.dcp)


def _places(cache: DecodeCache, slot: int, length: int) -> Tensor:
    """Which rows of the flattened pages hold the request's tokens."""
    token = torch.arange(_held(cache, length))
    blocks = torch.tensor(cache.blocks_of(slot), dtype=torch.long)
    return (blocks[token // cache.block_size] * cache.block_size + token % cache.block_size).to(cache.context.device)


def save(cache: DecodeCache, slot: int, *, rows: bool = True) -> SavedRequest:
    """A copy of a request; where contexts are shared, of this rank's part: every rank saves, and restores, its own.

    ``rows`` False leaves out the MLA rows: enough to come back to in the same slot, which never overwrites them.

    Raises:
        InputError: no such request, or an unaccepted or failed step.
    """
    length = cache.length(slot)
    cache.ready([slot])
    at = int(cache.snapshot[slot])
    kda = {
        layer: (cache.kda_convs[layer][slot, at].clone(), states[slot, at].clone())
        for layer, states in cache.kda_states.items()
    }
    where = _places(cache, slot, length)
    kept = {layer: _pages(cache, layer).flatten(0, 1)[where] for layer in cache.mla} if rows else None
    return SavedRequest(length, kda, kept, cache.dcp)


def restore(cache: DecodeCache, slot: int, saved: SavedRequest) -> None:
    """Make a request what was saved; what it had is gone. Its next step gives the same bits.

    Raises:
        InputError: no such request, a full cache, contexts over another number of ranks, or rows that were not saved and
            that the request never had.
    """
    if saved.dcp != cache.dcp:
        raise InputError(
            f"the request was saved with its context over {saved.dcp} ranks, the cache is for contexts over {cache.dcp}"
        )
    missing = _held(cache, saved.length) - len(cache.blocks_of(slot)) * cache.block_size
    if saved.rows is None and missing > 0:
        raise InputError(f"request {slot} lacks {missing} rows that were not saved")
    cache.forget(slot)
    if saved.length:
        cache.begin_prefill(slot, saved.length)
        cache.prefilled(slot, saved.length)
    for layer, (conv, state) in saved.kda.items():
        cache.kda_convs[layer][slot, 0] = conv
        cache.kda_states[layer][slot, 0] = state
    if saved.rows is not None:
        where = _places(cache, slot, saved.length)
        for layer, kept in saved.rows.items():
            _pages(cache, layer).flatten(0, 1)[where] = kept
