"""Embedding and head, both sharded by vocabulary rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import Collectives
from ..errors import InputError
from ..numerics import linear


def embed(ids: Tensor, table: Tensor, comm: Collectives) -> Tensor:
    """Rows of the embedding table: every rank looks up what it holds, the sum over ranks is exact.

    Args:
        ids: Token ids, int [n].
        table: This rank's rows, [V/T, H]; rank r holds ids from r * V/T on.
        comm: The tensor-parallel group.

    Returns:
        [n, H]; no embedding scale.
    """
    rows = table.shape[0]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows * comm.size:
        raise InputError(f"token ids must lie in 0..{rows * comm.size - 1}, got {int(ids.min())}..{int(ids.max())}")
    local = ids.long() - comm.rank * rows
    mine = (local >= 0) & (local < rows)
    found = table[local.clamp(0, rows - 1)]
    return comm.all_reduce(torch.where(mine[:, None], found, torch.zeros_like(found)))


def lm_head(h: Tensor, w: Tensor, comm: Collectives) -> Tensor:
    """Logits [n, V] from the final norm's output [n, H] and this rank's rows [V/T, H].

    Rounded once to ``h.dtype`` before the gather; scale 1, no soft cap.
    """
    return comm.all_gather(linear(h, w), dim=-1)


def best_token(logits: Tensor, first: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of a part of the logits: the highest, the lower id among equals.

    Args:
        logits: [n, V/T], as they are compared: rounded to the model's dtype.
        first: id of column 0.
        vocabulary: V; where a logit is NaN nothing is likeliest, and the row's token is the last id, V - 1.

    Returns:
        (logit in ``logits.dtype``, NaN where there is one; int64 id), both [n].
    """
    best = logits.amax(-1)
    ids = torch.arange(first, first + logits.shape[-1], device=logits.device)
    found = torch.where(logits == best[:, None], ids, vocabulary - 1).amin(-1)
    return best, torch.where(best.isnan(), vocabulary - 1, found)


def best_of_ranks(logits: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The same of what each rank found: ``logits`` and ``ids`` [n, T], in any order of ranks."""
    best = logits.amax(-1)
    found = torch.where(logits == best[:, None], ids, vocabulary - 1).amin(-1)
    return best, torch.where(best.isnan(), vocabulary - 1, found)


def next_token(h: Tensor, w: Tensor, comm: Collectives) -> tuple[Tensor, Tensor]:
    """(logit, id) of the likeliest token over all ranks' rows ``w`` [V/T, H], from ``h`` [n, H]: [n] each, on every rank.

    What crosses the links is one pair a rank and row; the result is that of :func:`best_token` on all logits.
    """
    width = w.shape[0]
    best, ids = best_token(linear(h, w), comm.rank * width, comm.size * width)
    return best_of_ranks(
        comm.all_gather(best[:, None], dim=-1), comm.all_gather(ids[:, None], dim=-1), comm.size * width
    )
