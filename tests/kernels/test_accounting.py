"""Bytes and flops of the model against the published totals and the fact sheet's tables, to the printed digit."""

from __future__ import annotations

import pytest
from k3lab.kernels import K3, SMALL_K3, InputError
from k3lab.kernels import accounting as acc
from k3lab.kernels import weight_shapes as shapes
from k3lab.kernels.gpu_cards import gpu_card

EIGHT_TB_US = 8e6
"""Bytes a microsecond at 8 TB/s: the table's unit of time."""


def test_totals_of_the_published_checkpoint() -> None:
    totals = acc.checkpoint_totals(K3)
    assert totals.fp32_values == 11_122_432
    assert totals.bf16_values == 56_732_525_568
    assert totals.expert_values == 2_722_740_830_208
    assert totals.expert_bytes == 1_446_456_066_048


def counts(weights: tuple[shapes.Weight, ...], dtype: str) -> int:
    return sum(weight.count for weight in weights if weight.dtype == dtype)


def test_parameter_counts_of_each_component() -> None:
    kda = shapes.kda_weights(K3, stored=True)
    assert counts(kda, "bfloat16") == 443_580_416
    assert counts(kda, "float32") == 160_000
    assert counts(shapes.mla_weights(K3), "bfloat16") == 232_196_096
    assert counts(shapes.layer_vectors(K3), "bfloat16") == 43_008
    assert counts((*shapes.moe_weights(K3), *shapes.moe_vectors(K3)), "bfloat16") == 189_926_912
    assert counts(shapes.moe_vectors(K3), "float32") == 896
    assert counts(shapes.expert_weights(K3, 1), "mxfp4") == 33_030_144
    assert acc.rank_bytes(K3, shapes.expert_weights(K3, 1), 1) == 17_547_264
    assert counts(shapes.dense_weights(K3), "bfloat16") == 726_663_168


def test_per_rank_shapes() -> None:
    at16 = {weight.name: weight.of_rank(16).shape for weight in (*shapes.kda_weights(K3), *shapes.moe_weights(K3))}
    assert at16["self_attn.q_proj.weight"] == (768, 7168)
    assert at16["self_attn.f_a_proj.weight"] == (128, 7168)
    assert at16["self_attn.b_proj.weight"] == (6, 7168)
    assert at16["self_attn.o_proj.weight"] == (7168, 768)
    assert at16["block_sparse_moe.gate.weight"] == (56, 7168)
    assert at16["block_sparse_moe.routed_expert_down_proj.weight"] == (224, 7168)
    assert at16["block_sparse_moe.routed_expert_up_proj.weight"] == (448, 3584)
    at8 = {weight.name: weight.of_rank(8).shape for weight in (*shapes.mla_weights(K3), *shapes.expert_weights(K3))}
    assert at8["self_attn.q_b_proj.weight"] == (2304, 1536)
    assert at8["self_attn.kv_b_proj.weight"] == (3072, 512)
    assert at8["block_sparse_moe.experts.w1"] == (384, 3584)
    assert at8["block_sparse_moe.experts.w2"] == (3584, 384)


@pytest.mark.parametrize(
    ("rows", "printed"),
    [
        (1, "16.00"),
        (8, "120.28"),
        (16, "224.4"),
        (32, "392.6"),
        (64, "613.2"),
        (128, "806.7"),
        (256, "887.1"),
        (512, "895.9"),
    ],
)
def test_expected_distinct_experts(rows: int, printed: str) -> None:
    digits = len(printed.split(".")[1])
    assert f"{acc.expected_distinct_experts(K3, rows):.{digits}f}" == printed


