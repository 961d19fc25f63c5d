"""Bytes and flops of the decode step: what each component must move and compute on one rank.

Bytes are the fewest that device memory has to deliver: every weight once, every state read and written
once, activations not at all (they stay in L2). Flops count a multiply and an add as two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from . import weight_shapes as shapes
from .errors import InputError
from .gpu_cards import GpuCard
from .model_card import LayerKind, ModelCard
from .weight_shapes import MoeSharding, Weight

Rollback = Literal["slots", "replay"]
"""How a verify step keeps the KDA state: one slot a token (1 read, q writes), or a replay (2 reads, 1 write)."""


def rank_bytes(card: ModelCard, weights: tuple[Weight, ...], tp: int) -> int:
    """Bytes of the weights one of ``tp`` ranks holds."""
    return sum(weight.of_rank(tp).bytes(card.mxfp4_group_size) for weight in weights)


def expected_distinct_experts(card: ModelCard, rows: int) -> float:
    """Experts of one layer hit by ``rows`` tokens that choose top-k uniformly: E (1 - (1 - k/E)^rows).

    Real routing is not uniform, so this is an upper estimate.
    """
    if rows < 0:
        raise InputError(f"rows is {rows}, must not be negative")
    share = card.num_experts_per_token / card.num_experts
    return card.num_experts * (1 - (1 - share) ** rows)


def expert_bytes(card: ModelCard, tp: int, distinct: float) -> float:
    """Bytes of one rank's share of ``distinct`` routed experts of one layer."""
    return distinct * rank_bytes(card, shapes.expert_weights(card, 1), tp)


def kda_state_bytes(card: ModelCard, tp: int, requests: int, q_len: int = 1, rollback: Rollback = "slots") -> float:
    """Bytes of recurrent (FP32) and convolution (BF16) state one KDA layer reads and writes on one rank."""
    state = card.kda_num_heads / tp * card.kda_head_dim**2 * 4
    passes = 1 + q_len if rollback == "slots" or q_len == 1 else 3
    conv = 2 * (card.kda_conv_size - 1) * 3 * card.kda_dim / tp * 2
    return requests * (passes * state + conv)


def mla_cache_bytes(card: ModelCard, context: int, *, fp8: bool = True) -> int:
    """Bytes of latent cache one MLA layer reads for ``context`` cached tokens (summed over requests).

    Every rank reads all of it unless decode context parallelism splits the tokens.
    """
    return context * (card.kv_lora_rank + card.qk_rope_head_dim) * (1 if fp8 else 2)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes one rank moves in one layer."""

    attention: float
    """Attention weights, and the KDA state."""
    cache: float
    """MLA latent cache."""
    mlp: float
    """Dense MLP, or MoE matrices and the distinct routed experts."""
    vectors: float
    """Norms and AttnRes vectors of the layer."""
    moe_vectors: float
    """Correction bias and latent norm of the MoE."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.attention + self.cache + self.mlp + self.vectors + self.moe_vectors


