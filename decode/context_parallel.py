"""Contexts that lie over all ranks (DCP), for PyTorch operators: who holds a token, and how the ranks' parts meet.

Token t of a request lies with rank t % ranks, there as number t // ranks. Without a group a rank holds whole contexts.
Nothing here depends on data or reads from the device, so that a step can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..kernels.collectives import Collectives


def context_group(comm: Collectives, dcp: int) -> Collectives | None:
    """The ranks that share each context: those of ``comm``, or None where each holds whole ones."""
    return comm if dcp > 1 else None


def rows_of(position: Tensor, table: Tensor, cache: Tensor, group: Collectives | None) -> Tensor:
    """Rows of the flattened pages where tokens are kept; the last page for those that other ranks hold.

    Args:
        position: int64 [B, q], of tokens in their contexts.
        table: int [B, m], of this rank's blocks.
        cache: [blocks, block size, row].
        group: that shares contexts.

    Returns:
        int64 [B, q].
    """
    size, ranks = cache.shape[1], group.size if group else 1
    place = position // ranks
    where = table.long().gather(1, place // size) * size + place % size
    return where if group is None else where.where(position % ranks == group.rank, cache.shape[0] * size - 1)


def held_tokens(count: int, group: Collectives | None, device: torch.device) -> Tensor:
    """Which token of a context is a rank's row 0, 1, ... of it: int64 [count]."""
    place = torch.arange(count, device=device)
    return place if group is None else place * group.size + group.rank


def of_all_heads(query: Tensor, group: Collectives | None) -> Tensor:
    """Queries [n, h, width] of this rank's heads as those of all ranks' heads, [n, ranks * h, width]."""
    if group is None:
        return query
    if query.dtype == torch.float8_e4m3fn:  # collectives know no FP8: the bytes are the same
        return group.all_gather(query.view(torch.uint8), dim=1).view(query.dtype)
    return group.all_gather(query, dim=1)


def joined_parts(mixed: Tensor, logarithms: Tensor, group: Collectives, dtype: torch.dtype) -> Tensor:
    """Each head's attention over a whole context, at its owner, from what every rank made of its own tokens.

    Args:
        mixed: [n, ranks * h, c], normalised over this rank's tokens; zeros where it holds none.
        logarithms: [n, ranks * h], natural logarithm of the sum of weights; minus infinity where it holds none.
        group: that shares contexts.
        dtype: in which parts are sent.

    Returns:
        [n, h, c] in ``dtype``, summed in rank order.
    """
    every = group.all_gather(logarithms[None], dim=0)
    # no share of nothing, even where no rank holds a token, as a rank alone may find
    share = (logarithms - every.logsumexp(0)).exp().masked_fill(logarithms == float("-inf"), 0.0)
    return group.reduce_scatter((mixed * share[..., None]).to(dtype), dim=1)
