"""Every weight tensor of the text model: shape, dtype, and how tensor parallelism splits it.

Names are those of the published checkpoint below a layer (``self_attn.q_proj.weight``) or below the
model. An expert's tensors are counted by their logical (unpacked) shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from .errors import InputError
from .model_card import LayerKind, ModelCard

MoeSharding = Literal["stock", "tail_fused", "sharded"]
"""Which of router, latent down and latent up a rank holds in part: none, the up-projection, or all three."""

A_LOG_PADDING = 128
"""The checkpoint pads A_log to a multiple of this; only one entry a head is used."""


@dataclass(frozen=True)
class Weight:
    """One tensor, or ``copies`` equal ones (the experts)."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["bfloat16", "float32", "mxfp4"]
    split: int | None = None
    """Axis that tensor parallelism divides; None if every rank holds the whole."""
    copies: int = 1

    @property
    def count(self) -> int:
        """Logical values."""
        return math.prod(self.shape) * self.copies

    def bytes(self, group: int = 32) -> int:
        """Bytes in memory; an MXFP4 value takes half a byte and a share of one scale byte a group."""
        if self.dtype == "mxfp4":
            return self.count // 2 + self.count // group
        return self.count * (2 if self.dtype == "bfloat16" else 4)

    def of_rank(self, tp: int) -> Weight:
        """The part one of ``tp`` ranks holds."""
        if self.split is None:
            return self
        size = self.shape[self.split]
        if size % tp:
            raise InputError(f"TP {tp} does not divide {self.name} {list(self.shape)} along axis {self.split}")
        shape = (*self.shape[: self.split], size // tp, *self.shape[self.split + 1 :])
        return replace(self, shape=shape)


def kda_weights(card: ModelCard, *, stored: bool = False) -> tuple[Weight, ...]:
    """Tensors of one KDA layer; ``stored`` counts A_log as the checkpoint pads it."""
    hidden, dim, heads, rank = card.hidden_size, card.kda_dim, card.kda_num_heads, card.kda_gate_rank
    decays = -(-heads // A_LOG_PADDING) * A_LOG_PADDING if stored else heads
    convs = (
        Weight(f"self_attn.{name}_conv1d.weight", (dim, 1, card.kda_conv_size), "float32", 0)
        for name in ("q", "k", "v")
    )
    projections = (
        Weight(f"self_attn.{name}_proj.weight", (dim, hidden), "bfloat16", 0) for name in ("q", "k", "v", "g")
    )
    return (
        *projections,
        Weight("self_attn.f_a_proj.weight", (rank, hidden), "bfloat16"),
        Weight("self_attn.f_b_proj.weight", (dim, rank), "bfloat16", 0),
        Weight("self_attn.b_proj.weight", (heads, hidden), "bfloat16", 0),
        *convs,
        Weight("self_attn.A_log", (decays,), "float32", None if stored else 0),
        Weight("self_attn.dt_bias", (dim,), "float32", 0),
        Weight("self_attn.o_norm.weight", (card.kda_head_dim,), "float32"),
        Weight("self_attn.o_proj.weight", (hidden, dim), "bfloat16", 1),
    )


def mla_weights(card: ModelCard) -> tuple[Weight, ...]:
    """Tensors of one MLA layer."""
    hidden, heads, dim = card.hidden_size, card.num_attention_heads, card.mla_dim
    q_head = card.qk_nope_head_dim + card.qk_rope_head_dim
    kv_head = card.qk_nope_head_dim + card.v_head_dim
    return (
        Weight("self_attn.q_a_proj.weight", (card.q_lora_rank, hidden), "bfloat16"),
        Weight("self_attn.q_a_layernorm.weight", (card.q_lora_rank,), "bfloat16"),
        Weight("self_attn.q_b_proj.weight", (heads * q_head, card.q_lora_rank), "bfloat16", 0),
        Weight("self_attn.kv_a_proj_with_mqa.weight", (card.kv_lora_rank + card.qk_rope_head_dim, hidden), "bfloat16"),
        Weight("self_attn.kv_a_layernorm.weight", (card.kv_lora_rank,), "bfloat16"),
        Weight("self_attn.kv_b_proj.weight", (heads * kv_head, card.kv_lora_rank), "bfloat16", 0),
        Weight("self_attn.g_proj.weight", (dim, hidden), "bfloat16", 0),
        Weight("self_attn.o_proj.weight", (hidden, dim), "bfloat16", 1),
    )


def moe_weights(card: ModelCard, sharding: MoeSharding = "sharded") -> tuple[Weight, ...]:
    """Matrices of one MoE layer outside the routed experts: shared expert, router, latent down and up."""
    hidden, latent, shared = card.hidden_size, card.routed_expert_hidden_size, card.shared_intermediate_size
    front = 0 if sharding == "sharded" else None
    up = None if sharding == "stock" else 0
    name = "block_sparse_moe"
    return (
        Weight(f"{name}.gate.weight", (card.num_experts, hidden), "bfloat16", front),
        Weight(f"{name}.routed_expert_down_proj.weight", (latent, hidden), "bfloat16", front),
        Weight(f"{name}.routed_expert_up_proj.weight", (hidden, latent), "bfloat16", up),
        Weight(f"{name}.shared_experts.gate_proj.weight", (shared, hidden), "bfloat16", 0),
        Weight(f"{name}.shared_experts.up_proj.weight", (shared, hidden), "bfloat16", 0),
        Weight(f"{name}.shared_experts.down_proj.weight", (hidden, shared), "bfloat16", 1),
    )


def moe_vectors(card: ModelCard) -> tuple[Weight, ...]:
    """The small tensors of one MoE layer: correction bias (FP32) and latent norm; every rank holds both."""
    return (
        Weight("block_sparse_moe.gate.e_score_correction_bias", (card.num_experts,), "float32"),
        Weight("block_sparse_moe.routed_expert_norm.weight", (card.routed_expert_hidden_size,), "bfloat16"),
    )


def expert_weights(card: ModelCard, experts: int | None = None) -> tuple[Weight, ...]:
    """w1, w3 and w2 of ``experts`` routed experts (default: all of one layer), split along their inner width."""
    copies = card.num_experts if experts is None else experts
    inner, latent = card.moe_intermediate_size, card.routed_expert_hidden_size
    name = "block_sparse_moe.experts"
    return (
        Weight(f"{name}.w1", (inner, latent), "mxfp4", 0, copies),
        Weight(f"{name}.w3", (inner, latent), "mxfp4", 0, copies),
        Weight(f"{name}.w2", (latent, inner), "mxfp4", 1, copies),
    )


def dense_weights(card: ModelCard) -> tuple[Weight, ...]:
    """The dense MLP of the first layers."""
    hidden, inner = card.hidden_size, card.intermediate_size
    return (
        Weight("mlp.gate_proj.weight", (inner, hidden), "bfloat16", 0),
        Weight("mlp.up_proj.weight", (inner, hidden), "bfloat16", 0),
        Weight("mlp.down_proj.weight", (hidden, inner), "bfloat16", 1),
    )


def layer_vectors(card: ModelCard) -> tuple[Weight, ...]:
    """Norms and AttnRes vectors of one layer; every rank holds them."""
    hidden = card.hidden_size
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    return (
        *(Weight(f"{name}.weight", (hidden,), "bfloat16") for name in norms),
        Weight("self_attention_res_proj.weight", (1, hidden), "bfloat16"),
        Weight("mlp_res_proj.weight", (1, hidden), "bfloat16"),
    )


def model_weights(card: ModelCard) -> tuple[Weight, ...]:
    """Tensors outside the layers: embedding, head, final norm and AttnRes."""
    hidden = card.hidden_size
    return (
        Weight("embed_tokens.weight", (card.vocab_size, hidden), "bfloat16", 0),
        Weight("lm_head.weight", (card.vocab_size, hidden), "bfloat16", 0),
        Weight("norm.weight", (hidden,), "bfloat16"),
        Weight("output_attn_res_norm.weight", (hidden,), "bfloat16"),
        Weight("output_attn_res_proj.weight", (1, hidden), "bfloat16"),
    )


def attention_weights(card: ModelCard, kind: LayerKind, *, stored: bool = False) -> tuple[Weight, ...]:
    """Attention tensors of a layer of the kind."""
    return kda_weights(card, stored=stored) if kind == "kda" else mla_weights(card)


def checkpoint_weights(card: ModelCard) -> tuple[Weight, ...]:
    """Every text tensor of the checkpoint, as stored, over all layers."""
    found = list(model_weights(card))
    for layer, kind in enumerate(card.layer_kinds):
        found += attention_weights(card, kind, stored=True)
        found += layer_vectors(card)
        if card.is_dense(layer):
            found += dense_weights(card)
        else:
            found += (*moe_weights(card), *moe_vectors(card), *expert_weights(card))
    return tuple(found)
