"""The drafter written in plain PyTorch: context rows, the block of masked tokens, the Markov chain over its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.collectives import Collectives
from ...kernels.numerics import compute_dtype, linear, rms_norm
from .counter import DRAFT, gumbel
from .rope import rotate
from .weights import DraftLayer, DraftWeights

Product = Callable[[Tensor, Tensor], Tensor]
"""``x w^T``, rounded once."""


def cache_row(
    x: Tensor, layer: DraftLayer, positions: Tensor, weights: DraftWeights, product: Product = linear
) -> Tensor:
    """Cache rows of inputs [n, H]: normed latent and rotated key, [n, kv_lora + rope]."""
    card = weights.card
    latent, key = product(x, layer.kv_a).split([card.kv_lora_rank, card.qk_rope_head_dim], dim=-1)
    return torch.cat([rms_norm(latent, layer.core.kv_a_norm, card.rms_norm_eps), rotate(key, positions, card)], dim=-1)


def context_rows(
    weights: DraftWeights, residuals: Sequence[Tensor], positions: Tensor, product: Product = linear
) -> list[Tensor]:
    """What each layer keeps of accepted target positions; no layer is run for them.

    Args:
        weights: replicated parts are used alone, so every rank makes the same rows.
        residuals: of the target after each tapped layer, [n, H] each.
        positions: [n], int.
        product: of activations and weights.

    Returns:
        [n, kv_lora + rope] for each layer.
    """
    context = product(torch.cat(list(residuals), dim=-1), weights.context_proj)
    context = rms_norm(context, weights.context_norm, weights.card.rms_norm_eps)
    return [cache_row(context, layer, positions, weights, product) for layer in weights.layers]


def _attend(
    x: Tensor, layer: DraftLayer, context: Sequence[Tensor], positions: Tensor, weights: DraftWeights, comm: Collectives
) -> Tensor:
    card = weights.card
    requests, tokens = positions.shape
    flat = positions.flatten()
    query = linear(rms_norm(linear(x, layer.q_a), layer.core.q_a_norm, card.rms_norm_eps), layer.core.q_b)
    query = query.view(x.shape[0], -1, card.qk_nope_head_dim + card.qk_rope_head_dim)
    nope, key = query.split([card.qk_nope_head_dim, card.qk_rope_head_dim], dim=-1)
    dtype = compute_dtype(x, layer.core.w_uk)
    absorbed = torch.einsum("nhd,hdc->nhc", nope.to(dtype), layer.core.w_uk.to(dtype)).to(x.dtype)
    query = torch.cat([absorbed, rotate(key, flat, card)], dim=-1)
    own = cache_row(x, layer, flat, weights)
    latents = []
    for request in range(requests):
        where = slice(request * tokens, (request + 1) * tokens)
        # a drafted token sees the whole context and the whole block, later masks too
        rows = torch.cat([context[request], own[where].to(context[request].dtype)]).to(dtype)
        scores = torch.einsum("qhc,tc->hqt", query[where].to(dtype), rows) * card.softmax_scale
        weight = torch.softmax(scores, dim=-1)
        latents.append(torch.einsum("hqt,tc->qhc", weight, rows[:, : card.kv_lora_rank]).to(x.dtype))
    values = torch.einsum("nhc,hvc->nhv", torch.cat(latents).to(dtype), layer.core.w_uv.to(dtype)).to(x.dtype)
    return comm.all_reduce(linear(values.flatten(1), layer.o_proj))


def draft_hidden(
    weights: DraftWeights, embedded: Tensor, context: Sequence[Sequence[Tensor]], positions: Tensor, comm: Collectives
) -> Tensor:
    """Final hidden values of a block.

    Args:
        weights: this rank's.
        embedded: [B, N, H]: the last sampled token, then masks, by the target's embedding.
        context: for each layer, for each request, its rows [tokens, kv_lora + rope].
        positions: [B, N], those of the block.
        comm: the tensor-parallel group.

    Returns:
        [B, N, H], normed; row i predicts the token after its position.
    """
    card = weights.card
    x = embedded.flatten(0, 1)
    for layer, rows in zip(weights.layers, context, strict=True):
        x = x + _attend(rms_norm(x, layer.input_norm, card.rms_norm_eps), layer, rows, positions, weights, comm)
        inner = rms_norm(x, layer.post_norm, card.rms_norm_eps)
        gate, up = linear(inner, layer.gate), linear(inner, layer.up)
        dtype = compute_dtype(gate)
        hidden = (F.silu(gate.to(dtype)) * up.to(dtype)).to(x.dtype)
        x = x + comm.all_reduce(linear(hidden, layer.down))
    return rms_norm(x, weights.final_norm, card.rms_norm_eps).view(embedded.shape)


def best_of_ranks(scores: Tensor, comm: Collectives) -> Tensor:
    """The id of the highest score over all ranks' parts of the vocabulary, the lower id among equals.

    A rank sends one value and one id a row, not its part: [B, V/T] to int64 [B].
    """
    value = scores.amax(-1, keepdim=True)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    own = torch.where(scores == value, ids, scores.shape[-1]).amin(-1, keepdim=True) + comm.rank * scores.shape[-1]
    values, found = comm.all_gather(value, dim=-1), comm.all_gather(own, dim=-1)
    most = values.amax(-1, keepdim=True)
    return torch.where(values == most, found, torch.iinfo(torch.int64).max).amin(-1)


@dataclass(frozen=True)
class Drafts:
    """A block of each request."""

    tokens: Tensor
    """int64 [B, N]."""
    logits: Tensor | None = None
    """[B, N, V] that the tokens were sampled from; None where each was the likeliest."""


def draft_tokens(
    weights: DraftWeights,
    hidden: Tensor,
    lm_head: Tensor,
    last: Tensor,
    comm: Collectives,
    *,
    temperature: float = 0.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    product: Product = linear,
) -> Drafts:
    """Tokens of a block, one after the other: each one's logits are the head's and a bias by the token before it.

    ``logits_i = lm_head h_i + markov_w2 markov_w1[d_{i-1}]``; head and bias are rounded to the model's dtype, their sum
    is not. Both are cut by vocabulary: ranks exchange the best of each part.

    Args:
        weights: this rank's.
        hidden: [B, N, H] of :func:`draft_hidden`.
        lm_head: this rank's part of the target's head, [V/T, H].
        last: int64 [B], the token before the block's first prediction.
        comm: the tensor-parallel group.
        temperature: 0 takes the likeliest token; above it a token is sampled.
        seeds: int64 [B], for sampling.
        positions: int64 [B, N] of the tokens that are predicted, for sampling.
        product: of activations and weights.
    """
    base, previous = product(hidden, lm_head), last
    tokens, every = [], []
    ids = comm.rank * lm_head.shape[0] + torch.arange(lm_head.shape[0], device=hidden.device)
    for index in range(hidden.shape[1]):
        bias = product(weights.markov_w1[previous], weights.markov_w2)
        scores = base[:, index].to(compute_dtype(base)) + bias.to(compute_dtype(bias))
        if temperature > 0:
            assert seeds is not None
            assert positions is not None
            every.append(comm.all_gather(scores, dim=-1))
            noise = gumbel(seeds, positions[:, index], DRAFT, ids)
            scores = scores.to(torch.float64) / temperature + noise
        previous = best_of_ranks(scores, comm)
        tokens.append(previous)
    return Drafts(torch.stack(tokens, dim=1), torch.stack(every, dim=1) if every else None)


def confidence(weights: DraftWeights, hidden: Tensor, previous: Tensor) -> Tensor:
    """How likely each drafted token is to be accepted, by the drafter itself: [B, N].

    Args:
        weights: replicated parts are used alone.
        hidden: [B, N, H] of :func:`draft_hidden`.
        previous: int64 [B, N], the token before each predicted one.
    """
    seen = torch.cat([hidden, weights.markov_w1[previous]], dim=-1)
    out = linear(seen, weights.confidence).squeeze(-1)
    return torch.sigmoid(out.to(compute_dtype(out)) + weights.confidence_bias.to(compute_dtype(out)))