def layer_bytes(
    card: ModelCard,
    tp: int,
    rows: int,
    kind: LayerKind,
    *,
    dense: bool = False,
    q_len: int = 1,
    distinct: float | None = None,
    moe: MoeSharding = "sharded",
    rollback: Rollback = "slots",
    context: int = 0,
    fp8_cache: bool = True,
) -> LayerBytes:
    """Bytes of one layer on one rank.

    Args:
        card: the model.
        tp: tensor-parallel size.
        rows: token rows of the step, requests times ``q_len``.
        kind: attention kind.
        dense: a layer with the dense MLP.
        q_len: tokens a request in the step (1 plain, up to 8 verify).
        distinct: routed experts that are hit; None takes the expectation for uniform routing.
        moe: which MoE matrices a rank holds in part.
        rollback: how a verify step keeps the KDA state.
        context: cached tokens an MLA layer reads, summed over the requests.
        fp8_cache: cache of one byte a value in place of two.

    Raises:
        InputError: TP does not divide, or rows are no multiple of ``q_len``.
    """
    card.check_tp(tp)
    if q_len < 1 or rows % q_len:
        raise InputError(f"rows {rows} are no multiple of q_len {q_len}: every request has the same number of tokens")
    attention: float = rank_bytes(card, shapes.attention_weights(card, kind), tp)
    cache = 0
    if kind == "kda":
        attention += kda_state_bytes(card, tp, rows // q_len, q_len, rollback)
    else:
        cache = mla_cache_bytes(card, context, fp8=fp8_cache)
    vectors = rank_bytes(card, shapes.layer_vectors(card), tp)
    if dense:
        return LayerBytes(attention, cache, rank_bytes(card, shapes.dense_weights(card), tp), vectors, 0)
    hit = expected_distinct_experts(card, rows) if distinct is None else distinct
    mlp = rank_bytes(card, shapes.moe_weights(card, moe), tp) + expert_bytes(card, tp, hit)
    return LayerBytes(attention, cache, mlp, vectors, rank_bytes(card, shapes.moe_vectors(card), tp))


def lm_head_bytes(card: ModelCard, tp: int) -> int:
    """Bytes of one rank's rows of the output head."""
    return rank_bytes(card, tuple(w for w in shapes.model_weights(card) if w.name == "lm_head.weight"), tp)


def step_bytes(
    card: ModelCard, tp: int, rows: int, *, moe: MoeSharding = "sharded", q_len: int = 1, distinct: float | None = None
) -> float:
    """Bytes of one whole decode step on one rank: all layers and the head; no cache, no embedding rows."""
    total: float = lm_head_bytes(card, tp)
    for layer, kind in enumerate(card.layer_kinds):
        dense = card.is_dense(layer)
        total += layer_bytes(card, tp, rows, kind, dense=dense, moe=moe, q_len=q_len, distinct=distinct).total
    return total


def floor_us(moved: float, gpu: GpuCard) -> float:
    """Least time in microseconds to read so many bytes on the GPU (measured read ceiling where there is one)."""
    return moved / gpu.read_bandwidth * 1e6


def matmul_flops(weights: tuple[Weight, ...], tp: int, rows: int) -> int:
    """Flops of ``rows`` tokens through the matrices of one rank; vectors and filters are left out."""
    return sum(
        2 * rows * weight.of_rank(tp).count for weight in weights if len(weight.shape) == 2 and weight.shape[0] > 1
    )


def kda_flops(card: ModelCard, tp: int, rows: int) -> int:
    """Flops of one KDA layer on one rank: projections, convolution, and per token and head the decay (1 V K),
    S k, u k^T and S q (2 V K each).
    """
    recurrence = 7 * card.kda_num_heads // tp * card.kda_head_dim**2
    conv = 2 * card.kda_conv_size * 3 * card.kda_dim // tp
    return matmul_flops(shapes.kda_weights(card), tp, rows) + rows * (recurrence + conv)


def mla_flops(card: ModelCard, tp: int, rows: int, context: int = 0) -> int:
    """Flops of one MLA layer on one rank, absorbed: projections (kv_b once, as W_UK and W_UV) and, for each
    (row, cached token) pair of the sum ``context``, scores over the latent and the rope part and the weighted sum.
    """
    pair = 2 * (card.kv_lora_rank + card.qk_rope_head_dim) + 2 * card.kv_lora_rank
    return matmul_flops(shapes.mla_weights(card), tp, rows) + context * pair * card.num_attention_heads // tp


def moe_flops(card: ModelCard, tp: int, rows: int, moe: MoeSharding = "sharded") -> int:
    """Flops of one MoE layer on one rank: fixed matrices, and top-k experts a token."""
    experts = matmul_flops(shapes.expert_weights(card, card.num_experts_per_token), tp, rows)
    return matmul_flops(shapes.moe_weights(card, moe), tp, rows) + experts


def dense_flops(card: ModelCard, tp: int, rows: int) -> int:
    """Flops of one dense MLP on one rank."""
    return matmul_flops(shapes.dense_weights(card), tp, rows)


@dataclass(frozen=True)
class CheckpointTotals:
    """What the whole text checkpoint holds."""

    bf16_values: int
    fp32_values: int
    expert_values: int
    """Logical MXFP4 values."""
    expert_bytes: int
    """Packed values and scales."""


def checkpoint_totals(card: ModelCard) -> CheckpointTotals:
    """Values by dtype and bytes of the routed experts, as stored."""
    weights = shapes.checkpoint_weights(card)

    def count(dtype: str) -> int:
        return sum(weight.count for weight in weights if weight.dtype == dtype)

    packed = sum(weight.bytes(card.mxfp4_group_size) for weight in weights if weight.dtype == "mxfp4")
    return CheckpointTotals(count("bfloat16"), count("float32"), count("mxfp4"), packed)
