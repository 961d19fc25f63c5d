"""Tensors, sharding, packing and random draws."""

from __future__ import annotations

import math

import pytest
import torch
from k3lab.decode.demo import DEMO_TP, demo_card
from k3lab.decode.packing import in_proj_rows, pack
from k3lab.decode.random_weights import random_rank_weights, random_tensors, random_weights
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.tensors import layer_specs, model_specs, rank_bytes
from k3lab.decode.weights import KdaAttention, MlaAttention, MoeMlp
from k3lab.kernels import K3, InputError, ModelCard, family


@pytest.mark.parametrize(("kind", "tp", "parts"), [
    ("kda", 8, {"q": 1536, "k": 1536, "v": 1536, "g": 1536, "f_a": 128, "b": 12, "pad": 4}),
    ("kda", 16, {"q": 768, "k": 768, "v": 768, "g": 768, "f_a": 128, "b": 6, "pad": 10}),
    ("mla", 8, {"q_a": 1536, "kv_a": 576, "g": 1536, "pad": 0}),
    ("mla", 16, {"q_a": 1536, "kv_a": 576, "g": 768, "pad": 0}),
])  # fmt: skip
def test_packed_rows_of_the_published_model(kind: str, tp: int, parts: dict[str, int]) -> None:
    rows = in_proj_rows(K3, kind, tp)
    assert {name: part.stop - part.start for name, part in rows.items()} == parts
    assert list(rows) == list(parts)
    assert rows["pad"].stop == family("attention_projection").problem(K3, tp=tp, rows=1, kind=kind).outputs  # type: ignore[attr-defined]


def test_local_shapes_of_the_published_model_at_tp16() -> None:
    kda = {spec.name: spec.local_shape(16) for spec in layer_specs(K3, 1)}
    mla = {spec.name: spec.local_shape(16) for spec in layer_specs(K3, 92)}
    dense = {spec.name: spec.local_shape(16) for spec in layer_specs(K3, 0)}
    assert kda["self_attn.q_proj"] == (768, 7168)
    assert kda["self_attn.f_a_proj"] == (128, 7168)
    assert kda["self_attn.f_b_proj"] == (768, 128)
    assert kda["self_attn.A_log"] == (6,)
    assert kda["self_attn.q_conv1d"] == (768, 1, 4)
    assert kda["self_attn.o_proj"] == (7168, 768)
    assert mla["self_attn.kv_a_proj_with_mqa"] == (576, 7168)
    assert mla["self_attn.q_b_proj"] == (1152, 1536)
    assert mla["self_attn.kv_b_proj"] == (1536, 512)
    assert kda["block_sparse_moe.gate"] == (56, 7168)
    assert kda["block_sparse_moe.routed_expert_down_proj"] == (224, 7168)
    assert kda["block_sparse_moe.routed_expert_up_proj"] == (448, 3584)
    assert kda["block_sparse_moe.experts.w1.weight_packed"] == (896, 192, 1792)
    assert kda["block_sparse_moe.experts.w2.weight_packed"] == (896, 3584, 96)
    assert kda["block_sparse_moe.experts.w2.weight_scale"] == (896, 3584, 6)
    assert kda["block_sparse_moe.shared_experts.down_proj"] == (7168, 384)
    assert dense["mlp.gate_proj"] == (2112, 7168)
    assert {spec.name: spec.local_shape(16) for spec in model_specs(K3)}["lm_head"] == (10240, 7168)


def test_every_ranks_weights_begin_where_kernels_can_read_them(tiny: ModelCard) -> None:
    """A launch refuses a tensor that does not begin at a multiple of 16 bytes; two heads' decay rates are eight."""
    whole = random_tensors(tiny, seed=5, dtype=torch.bfloat16)
    for rank in range(8):
        for layer in pack(shard(whole, tiny, tp=8, rank=rank), tiny, tp=8, rank=rank).layers:
            for part in (layer.attention, layer.attention.core, layer.mlp):
                held = {name: one for name, one in vars(part).items() if isinstance(one, torch.Tensor)}
                assert not [name for name, one in held.items() if one.data_ptr() % 16], (rank, type(part).__name__)


