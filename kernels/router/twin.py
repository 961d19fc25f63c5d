"""Router front (router and latent down-projection, sharded by rows) and the expert choice."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import Collectives
from ..errors import InputError
from ..numerics import compute_dtype, linear


def front(x: Tensor, w_router: Tensor, w_down: Tensor, comm: Collectives) -> tuple[Tensor, Tensor]:
    """Router logits and the routed experts' latent input.

    Args:
        x: MLP input [n, H].
        w_router: This rank's router rows, [E/T, H].
        w_down: This rank's latent-down rows, [L/T, H].
        comm: The tensor-parallel group.

    Returns:
        (logits [n, E] in FP32 or FP64, never rounded further; latent [n, L] rounded to ``x.dtype``).
    """
    dtype = compute_dtype(x, w_router)
    logits = x.to(dtype) @ w_router.to(dtype).T
    return comm.all_gather(logits, dim=-1), comm.all_gather(linear(x, w_down), dim=-1)


def route(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float, *, bfloat16_weights: bool = False
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token and their weights.

    Experts are chosen by ``sigmoid(logits) + bias``; equal scores go to the lower id. The weights are
    the scores without the bias, ``s / (sum of the chosen s + 1e-20) * scaling``.

    A NaN score ranks below every number, NaNs among themselves by id: the ids are always legal and
    the same for the same bits. A NaN expert is chosen only where fewer than ``top_k`` numbers exist,
    and the token's weights are then NaN: it is not hidden.

    Args:
        logits: [n, E], FP32 or FP64.
        bias: Correction bias [E], for the choice only.
        top_k: Experts a token.
        scaling: Factor on the normalised weights.
        bfloat16_weights: Round the weights to bfloat16 values, as the specialised serving path does.

    Returns:
        (ids int64 [n, k] in descending order of the biased score, weights FP32 or FP64 [n, k]).
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise InputError(f"cannot choose {top_k} of {logits.shape[-1]} experts")
    dtype = compute_dtype(logits)
    scores = torch.sigmoid(logits.to(dtype))
    biased = scores + bias.to(dtype)
    rank_by = torch.where(biased.isnan(), -torch.inf, biased)
    ids = torch.sort(rank_by, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(-1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling
    if bfloat16_weights:
        weights = weights.to(torch.bfloat16).to(dtype)
    return ids, weights