# TP, rows, KDA MB/us, MLA MB/us, MoE sharded MB/us, MoE stock MB/us, KDA+MoE us sharded/stock, MLA+MoE us sharded/stock,
# layer 0 us, step sharded GB/us, step stock GB/us: as the fact sheet prints them at 8 TB/s
TABLE = [
    (8, 1, "114.2/14.28", "84.5/10.57", "82.6/10.32", "183.7/22.97", "24.61/37.25", "20.90/33.55", "37.0", "17.99/2249", "27.30/3412"),
    (8, 8, "125.6/15.70", "84.5/10.57", "311.3/38.91", "412.5/51.56", "54.62/67.27", "49.49/62.14", "38.4", "39.82/4977", "49.13/6141"),
    (8, 64, "216.8/27.10", "84.5/10.57", "1392.5/174.06", "1493.6/186.70", "201.17/213.81", "184.64/197.28", "49.8", "145.6/18197", "154.9/19360"),
    (16, 1, "58.0/7.25", "57.4/7.18", "41.3/5.16", "149.7/18.71", "12.42/25.97", "12.35/25.90", "18.6", "9.43/1178", "19.40/2425"),
    (16, 8, "63.7/7.97", "57.4/7.18", "155.7/19.46", "264.0/33.00", "27.43/40.98", "26.64/40.19", "19.3", "20.34/2543", "30.31/3789"),
    (16, 64, "109.3/13.66", "57.4/7.18", "696.2/87.03", "804.6/100.58", "100.70/114.25", "94.22/107.76", "25.0", "73.2/9152", "83.2/10399"),
]  # fmt: skip


def printed(value: float, like: str) -> str:
    digits = len(like.split(".")[1]) if "." in like else 0
    return f"{value:.{digits}f}"


def pair(amount: float, unit: float, like: str) -> str:
    left, right = like.split("/")
    return f"{printed(amount / unit, left)}/{printed(amount / EIGHT_TB_US, right)}"


def times(first: float, second: float, like: str) -> str:
    left, right = like.split("/")
    return f"{printed(first / EIGHT_TB_US, left)}/{printed(second / EIGHT_TB_US, right)}"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"tp{row[0]}-rows{row[1]}")
def test_the_table_of_minimum_bytes(row: tuple) -> None:
    tp, rows, kda_text, mla_text, sharded_text, stock_text, kda_us, mla_us, dense_us, step_text, step_stock_text = row
    kda, kda_stock = (acc.layer_bytes(K3, tp, rows, "kda", moe=moe) for moe in ("sharded", "stock"))
    mla, mla_stock = (acc.layer_bytes(K3, tp, rows, "mla", moe=moe) for moe in ("sharded", "stock"))
    dense = acc.layer_bytes(K3, tp, rows, "kda", dense=True)

    def total(layer: acc.LayerBytes) -> float:
        return layer.total - layer.moe_vectors  # the sheet leaves out the 11 KB of bias and latent norm

    assert pair(kda.attention, 1e6, kda_text) == kda_text
    assert pair(mla.attention, 1e6, mla_text) == mla_text
    assert pair(kda.mlp, 1e6, sharded_text) == sharded_text
    assert pair(kda_stock.mlp, 1e6, stock_text) == stock_text
    assert times(total(kda), total(kda_stock), kda_us) == kda_us
    assert times(total(mla), total(mla_stock), mla_us) == mla_us
    assert printed(total(dense) / EIGHT_TB_US, dense_us) == dense_us
    left_out = sum(not K3.is_dense(layer) for layer in range(K3.num_hidden_layers)) * kda.moe_vectors
    assert pair(acc.step_bytes(K3, tp, rows) - left_out, 1e9, step_text) == step_text
    assert pair(acc.step_bytes(K3, tp, rows, moe="stock") - left_out, 1e9, step_stock_text) == step_stock_text


