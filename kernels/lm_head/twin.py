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
