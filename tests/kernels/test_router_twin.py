"""Router: sharded front, and the choice against transformers' router, with ties and NaN."""

from __future__ import annotations

import types

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import SingleRank, run_virtual_ranks
from k3lab.kernels.router.twin import front, route

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EXPERTS, LATENT, H = 32, 48, 40


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sharded_front_equals_unsharded(size: int) -> None:
    torch.manual_seed(0)
    x, w_router, w_down = (torch.randn(rows, H, dtype=F64) for rows in (5, EXPERTS, LATENT))
    logits, latent = x @ w_router.T, x @ w_down.T

    def body(comm):
        return front(x, w_router.chunk(size)[comm.rank], w_down.chunk(size)[comm.rank], comm)

    for got_logits, got_latent in run_virtual_ranks(size, body):
        torch.testing.assert_close(got_logits, logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got_latent, latent, rtol=1e-9, atol=1e-9)


def test_logits_stay_fp32_and_the_latent_is_rounded() -> None:
    torch.manual_seed(1)
    x, w_router, w_down = (torch.randn(rows, H).to(BF16) for rows in (5, EXPERTS, LATENT))
    logits, latent = front(x, w_router, w_down, SingleRank())
    assert (logits.dtype, latent.dtype) == (F32, BF16)
    torch.testing.assert_close(logits, (x.to(F64) @ w_router.to(F64).T).to(F32), rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, logits.to(BF16).to(F32))


@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_choice_and_weights_agree_with_transformers(scaling: float) -> None:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = types.SimpleNamespace(
        num_experts_per_tok=6, num_local_experts=EXPERTS, hidden_size=H, routed_scaling_factor=scaling,
        n_group=1, topk_group=1, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(2)
    oracle = modeling.KimiLinearTopkRouter(config)
    oracle.weight.data = torch.randn(EXPERTS, H) * 0.3
    oracle.e_score_correction_bias = torch.randn(EXPERTS) * 0.5  # large: it must change the choice, not the weights
    x = torch.randn(20, H)
    with torch.no_grad():
        logits, expected_weights, expected_ids = oracle(x)
    ids, weights = route(logits, oracle.e_score_correction_bias, 6, scaling)
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    got, wanted = weights.gather(1, order), expected_weights.gather(1, expected_order)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def test_weights_come_from_the_unbiased_scores() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=F64)
    bias = torch.tensor([0.0, 0.0, 5.0, 6.0], dtype=F64)
    ids, weights = route(logits, bias, 2, 1.5)
    assert ids.tolist() == [[3, 2]]  # by the biased score, descending
    low, mid = (1 / (1 + torch.exp(torch.tensor(v, dtype=F64))) for v in (1.0, 0.0))
    torch.testing.assert_close(weights, 1.5 * torch.stack([low, mid])[None] / (low + mid), rtol=1e-12, atol=0)
    assert weights.sum().item() == pytest.approx(1.5)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(3, 896)
    logits[1, 500] = 1.0
    logits[2, 100:] = 0.5
    ids, weights = route(logits, torch.zeros(896), 16, 1.0)
    assert ids[0].tolist() == list(range(16))
    assert ids[1].tolist() == [500, *range(15)]
    assert ids[2].tolist() == list(range(100, 116))
    torch.testing.assert_close(weights[0], torch.full((16,), 1 / 16))
    # a tie across the last chosen place, between a high score and a high bias
    ids, _ = route(torch.zeros(1, 4, dtype=F64), torch.tensor([0.0, 0.25, 0.0, 0.25], dtype=F64), 3, 1.0)
    assert ids.tolist() == [[1, 3, 0]]


def test_nan_ranks_last_and_is_not_hidden() -> None:
    nan = float("nan")
    logits = torch.tensor([[nan, 1.0, nan, 2.0], [nan, nan, 0.0, nan], [nan] * 4, [-torch.inf, nan, 1.0, 2.0]])
    ids, weights = route(logits, torch.zeros(4), 2, 1.0)
    assert ids.tolist() == [[3, 1], [2, 0], [0, 1], [3, 2]]
    assert not weights[0].isnan().any()
    assert weights[1].isnan().any()
    assert weights[2].isnan().all()
    assert not weights[3].isnan().any()
    ids, _ = route(torch.zeros(1, 3), torch.tensor([0.0, nan, 0.0]), 2, 1.0)  # a NaN bias disqualifies too
    assert ids.tolist() == [[0, 2]]


def test_vanishing_scores_do_not_divide_by_zero() -> None:
    ids, weights = route(torch.full((1, 8), -1e4), torch.zeros(8), 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights.tolist() == [[0.0] * 4]
    # sigmoid(-46) is about 1e-20: the 1e-20 of the denominator halves the weight
    _, weights = route(torch.tensor([[-46.0517018598809]], dtype=F64), torch.zeros(1, dtype=F64), 1, 1.0)
    assert weights.item() == pytest.approx(0.5, rel=1e-9)


def test_weights_can_be_rounded_to_bf16_values() -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, EXPERTS)
    _, weights = route(logits, torch.zeros(EXPERTS), 4, 1.0)
    _, rounded = route(logits, torch.zeros(EXPERTS), 4, 1.0, bfloat16_weights=True)
    assert rounded.dtype == F32
    assert torch.equal(rounded, weights.to(BF16).to(F32))
    assert not torch.equal(rounded, weights)


@pytest.mark.parametrize("top_k", [0, 9])
def test_impossible_counts_are_refused(top_k: int) -> None:
    with pytest.raises(InputError, match="of 8 experts"):
        route(torch.zeros(1, 8), torch.zeros(8), top_k, 1.0)
