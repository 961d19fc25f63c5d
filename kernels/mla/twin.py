"""Multi-head latent attention without rotation and with an output gate, absorbed, on a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..numerics import compute_dtype, linear, rms_norm, round_e4m3


@dataclass(frozen=True)
class MlaWeights:
    """Weights of the MLA core for h heads (this rank's heads); the two norms are on every rank."""

    q_a_norm: Tensor
    """[q_lora]."""
    kv_a_norm: Tensor
    """[kv_lora]."""
    q_b: Tensor
    """[h * (nope + rope), q_lora]."""
    w_uk: Tensor
    """First rows of each head of kv_b: [h, nope, kv_lora]."""
    w_uv: Tensor
    """Last rows of each head of kv_b: [h, v, kv_lora]."""


@dataclass(frozen=True)
class _Step:
    """What absorbed and unabsorbed attention share."""

    q: Tensor
    """[n, h, nope + rope] in the projection's dtype."""
    gate: Tensor
    """[n, h, v]."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Shard:
    """Which tokens of a context a rank holds: token t is with rank ``t % size``, there as number ``t // size``."""

    rank: int = 0
    size: int = 1

    def below(self, token: int) -> int:
        """How many of the tokens 0..token-1 it holds."""
        return -(-(token - self.rank) // self.size)

    def own(self, first: int, last: int) -> range:
        """Its tokens among first..last-1."""
        return range(first + (self.rank - first) % self.size, last, self.size)


WHOLE = Shard()


def _positions(block_table: Tensor, request: int, first: int, last: int, block_size: int, blocks: int) -> Tensor:
    """Flat cache rows of the tokens first..last-1 of a request."""
    if first < 0 or last > block_table.shape[1] * block_size:
        held = block_table.shape[1] * block_size
        raise InputError(f"request {request} reaches token {last}, its block table holds {held}")
    position = torch.arange(first, last, device=block_table.device)
    block = block_table[request, position // block_size].long()
    if block.numel() and not 0 <= int(block.min()) <= int(block.max()) < blocks:
        raise InputError(f"block table of request {request} names a block outside 0..{blocks - 1}")
    return block * block_size + position % block_size


def _to_cache(row: Tensor, cache_dtype: torch.dtype, k_scale: float) -> Tensor:
    if cache_dtype == torch.float8_e4m3fn:
        return round_e4m3(row.to(compute_dtype(row)) / k_scale).to(cache_dtype)
    return row.to(cache_dtype)


def _front(
    proj: Tensor,
    weights: MlaWeights,
    cache: Tensor,
    block_table: Tensor,
    context: Tensor,
    *,
    q_len: int,
    eps: float,
    rope: int,
    k_scale: float,
    fused_rounding: bool,
    shard: Shard = WHOLE,
) -> _Step:
    """Norms, query up-projection, and the insertion of the new rows that this rank holds into the cache."""
    q_lora, kv_lora = weights.q_a_norm.shape[0], weights.kv_a_norm.shape[0]
    heads, v_dim, _ = weights.w_uv.shape
    need = q_lora + kv_lora + rope + heads * v_dim
    requests = context.shape[0]
    if proj.shape[0] != requests * q_len:
        raise InputError(f"{proj.shape[0]} rows are not {requests} requests times {q_len} tokens")
    if proj.shape[1] < need:
        raise InputError(f"MLA projection has {proj.shape[1]} columns, {heads} heads need {need}")
    if cache.shape[-1] != kv_lora + rope:
        raise InputError(f"cache rows are {cache.shape[-1]} wide, the latent and its shared key need {kv_lora + rope}")
    qa, kvc, kpe, gate = proj[:, :need].split([q_lora, kv_lora, rope, heads * v_dim], dim=-1)
    q = linear(rms_norm(qa, weights.q_a_norm, eps, fused_rounding), weights.q_b).view(proj.shape[0], heads, -1)
    row = torch.cat([rms_norm(kvc, weights.kv_a_norm, eps, fused_rounding), kpe], dim=-1)  # kpe: no norm, no rotation
    blocks, block_size, _ = cache.shape
    for request, before in enumerate(context.tolist()):
        after = before + q_len
        where = _positions(block_table, request, shard.below(before), shard.below(after), block_size, blocks)
        own = [request * q_len + token - before for token in shard.own(before, after)]
        new = _to_cache(row[own], cache.dtype, k_scale)
        cache[where // block_size, where % block_size] = new
    return _Step(q, gate.view(-1, heads, v_dim), compute_dtype(proj, weights.q_b))


def _histories(
    cache: Tensor,
    block_table: Tensor,
    context: Tensor,
    q_len: int,
    k_scale: float,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each request: its rows, its cached tokens [t, kv_lora + rope], and who may see what [q_len, t]."""
    blocks, block_size, _ = cache.shape
    for request, before in enumerate(context.tolist()):
        where = _positions(block_table, request, 0, shard.below(before + q_len), block_size, blocks)
        tokens = cache[where // block_size, where % block_size].to(dtype)
        if cache.dtype == torch.float8_e4m3fn:
            tokens = tokens * k_scale
        own = before + torch.arange(q_len, device=cache.device)
        held = shard.rank + torch.arange(len(where), device=cache.device) * shard.size
        visible = held <= own[:, None]
        yield slice(request * q_len, (request + 1) * q_len), tokens, visible


def _gated(out: Tensor, gate: Tensor, dtype: torch.dtype, fused_rounding: bool) -> Tensor:
    """``out * sigmoid(gate)``, [n, h, v] to [n, h * v]; the unfused form rounds the sigmoid first."""
    factor = torch.sigmoid(gate.to(dtype))
    if not fused_rounding:
        factor = factor.to(gate.dtype).to(dtype)
    return (out.to(dtype) * factor).to(gate.dtype).flatten(1)


def mla(
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
    k_scale: float = 1.0,
    fused_rounding: bool = True,
) -> Tensor:
    """``q_len`` new tokens of each of B requests; rows n = B * q_len, request-major.

    All new rows are inserted into the cache first; row j of a request then attends to its
    ``context + j + 1`` tokens. The scale is ``(nope + rope)^-0.5``.

    Args:
        proj: Fused input projection [n, q_lora + kv_lora + rope + h*v (+ padding)], columns
            q_a | latent | shared key | gate.
        weights: This rank's heads.
        cache: [blocks, block_size, kv_lora + rope], changed in place; ``proj.dtype`` or float8_e4m3fn,
            which holds ``value / k_scale``, saturating. With FP8 the query [ql | q_pe] is quantised too
            (scale 1).
        block_table: int [B, m]; block of each ``block_size`` tokens of a request.
        context: int [B]; tokens of each request before this step.
        q_len: New tokens a request.
        eps: Of the two low-rank norms.
        nope: Width of a head's part that meets the latent.
        rope: Width of the shared key (the name is historical: nothing is rotated).
        k_scale: Per-tensor scale of an FP8 cache.
        fused_rounding: True rounds norms and gate product once; False rounds the normalised value and
            the sigmoid first (official code). The absorbed query, the latent output and the head's
            output are rounded to ``proj.dtype`` in both.

    Returns:
        [n, h*v] in ``proj.dtype``: gated, before o_proj.
    """
    step = _front(
        proj, weights, cache, block_table, context,
        q_len=q_len, eps=eps, rope=rope, k_scale=k_scale, fused_rounding=fused_rounding,
    )  # fmt: skip
    dtype, kv_lora = step.dtype, weights.kv_a_norm.shape[0]
    q_nope, q_pe = step.q.split([nope, rope], dim=-1)
    absorbed = torch.einsum("nhd,hdc->nhc", q_nope.to(dtype), weights.w_uk.to(dtype)).to(proj.dtype)
    query = torch.cat([absorbed, q_pe], dim=-1)
    if cache.dtype == torch.float8_e4m3fn:
        query = round_e4m3(query)
    latent = torch.empty_like(absorbed)
    for rows, tokens, visible in _histories(cache, block_table, context, q_len, k_scale, dtype):
        scores = torch.einsum("qhc,tc->hqt", query[rows].to(dtype), tokens) * (nope + rope) ** -0.5
        weight = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        latent[rows] = torch.einsum("hqt,tc->qhc", weight, tokens[:, :kv_lora]).to(proj.dtype)
    out = torch.einsum("nhc,hvc->nhv", latent.to(dtype), weights.w_uv.to(dtype)).to(proj.dtype)
    return _gated(out, step.gate, dtype, fused_rounding)


def mla_unabsorbed(
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
    k_scale: float = 1.0,
    fused_rounding: bool = True,
) -> Tensor:
    """:func:`mla` as it is trained: per-head keys ``[W_UK c | k_pe]`` and values ``W_UV c`` are expanded.

    Equal to :func:`mla` in exact arithmetic (FP8: up to the query, which stays unquantised here). Keys,
    values, probabilities and sums stay in the compute dtype.
    """
    step = _front(
        proj, weights, cache, block_table, context,
        q_len=q_len, eps=eps, rope=rope, k_scale=k_scale, fused_rounding=fused_rounding,
    )  # fmt: skip
    dtype, kv_lora = step.dtype, weights.kv_a_norm.shape[0]
    out = torch.empty_like(step.gate)
    for rows, tokens, visible in _histories(cache, block_table, context, q_len, k_scale, dtype):
        latent, shared_key = tokens.split([kv_lora, rope], dim=-1)
        keys = torch.einsum("tc,hdc->thd", latent, weights.w_uk.to(dtype))
        keys = torch.cat([keys, shared_key[:, None].expand(-1, keys.shape[1], -1)], dim=-1)
        values = torch.einsum("tc,hvc->thv", latent, weights.w_uv.to(dtype))
        scores = torch.einsum("qhd,thd->hqt", step.q[rows].to(dtype), keys) * (nope + rope) ** -0.5
        weight = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        out[rows] = torch.einsum("hqt,thv->qhv", weight, values).to(proj.dtype)
    return _gated(out, step.gate, dtype, fused_rounding)