def test_packing_puts_every_part_in_its_rows(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    tp, rank = 4, 3
    own = shard(tiny_tensors, tiny, tp=tp, rank=rank)
    weights = pack(own, tiny, tp=tp, rank=rank)
    for layer, name in ((1, "kda"), (2, "mla")):
        attention = weights.layers[layer].attention
        assert isinstance(attention, KdaAttention if name == "kda" else MlaAttention)
        rows = in_proj_rows(tiny, name, tp)
        whole = {"kv_a": "kv_a_proj_with_mqa"}
        for part, where in rows.items():
            if part == "pad":
                assert not attention.in_proj[where].any()
            else:
                tensor = own.layers[layer][f"self_attn.{whole.get(part, part + '_proj')}"]
                assert torch.equal(attention.in_proj[where], tensor), part
    heads = slice(12, 16)
    kv_b = tiny_tensors.layers[2]["self_attn.kv_b_proj"].view(16, 32, 32)[heads]
    core = weights.layers[2].attention.core
    assert torch.equal(core.w_uk, kv_b[:, :16])
    assert torch.equal(core.w_uv, kv_b[:, 16:])
    assert torch.equal(
        weights.layers[1].attention.o_proj, tiny_tensors.layers[1]["self_attn.o_proj"][:, rank * 64 : (rank + 1) * 64]
    )


def test_shards_of_all_ranks_make_the_whole(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    tp = 8
    shards = [shard(tiny_tensors, tiny, tp=tp, rank=rank) for rank in range(tp)]
    for layer in (0, 1, 5):
        for spec in layer_specs(tiny, layer):
            parts = [one.layers[layer][spec.name] for one in shards]
            assert all(tuple(part.shape) == spec.local_shape(tp) for part in parts)
            whole = parts[0] if spec.split is None else torch.cat(parts, dim=spec.split)
            assert torch.equal(whole, tiny_tensors.layers[layer][spec.name]), spec.name


def test_experts_stay_packed_and_bytes_are_counted(tiny: ModelCard) -> None:
    weights = random_weights(tiny, seed=0, dtype=torch.bfloat16, tp=2, rank=1)
    mlp = weights.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    assert mlp.experts.w1.dtype == torch.uint8
    assert mlp.experts.w1.shape == (16, 256, 32)
    padding = sum(
        2 * tiny.hidden_size * (rows["pad"].stop - rows["pad"].start)
        for rows in (in_proj_rows(tiny, kind, 2) for kind in tiny.layer_kinds)
    )
    assert weights.bytes == rank_bytes(tiny, 2) + padding


def test_one_rank_alone_has_the_shapes_of_a_shard_and_the_common_tensors(tiny: ModelCard) -> None:
    made = []
    first = random_rank_weights(tiny, seed=3, dtype=torch.bfloat16, tp=4, rank=0, progress=lambda *at: made.append(at))
    other = random_rank_weights(tiny, seed=3, dtype=torch.bfloat16, tp=4, rank=1)
    cut = random_weights(tiny, seed=3, dtype=torch.bfloat16, tp=4, rank=0)
    assert made == [(layer + 1, 6) for layer in range(6)]
    assert first.bytes == cut.bytes
    assert first.layers[1].attention.in_proj.shape == cut.layers[1].attention.in_proj.shape
    assert torch.equal(first.layers[1].attention_mix.norm, other.layers[1].attention_mix.norm)
    assert torch.equal(first.layers[1].mlp.correction_bias, other.layers[1].mlp.correction_bias)
    assert not torch.equal(first.layers[1].mlp.router, other.layers[1].mlp.router)
    assert not torch.equal(first.embed, other.embed)


def test_random_weights_depend_on_the_seed_alone(tiny: ModelCard) -> None:
    one, same, other = (random_tensors(tiny, seed=seed, dtype=torch.bfloat16) for seed in (1, 1, 2))
    for layer, twin, different in zip(one.layers, same.layers, other.layers, strict=True):
        assert all(torch.equal(layer[name], twin[name]) for name in layer)
        assert not any(torch.equal(layer[name], different[name]) for name in layer)
    names = list(one.layers[1])
    assert not torch.equal(one.layers[1][names[0]], one.layers[3][names[0]])


def test_random_weights_are_of_realistic_size(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    layer = tiny_tensors.layers[1]
    for name in ("self_attn.q_proj", "block_sparse_moe.gate", "self_attn.o_proj"):
        assert layer[name].std().item() * math.sqrt(layer[name].shape[-1]) == pytest.approx(1, rel=0.05)
    rate, bias = layer["self_attn.A_log"].exp(), layer["self_attn.dt_bias"]
    assert rate.min() >= 1
    assert rate.max() <= 4
    decay = -5 * torch.sigmoid(rate[:, None] * bias.view(16, 16))
    assert -1 < decay.median() < -0.001
    assert layer["input_layernorm"].mean().item() == pytest.approx(1, abs=0.05)
    scale = layer["block_sparse_moe.experts.w1.weight_scale"].double()
    assert 2.93 * torch.exp2(scale - 127).mean().item() * math.sqrt(64) == pytest.approx(1, rel=0.5)


def test_fp32_tensors_keep_their_type_in_a_bf16_model(tiny: ModelCard) -> None:
    weights = random_weights(tiny, seed=0, dtype=torch.bfloat16)
    core = weights.layers[0].attention.core
    assert {core.a_log.dtype, core.dt_bias.dtype, core.o_norm.dtype, core.conv_q.dtype} == {torch.float32}
    assert core.f_b.dtype == torch.bfloat16
    assert weights.layers[1].mlp.correction_bias.dtype == torch.float32


def test_what_cannot_be_cut_is_refused(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    with pytest.raises(InputError, match="TP 3 does not divide"):
        shard(tiny_tensors, tiny, tp=3, rank=0)
    with pytest.raises(InputError, match=r"rank 4 lies outside 0\.\.3"):
        shard(tiny_tensors, tiny, tp=4, rank=4)
    short = ModelTensors({k: v for k, v in tiny_tensors.outside.items() if k != "norm"}, tiny_tensors.layers)
    with pytest.raises(InputError, match="lacks the tensor norm"):
        shard(short, tiny, tp=2, rank=0)
    wrong = ModelTensors({**tiny_tensors.outside, "norm": torch.ones(3)}, tiny_tensors.layers)
    with pytest.raises(InputError, match=r"norm has shape \[3\], the model card says \[256\]"):
        shard(wrong, tiny, tp=2, rank=0)


def test_the_demo_model_keeps_the_real_widths() -> None:
    card = demo_card()
    for name in ("hidden_size", "kda_num_heads", "num_attention_heads", "routed_expert_hidden_size", "moe_intermediate_size",
                 "q_lora_rank", "kv_lora_rank", "intermediate_size", "num_experts_per_token"):  # fmt: skip
        assert getattr(card, name) == getattr(K3, name), name
    card.check_tp(DEMO_TP)
    assert card.layer_kinds[-2:] == ("mla", "mla")
    assert "kda" in card.layer_kinds
    assert not card.is_dense(len(card.layer_kinds) - 1)
    for kind in ("kda", "mla"):
        projection = family("attention_projection")
        assert projection.problem(card, tp=16, rows=8, kind=kind) == projection.problem(K3, tp=16, rows=8, kind=kind)
    smaller = demo_card(2 * rank_bytes(card, 16) - 1)
    assert rank_bytes(smaller, 16) < rank_bytes(card, 16)
    assert demo_card(2 * rank_bytes(card, 16)) == card
    with pytest.raises(InputError, match="demo model needs"):
        demo_card(1000)
