"""From named tensors to the packed weights of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels import ModelCard
from ..kernels.attention_projection.family import packed_outputs
from ..kernels.model_card import LayerKind
from .sharding import ModelTensors, Tensors, check_rank
from .weights import DenseMlp, KdaAttention, LayerWeights, Mix, MlaAttention, MoeMlp, RankWeights

if TYPE_CHECKING:
    import torch


def in_proj_rows(card: ModelCard, kind: LayerKind, tp: int) -> dict[str, slice]:
    """Rows of the packed projection on one rank, part by part in order; ``pad`` (zeros) comes last."""
    if kind == "kda":
        wide = card.kda_dim // tp
        parts = {"q": wide, "k": wide, "v": wide, "g": wide, "f_a": card.kda_gate_rank, "b": card.kda_num_heads // tp}
    else:
        latent = card.kv_lora_rank + card.qk_rope_head_dim
        parts = {"q_a": card.q_lora_rank, "kv_a": latent, "g": card.mla_dim // tp}
    rows, start = {}, 0
    for name, size in parts.items():
        rows[name] = slice(start, start + size)
        start += size
    rows["pad"] = slice(start, packed_outputs(card, kind, tp))
    return rows


def pack_in_proj(card: ModelCard, kind: LayerKind, tp: int, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The packed projection [N, H] from its parts by name (those of :func:`in_proj_rows`)."""
    rows = in_proj_rows(card, kind, tp)
    packed = next(iter(parts.values())).new_zeros(rows["pad"].stop, card.hidden_size)
    for name, part in parts.items():
        packed[rows[name]] = part
    return packed


def _attention(tensors: Tensors, card: ModelCard, kind: LayerKind, tp: int) -> KdaAttention | MlaAttention:
    own = {name.removeprefix("self_attn."): tensor for name, tensor in tensors.items() if name.startswith("self_attn.")}
    if kind == "kda":
        from ..kernels.kda.twin import KdaWeights

        core = KdaWeights(
            f_b=own["f_b_proj"],
            # stored [channels, 1, width]
            conv_q=own["q_conv1d"].flatten(1),
            conv_k=own["k_conv1d"].flatten(1),
            conv_v=own["v_conv1d"].flatten(1),
            a_log=own["A_log"],
            dt_bias=own["dt_bias"],
            o_norm=own["o_norm"],
        )
        parts = {name: own[f"{name}_proj"] for name in ("q", "k", "v", "g", "f_a", "b")}
        return KdaAttention(pack_in_proj(card, kind, tp, parts), core, own["o_proj"])

    from ..kernels.mla.twin import MlaWeights

    # a head's rows of kv_b: first the key part (absorbed into the query), then the value part
    by_head = own["kv_b_proj"].unflatten(0, (-1, card.qk_nope_head_dim + card.v_head_dim))
    mla = MlaWeights(
        q_a_norm=own["q_a_layernorm"],
        kv_a_norm=own["kv_a_layernorm"],
        q_b=own["q_b_proj"],
        w_uk=by_head[:, : card.qk_nope_head_dim].contiguous(),
        w_uv=by_head[:, card.qk_nope_head_dim :].contiguous(),
    )
    parts = {"q_a": own["q_a_proj"], "kv_a": own["kv_a_proj_with_mqa"], "g": own["g_proj"]}
    return MlaAttention(pack_in_proj(card, kind, tp, parts), mla, own["o_proj"])


def _mlp(tensors: Tensors, dense: bool) -> MoeMlp | DenseMlp:
    if dense:
        return DenseMlp(*(tensors[f"mlp.{name}_proj"] for name in ("gate", "up", "down")))

    from ..kernels.experts.twin import ExpertWeights
    from .expert_memory import bank, shared_pair

    moe = "block_sparse_moe"
    experts = ExpertWeights(
        **{
            name + suffix: tensors[f"{moe}.experts.{name}.weight_{stored}"]
            for name in ("w1", "w3", "w2")
            for suffix, stored in (("", "packed"), ("_scale", "scale"))
        }
    )
    gate, up = shared_pair(tensors[f"{moe}.shared_experts.gate_proj"], tensors[f"{moe}.shared_experts.up_proj"])
    return MoeMlp(
        router=tensors[f"{moe}.gate"],
        correction_bias=tensors[f"{moe}.gate.e_score_correction_bias"],
        latent_down=tensors[f"{moe}.routed_expert_down_proj"],
        experts=bank(experts),
        latent_norm=tensors[f"{moe}.routed_expert_norm"],
        latent_up=tensors[f"{moe}.routed_expert_up_proj"],
        shared_gate=gate,
        shared_up=up,
        shared_down=tensors[f"{moe}.shared_experts.down_proj"],
    )


def pack_layer(tensors: Tensors, card: ModelCard, layer: int, tp: int) -> LayerWeights:
    """One layer's weights from the rank's tensors."""
    return LayerWeights(
        attention_mix=Mix(
            tensors["self_attention_res_norm"], tensors["self_attention_res_proj"], tensors["input_layernorm"]
        ),
        attention=_attention(tensors, card, card.kind_of(layer), tp),
        mlp_mix=Mix(tensors["mlp_res_norm"], tensors["mlp_res_proj"], tensors["post_attention_layernorm"]),
        mlp=_mlp(tensors, card.is_dense(layer)),
    )


def pack_outside(
    outside: Tensors, layers: tuple[LayerWeights, ...], card: ModelCard, *, tp: int, rank: int
) -> RankWeights:
    """The weights of one rank from packed layers and the tensors outside them."""
    return RankWeights(
        card=card,
        tp=tp,
        rank=rank,
        embed=outside["embed_tokens"],
        layers=layers,
        output_mix=Mix(outside["output_attn_res_norm"], outside["output_attn_res_proj"], outside["norm"]),
        lm_head=outside["lm_head"],
    )


def pack(tensors: ModelTensors, card: ModelCard, *, tp: int, rank: int) -> RankWeights:
    """The weights of one rank from the rank's tensors (see :func:`~k3lab.decode.sharding.shard`)."""
    check_rank(card, tp, rank)
    layers = tuple(pack_layer(layer, card, index, tp) for index, layer in enumerate(tensors.layers))
    return pack_outside(tensors.outside, layers, card, tp=tp, rank=rank)