def test_the_formulas_of_minimum_bytes() -> None:
    def mb(weights: tuple[shapes.Weight, ...], tp: int) -> float:
        return round(acc.rank_bytes(K3, weights, tp) / 1e6, 2)

    assert [mb(shapes.kda_weights(K3), tp) for tp in (8, 16)] == [112.58, 57.21]
    assert [mb(shapes.mla_weights(K3), tp) for tp in (8, 16)] == [84.55, 57.41]
    assert [mb(shapes.moe_weights(K3, "stock"), tp) for tp in (8, 16)] == [148.64, 132.12]
    assert [mb(shapes.moe_weights(K3, "tail_fused"), tp) for tp in (8, 16)] == [103.68, 83.95]
    assert [mb(shapes.moe_weights(K3, "sharded"), tp) for tp in (8, 16)] == [47.48, 23.74]
    assert [mb(shapes.dense_weights(K3), tp) for tp in (8, 16)] == [181.67, 90.83]
    assert [round(acc.lm_head_bytes(K3, tp) / 1e6, 2) for tp in (8, 16)] == [293.60, 146.80]
    assert [round(acc.expert_bytes(K3, tp, 1) / 1e6, 4) for tp in (8, 16)] == [2.1934, 1.0967]
    assert round(acc.kda_state_bytes(K3, 8, requests=1) / 1e6, 3) == round(1.573 + 0.055, 3)
    assert round(acc.kda_state_bytes(K3, 8, 1, q_len=8) / 1e6, 2) == round(9 * 0.786 + 0.055, 2)
    assert acc.kda_state_bytes(K3, 8, 1, q_len=8, rollback="replay") == acc.kda_state_bytes(K3, 8, 1, q_len=2)
    assert round(acc.mla_cache_bytes(K3, 128 * 1024) / 1e6, 1) == 75.5
    assert acc.mla_cache_bytes(K3, 1, fp8=False) == 1152


def test_flops_follow_from_the_shapes() -> None:
    # one row through every matrix: two flops a value, over all ranks
    assert acc.dense_flops(K3, 1, 1) == 2 * 726_663_168
    assert acc.moe_flops(K3, 1, 1) == 2 * (189_926_912 - 3584 + 16 * 33_030_144)
    recurrence = 7 * 96 * 128 * 128
    assert acc.kda_flops(K3, 1, 3) == 3 * (2 * 443_580_416 + recurrence + 2 * 4 * 3 * 12288)
    assert acc.mla_flops(K3, 1, 1, context=10) == 2 * (232_196_096 - 2048) + 10 * 96 * 2 * (576 + 512)
    replicated = 2 * 8 * 128 * 7168  # f_a is computed whole on every rank
    assert 16 * (acc.kda_flops(K3, 16, 8) - replicated) == acc.kda_flops(K3, 1, 8) - replicated


def test_a_floor_names_its_bandwidth() -> None:
    assert acc.floor_us(8e12, gpu_card("gb300")) == pytest.approx(1e6)
    assert acc.floor_us(4.67e6, gpu_card("h200")) == pytest.approx(1.0)


def test_distinct_experts_can_be_given() -> None:
    one = acc.layer_bytes(K3, 16, 8, "kda", distinct=1).mlp
    assert acc.layer_bytes(K3, 16, 8, "kda", distinct=11).mlp - one == pytest.approx(10 * 17_547_264 / 16)


def test_small_model_divides_as_the_large_one() -> None:
    for tp in (1, 2, 4, 8, 16):
        assert acc.layer_bytes(SMALL_K3, tp, 8, "kda").total > acc.layer_bytes(SMALL_K3, tp, 1, "kda").total


def test_bad_calls() -> None:
    with pytest.raises(InputError, match="TP 7 does not divide"):
        acc.layer_bytes(K3, 7, 8, "kda")
    with pytest.raises(InputError, match="rows 9 are no multiple of q_len 8"):
        acc.layer_bytes(K3, 8, 9, "kda", q_len=8)
    with pytest.raises(InputError, match="rows is -1"):
        acc.expected_distinct_experts(K3, -1)
    with pytest.raises(InputError, match="TP 5 does not divide"):
        shapes.kda_weights(K3)[0].of_rank(5)
