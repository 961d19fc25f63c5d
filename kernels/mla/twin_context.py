"""Twin of the MLA core under decode context parallelism: every rank holds a part of each context, and its own heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import Collectives, LoopbackGroup
from ..numerics import round_e4m3
from .twin import MlaWeights, Shard, _front, _gated, _histories


def merged(latents: Tensor, logarithms: Tensor) -> Tensor:
    """Parts of a softmax-weighted sum as one: each by its share of all weights, added in the order of the parts.

    Args:
        latents: [parts, ..., c], normalised; of a part without tokens whatever it holds.
        logarithms: [parts, ...], natural logarithm of a part's sum of weights; minus infinity where it has no tokens.
    """
    share = torch.exp(logarithms - logarithms.amax(0))
    held = (logarithms > -torch.inf)[..., None]
    parts = torch.where(held, latents, 0.0) * share[..., None]
    total, weight = torch.zeros_like(parts[0]), torch.zeros_like(share[0])
    for part, one in zip(parts, share, strict=True):
        total, weight = total + part, weight + one
    return total / weight[..., None]


def _of_all_heads(comm: Collectives, own: Tensor) -> Tensor:
    """Every rank's queries [n, heads of all, width]; over loopback all ranks ask this one's, as they are."""
    if isinstance(comm, LoopbackGroup):
        return torch.cat([own] * comm.size, dim=1)
    return comm.all_gather(own, dim=1)


def _of_own_heads(comm: Collectives, latent: Tensor, logarithm: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(every rank's rows of this rank's heads [ranks, n, heads, c], their logarithms [ranks, n, heads]).

    Over loopback rank r sends back what it would have been sent, its heads' rows, times its factor; with a factor of zero
    it stands for a rank without tokens.
    """
    if isinstance(comm, LoopbackGroup):
        rows, logarithms = latent.split(heads, dim=1), logarithm.split(heads, dim=1)
        scaled = [row * factor for row, factor in zip(rows, comm.factors, strict=True)]
        empty = torch.full_like(logarithms[0], -torch.inf)
        told = [one if factor else empty for one, factor in zip(logarithms, comm.factors, strict=True)]
        return torch.stack(scaled), torch.stack(told)
    mine = slice(comm.rank * heads, (comm.rank + 1) * heads)
    return comm.all_gather(latent[None], dim=0)[:, :, mine], comm.all_gather(logarithm[None], dim=0)[:, :, mine]


def mla_context_parallel(
    proj: Tensor,
    weights: MlaWeights,
    cache: Tensor,
    block_table: Tensor,
    context: Tensor,
    *,
    q_len: int,
    eps: float,
    nope: int,
    rope: int,
    comm: Collectives,
    k_scale: float = 1.0,
    fused_rounding: bool = True,
) -> Tensor:
    """One rank of :func:`~.twin.mla` where token t of a request lies with rank ``t % size``, there as number ``t // size``.

    Every rank makes the queries of its own heads, all get all queries, each attends to the tokens it holds for all heads,
    and the owner of a head merges the ranks' rows by the logarithms of their sums of weights, in rank order. A rank may
    hold no token of a request. Rows are rounded to ``proj.dtype`` before the exchange and after the merge, logarithms stay
    in the compute dtype.

    Args:
        proj: as there; its gate is that of this rank's heads.
        weights: this rank's heads.
        cache: this rank's tokens, changed in place.
        block_table: of this rank's cache: the block of each ``block_size`` tokens that it holds of a request.
        context: tokens of each request before this step, on all ranks together.
        q_len: new tokens a request.
        eps: as there.
        nope: as there.
        rope: as there.
        comm: the group; its size is the degree of context parallelism.
        k_scale: as there.
        fused_rounding: as there.

    Returns:
        [n, h*v] of this rank's heads.
    """
    shard = Shard(comm.rank, comm.size)
    step = _front(
        proj, weights, cache, block_table, context,
        q_len=q_len, eps=eps, rope=rope, k_scale=k_scale, fused_rounding=fused_rounding, shard=shard,
    )  # fmt: skip
    dtype, kv_lora, heads = step.dtype, weights.kv_a_norm.shape[0], weights.w_uk.shape[0]
    q_nope, q_pe = step.q.split([nope, rope], dim=-1)
    absorbed = torch.einsum("nhd,hdc->nhc", q_nope.to(dtype), weights.w_uk.to(dtype)).to(proj.dtype)
    own = torch.cat([absorbed, q_pe], dim=-1)
    if cache.dtype == torch.float8_e4m3fn:
        own = round_e4m3(own)
    query = _of_all_heads(comm, own)
    latent = query.new_zeros(*query.shape[:2], kv_lora)
    logarithm = torch.full(query.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    for rows, tokens, visible in _histories(cache, block_table, context, q_len, k_scale, dtype, shard):
        scores = torch.einsum("qhc,tc->hqt", query[rows].to(dtype), tokens) * (nope + rope) ** -0.5
        scores = scores.masked_fill(~visible, -torch.inf)
        logarithm[rows] = torch.logsumexp(scores, dim=-1).T
        weight = torch.where(visible, torch.exp(scores - logarithm[rows].T[..., None]), 0.0)
        latent[rows] = torch.einsum("hqt,tc->qhc", weight, tokens[:, :kv_lora]).to(proj.dtype)
    parts, logarithms = _of_own_heads(comm, latent, logarithm, heads)
    row = merged(parts.to(dtype), logarithms).to(proj.dtype)
    out = torch.einsum("nhc,hvc->nhv", row.to(dtype), weights.w_uv.to(dtype)).to(proj.dtype)
    return _gated(out, step.gate, dtype, fused_rounding)
