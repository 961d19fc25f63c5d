"""The drafter's block over paged context rows, with shapes that do not depend on contexts: it can be captured in a graph.

The same arithmetic as :mod:`k3lab.decode.dspark.reference`, which it is tested against; products are the library's, in
the model's dtype, since a reference that widens every weight would read it three times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.collectives import Collectives
from ...kernels.numerics import compute_dtype, rms_norm
from .reference import cache_row, context_rows
from .rope import rotate
from .weights import DraftLayer, DraftWeights


def product(x: Tensor, w: Tensor) -> Tensor:
    """``x w^T``, summed in FP32 or better and rounded once."""
    return F.linear(x, w)


def block_hidden(
    weights: DraftWeights, inputs: Tensor, pages: list[Tensor], table: Tensor, context: Tensor, comm: Collectives
) -> Tensor:
    """Final hidden values of a block.

    Args:
        weights: this rank's.
        inputs: embedded block, [B, N, H].
        pages: a layer's cache rows, [blocks, block size, kv_lora + rope].
        table: blocks of every request, int [B, m].
        context: int [B], positions whose rows count; the block's positions follow.
        comm: the tensor-parallel group.

    Returns:
        [B, N, H], normed; row i predicts the token after its position.
    """
    card, eps = weights.card, weights.card.rms_norm_eps
    requests, tokens = inputs.shape[:2]
    positions = (context.long()[:, None] + torch.arange(tokens, device=inputs.device)).flatten()
    x = inputs.flatten(0, 1)
    for layer, rows in zip(weights.layers, pages, strict=True):
        attended = _attend(rms_norm(x, layer.input_norm, eps), layer, rows[table.long()].flatten(1, 2), context, positions, weights)  # fmt: skip
        x = x + comm.all_reduce(attended)
        inner = rms_norm(x, layer.post_norm, eps)
        gate, up = product(inner, layer.gate), product(inner, layer.up)
        dtype = compute_dtype(gate)
        x = x + comm.all_reduce(product((F.silu(gate.to(dtype)) * up.to(dtype)).to(x.dtype), layer.down))
    return rms_norm(x, weights.final_norm, card.rms_norm_eps).view(requests, tokens, -1)


def _attend(
    x: Tensor, layer: DraftLayer, rows: Tensor, context: Tensor, positions: Tensor, weights: DraftWeights
) -> Tensor:
    """This rank's partial of the o-projection, [n, H]; ``rows`` [B, t, kv_lora + rope] hold the context and more."""
    card = weights.card
    requests = rows.shape[0]
    tokens = x.shape[0] // requests
    query = product(rms_norm(product(x, layer.q_a), layer.core.q_a_norm, card.rms_norm_eps), layer.core.q_b)
    query = query.view(x.shape[0], -1, card.qk_nope_head_dim + card.qk_rope_head_dim)
    nope, key = query.split([card.qk_nope_head_dim, card.qk_rope_head_dim], dim=-1)
    absorbed = torch.bmm(nope.transpose(0, 1), layer.core.w_uk).transpose(0, 1)
    query = torch.cat([absorbed, rotate(key, positions, card)], dim=-1)
    own = cache_row(x, layer, positions, weights, product).view(requests, tokens, -1)
    dtype = compute_dtype(x)
    seen = torch.cat([rows, own.to(rows.dtype)], dim=1).to(dtype)
    # rows behind a context belong to nobody and may hold anything; the whole block is seen, later masks too
    behind = torch.arange(rows.shape[1], device=x.device) >= context[:, None]
    behind = torch.cat([behind, behind.new_zeros(requests, tokens)], dim=1)
    seen = seen.masked_fill(behind[..., None], 0.0)
    heads = query.shape[1]
    wide = query.to(dtype).view(requests, tokens * heads, -1)
    scores = torch.bmm(wide, seen.transpose(1, 2)) * card.softmax_scale
    weight = scores.masked_fill(behind[:, None], float("-inf")).softmax(-1)
    latent = torch.bmm(weight, seen[..., : card.kv_lora_rank]).to(x.dtype).view(x.shape[0], heads, -1)
    values = torch.bmm(latent.transpose(0, 1), layer.core.w_uv.transpose(1, 2)).transpose(0, 1)
    return product(values.flatten(1), layer.o_proj)


def inject_rows(
    weights: DraftWeights, residuals: list[Tensor], pages: list[Tensor], table: Tensor, context: Tensor, tokens: int
) -> None:
    """Keep rows of ``tokens`` positions from each context on, accepted or not: those that were not are overwritten.

    Args:
        weights: replicated parts are used alone.
        residuals: of the target after each tapped layer, [B * tokens, H], request by request.
        pages: as above; gains rows.
        table: int [B, m].
        context: int [B], before the step.
        tokens: of each request in the step.
    """
    size = pages[0].shape[1]
    at = context.long()[:, None] + torch.arange(tokens, device=context.device)
    # a request that ends at the end of its blocks has nothing behind it: its last rows stay where they are allowed
    last = table.shape[1] - 1
    where = (table.long().gather(1, (at // size).clamp(max=last)) * size + at % size).flatten()
    for held, rows in zip(pages, context_rows(weights, residuals, at.flatten(), product), strict=True):
        held.flatten(0, 1)[where] = rows
