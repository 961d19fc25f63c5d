"""The drafter's dimensions, its tensors, and its rotary angles' parameters. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...kernels import InputError, ModelCard
from ..checkpoint.names import StoredTensor
from ..tensors import Init, TensorSpec

SKIPPED = ("embed_tokens.",)
"""A drafter's checkpoint repeats the target's embedding; it is not read."""


@dataclass(frozen=True)
class DraftCard:
    """A DSpark drafter with MLA layers; embedding and head are the target's."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    yarn_factor: float
    yarn_original: int
    """Positions the angles were trained for before they were stretched."""
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale_all_dim: float
    markov_rank: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Zero-based layers of the target after which its residual is read."""
    block: int
    """Tokens it drafts at most."""

    @property
    def row(self) -> int:
        """Width of a cache row: latent and rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Of the scores: head width, and YaRN's correction of the temperature."""
        stretched = 0.1 * self.yarn_mscale_all_dim * math.log(self.yarn_factor) + 1 if self.yarn_factor > 1 else 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * stretched**2

    def check(self, target: ModelCard, tp: int) -> None:
        """Raise InputError unless it drafts for the target and can be cut for the TP size."""
        for name in ("hidden_size", "vocab_size"):
            if getattr(self, name) != getattr(target, name):
                raise InputError(
                    f"{self.name} has {name} {getattr(self, name)}, {target.name} has {getattr(target, name)}"
                )
        if not all(0 <= layer < target.num_hidden_layers for layer in self.target_layer_ids):
            raise InputError(
                f"{self.name} reads after layers {list(self.target_layer_ids)}, {target.name} has 0..{target.num_hidden_layers - 1}"
            )
        for name in ("num_heads", "intermediate_size", "vocab_size"):
            if tp < 1 or getattr(self, name) % tp:
                raise InputError(f"TP {tp} does not divide {name} {getattr(self, name)} of {self.name}")

    def check_drafts(self, drafts: int) -> None:
        """Raise InputError unless it can draft so many tokens at a time."""
        if not 1 <= drafts <= self.block:
            raise InputError(f"{drafts} drafts a step; {self.name} drafts 1 to {self.block}")


K3_DSPARK = DraftCard(
    name="kimi-k3-dspark",
    hidden_size=7168,
    vocab_size=163840,
    num_layers=5,
    num_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    yarn_factor=32.0,
    yarn_original=32768,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    yarn_mscale_all_dim=1.0,
    markov_rank=256,
    mask_token_id=163837,
    target_layer_ids=(2, 23, 47, 71, 89),
    block=7,
)
"""The published drafter of Kimi K3."""

SMALL_DSPARK = DraftCard(
    name="small-dspark",
    hidden_size=256,
    vocab_size=512,
    num_layers=2,
    num_heads=16,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=512,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    yarn_factor=4.0,
    yarn_original=64,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    yarn_mscale_all_dim=1.0,
    markov_rank=16,
    mask_token_id=510,
    target_layer_ids=(1, 4),
    block=7,
)
"""Drafts for the small models that the tests decode."""


def draft_specs(card: DraftCard) -> tuple[TensorSpec, ...]:
    """All tensors, by their names in the checkpoint without ``.weight``; markov_w2 is cut by vocabulary."""
    hidden, heads = card.hidden_size, card.num_heads
    taps = hidden * len(card.target_layer_ids)

    def matrix(name: str, rows: int, columns: int, split: int | None = None) -> TensorSpec:
        return TensorSpec(name, (rows, columns), "model", split, Init("normal", 0.0, columns**-0.5))

    def norm(name: str, size: int) -> TensorSpec:
        return TensorSpec(name, (size,), "model", None, Init("normal", 1.0, 0.1))

    specs = [matrix("context_proj", hidden, taps), norm("context_norm", hidden)]
    for index in range(card.num_layers):
        own, attention = f"layers.{index}.", f"layers.{index}.self_attn."
        q_head, kv_head = card.qk_nope_head_dim + card.qk_rope_head_dim, card.qk_nope_head_dim + card.v_head_dim
        specs += [
            norm(f"{own}input_layernorm", hidden),
            norm(f"{own}post_attention_layernorm", hidden),
            matrix(f"{attention}q_a_proj", card.q_lora_rank, hidden),
            norm(f"{attention}q_a_layernorm", card.q_lora_rank),
            matrix(f"{attention}q_b_proj", heads * q_head, card.q_lora_rank, 0),
            matrix(f"{attention}kv_a_proj_with_mqa", card.row, hidden),
            norm(f"{attention}kv_a_layernorm", card.kv_lora_rank),
            matrix(f"{attention}kv_b_proj", heads * kv_head, card.kv_lora_rank, 0),
            matrix(f"{attention}o_proj", hidden, heads * card.v_head_dim, 1),
            matrix(f"{own}mlp.gate_proj", card.intermediate_size, hidden, 0),
            matrix(f"{own}mlp.up_proj", card.intermediate_size, hidden, 0),
            matrix(f"{own}mlp.down_proj", hidden, card.intermediate_size, 1),
        ]
    vocabulary, rank = card.vocab_size, card.markov_rank
    return (
        *specs,
        norm("final_norm", hidden),
        TensorSpec("markov_head.markov_w1", (vocabulary, rank), "model", None, Init("normal", 0.0, 1.0)),
        matrix("markov_head.markov_w2", vocabulary, rank, 0),
        matrix("confidence_head.proj", 1, hidden + rank),
        TensorSpec("confidence_head.proj.bias", (1,), "model", None, Init("normal", 0.0, 0.1)),
    )


def draft_tensors(card: DraftCard) -> tuple[StoredTensor, ...]:
    """What its checkpoint must hold beside :data:`SKIPPED`."""
    return tuple(
        StoredTensor(spec.name if spec.name.endswith(".bias") else f"{spec.name}.weight", spec.shape, "BF16", spec.name)
        for spec in draft_specs(card)
    )
