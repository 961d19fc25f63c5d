"""The drafter's weights of one rank: random, or from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import ModelCard
from ...kernels.mla.twin import MlaWeights
from ..checkpoint.load import fill
from ..checkpoint.shards import Checkpoint, OpenShards
from ..random_weights import random_tensor
from ..sharding import check_rank, shard_tensor
from .card import SKIPPED, DraftCard, draft_specs, draft_tensors


@dataclass(frozen=True)
class DraftLayer:
    """One layer; T is the TP size."""

    input_norm: Tensor
    """[H]."""
    q_a: Tensor
    """[q_lora, H]."""
    kv_a: Tensor
    """[kv_lora + rope, H]."""
    core: MlaWeights
    o_proj: Tensor
    """[H, h*v/T]."""
    post_norm: Tensor
    """[H]."""
    gate: Tensor
    """[I/T, H]."""
    up: Tensor
    """[I/T, H]."""
    down: Tensor
    """[H, I/T]."""


@dataclass(frozen=True)
class DraftWeights:
    """Everything one rank holds of the drafter; embedding and head are the target's."""

    card: DraftCard
    tp: int
    rank: int
    context_proj: Tensor
    """[H, taps * H]."""
    context_norm: Tensor
    """[H]."""
    layers: tuple[DraftLayer, ...]
    final_norm: Tensor
    """[H]."""
    markov_w1: Tensor
    """[V, R], a row a previous token."""
    markov_w2: Tensor
    """[V/T, R], this rank's part of the vocabulary."""
    confidence: Tensor
    """[1, H + R]."""
    confidence_bias: Tensor
    """[1]."""


def _pack(tensors: Mapping[str, Tensor], card: DraftCard, tp: int, rank: int) -> DraftWeights:
    layers = []
    for index in range(card.num_layers):
        own = {name.removeprefix(f"layers.{index}."): tensor for name, tensor in tensors.items()}
        heads = own["self_attn.kv_b_proj"].unflatten(0, (-1, card.qk_nope_head_dim + card.v_head_dim))
        core = MlaWeights(
            q_a_norm=own["self_attn.q_a_layernorm"],
            kv_a_norm=own["self_attn.kv_a_layernorm"],
            q_b=own["self_attn.q_b_proj"],
            w_uk=heads[:, : card.qk_nope_head_dim].contiguous(),
            w_uv=heads[:, card.qk_nope_head_dim :].contiguous(),
        )
        layers.append(
            DraftLayer(
                own["input_layernorm"], own["self_attn.q_a_proj"], own["self_attn.kv_a_proj_with_mqa"], core,
                own["self_attn.o_proj"], own["post_attention_layernorm"],
                *(own[f"mlp.{name}_proj"] for name in ("gate", "up", "down")),
            )
        )  # fmt: skip
    return DraftWeights(
        card, tp, rank, tensors["context_proj"], tensors["context_norm"], tuple(layers), tensors["final_norm"],
        tensors["markov_head.markov_w1"], tensors["markov_head.markov_w2"],
        tensors["confidence_head.proj"], tensors["confidence_head.proj.bias"],
    )  # fmt: skip


def random_draft_tensors(card: DraftCard, *, seed: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Whole tensors by name."""
    return {
        spec.name: random_tensor(spec, spec.shape, seed=f"{seed}/draft/{spec.name}", dtype=dtype, device=device)
        for spec in draft_specs(card)
    }


def draft_weights(
    tensors: Mapping[str, Tensor], card: DraftCard, target: ModelCard, *, tp: int, rank: int
) -> DraftWeights:
    """Weights of one rank from whole tensors.

    Raises:
        InputError: the drafter does not fit the target or the TP size, or a tensor has another shape.
    """
    check_rank(target, tp, rank)
    card.check(target, tp)
    return _pack({spec.name: shard_tensor(tensors[spec.name], spec, tp, rank) for spec in draft_specs(card)}, card, tp, rank)  # fmt: skip


def random_rank_draft(
    card: DraftCard, target: ModelCard, *, seed: int, dtype: torch.dtype, tp: int, rank: int, device: str = "cpu"
) -> DraftWeights:
    """Weights of one rank, cut from the random drafter of that seed, tensor by tensor."""
    card.check(target, tp)
    tensors = {}
    for spec in draft_specs(card):
        whole = random_tensor(spec, spec.shape, seed=f"{seed}/draft/{spec.name}", dtype=dtype, device=device)
        tensors[spec.name] = shard_tensor(whole, spec, tp, rank)
    return _pack(tensors, card, tp, rank)


def load_draft(
    folder: str | Path,
    card: DraftCard,
    target: ModelCard,
    *,
    tp: int,
    rank: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> DraftWeights:
    """Weights of one rank from the drafter's checkpoint, sliced as they are read.

    Raises:
        InputError: the first of the checkpoint's faults, or the drafter does not fit. Nothing was loaded.
    """
    check_rank(target, tp, rank)
    card.check(target, tp)
    checkpoint, stored, specs = Checkpoint.read(folder), draft_tensors(card), draft_specs(card)
    checkpoint.check(stored, SKIPPED)
    out = {spec.name: torch.empty(spec.local_shape(tp), dtype=dtype, device=device) for spec in specs}
    with OpenShards(checkpoint) as shards:
        fill(shards, stored, {spec.name: spec for spec in specs}, out, tp, rank)
    return _pack(out, card, tp, rank)
