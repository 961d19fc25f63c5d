"""Experts: against a loop over tokens, transformers' experts, and by hand at the rounding points."""

from __future__ import annotations

import types

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.experts import twin
from k3lab.kernels.experts.twin import ExpertWeights, routed, shared
from k3lab.kernels.mxfp4 import dequantize, quantize, quantize_mxfp8

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EXPERTS, LATENT, INNER, ROWS, TOP_K = 6, 64, 512, 7, 3
SITU = {"beta": 4.0, "linear_beta": 25.0}


def _experts(latent: int = LATENT, inner: int = INNER, seed: int = 0) -> ExpertWeights:
    torch.manual_seed(seed)
    w1, w3 = (quantize(torch.randn(EXPERTS, inner, latent) * 0.3) for _ in range(2))
    return ExpertWeights(*w1, *w3, *quantize(torch.randn(EXPERTS, latent, inner) * 0.1))


def _tokens(dtype: torch.dtype = F64, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    ids = torch.rand(ROWS, EXPERTS - 1).topk(TOP_K).indices  # expert 5 is never chosen
    return torch.randn(ROWS, LATENT, dtype=F64).to(dtype), ids, torch.rand(ROWS, TOP_K, dtype=F64)


def _situ(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)


def _wide(experts: ExpertWeights) -> list[torch.Tensor]:
    pairs = ((experts.w1, experts.w1_scale), (experts.w3, experts.w3_scale), (experts.w2, experts.w2_scale))
    return [dequantize(*pair, F64) for pair in pairs]


@pytest.mark.parametrize("activations", ["bf16", "mxfp8_floor", "mxfp8_ceil", "mxfp8_ceil_floor"])
def test_routed_equals_a_loop_over_tokens_and_slots(activations: str) -> None:
    experts, (latent, ids, weights) = _experts(), _tokens()
    latent = latent * 2  # many groups with a mantissa past 1.75, where floor and ceil differ
    first, second = {
        "bf16": (None, None), "mxfp8_floor": ("floor", "floor"), "mxfp8_ceil": ("ceil", "ceil"),
        "mxfp8_ceil_floor": ("ceil", "floor"),
    }[activations]  # fmt: skip
    w1, w3, w2 = _wide(experts)
    z = latent if first is None else quantize_mxfp8(latent, first)
    expected = torch.zeros_like(latent)
    for row in range(ROWS):
        for slot in range(TOP_K):
            e = ids[row, slot]
            hidden = _situ(w1[e] @ z[row], w3[e] @ z[row])
            hidden = hidden if second is None else quantize_mxfp8(hidden, second)
            expected[row] += weights[row, slot] * (w2[e] @ hidden)
    got = routed(latent, ids, weights, experts, activations=activations, **SITU)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_the_activation_modes_all_differ() -> None:
    experts, (latent, ids, weights) = _experts(), _tokens()
    outs = {mode: routed(latent, ids, weights, experts, activations=mode, **SITU) for mode in twin.ROUNDINGS}
    assert torch.equal(outs["bf16"], routed(latent, ids.int(), weights, experts, **SITU))
    names = list(outs)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            difference = ((outs[first] - outs[second]).norm() / outs[first].norm()).item()
            assert 1e-4 < difference < 0.1, (first, second)


def test_agrees_with_transformers_experts_where_situ_is_silu() -> None:
    """With huge betas SiTU is silu(gate) * up, which its module computes."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = types.SimpleNamespace(
        num_local_experts=EXPERTS, hidden_size=LATENT, moe_intermediate_size=INNER, hidden_act="silu",
        intermediate_size=INNER, _experts_implementation="eager",
    )  # fmt: skip
    experts, (latent, ids, weights) = _experts(), _tokens()
    w1, w3, w2 = _wide(experts)
    module = modeling.KimiLinearExperts(config).double()
    module.gate_up_proj.data, module.down_proj.data = torch.cat([w1, w3], dim=1), w2
    with torch.no_grad():
        expected = module(latent, ids, weights)
    got = routed(latent, ids, weights, experts, beta=1e7, linear_beta=1e7)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
    mlp = modeling.KimiLinearMLP(config).double()
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data, mlp.down_proj.weight.data = w1[0], w3[0], w2[0]
    with torch.no_grad():
        expected = mlp(latent)
    torch.testing.assert_close(
        shared(latent, w1[0], w3[0], w2[0], beta=1e7, linear_beta=1e7), expected, rtol=1e-8, atol=1e-8
    )


def test_every_distinct_expert_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, (latent, ids, weights) = _experts(), _tokens()
    reads = []
    monkeypatch.setattr(twin, "dequantize", lambda *args: reads.append(args[0].data_ptr()) or dequantize(*args))
    routed(latent, ids, weights, experts, **SITU)
    assert len(reads) == len(set(reads)) == 3 * len(ids.unique())
    assert experts.w1[EXPERTS - 1].data_ptr() not in reads


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sharded_routed_experts_equal_unsharded(size: int) -> None:
    experts, (latent, ids, weights) = _experts(), _tokens()
    whole = routed(latent, ids, weights, experts, **SITU)

    def body(comm):
        def rows(t: torch.Tensor) -> torch.Tensor:
            return t.chunk(size, dim=1)[comm.rank]

        def columns(t: torch.Tensor) -> torch.Tensor:
            return t.chunk(size, dim=2)[comm.rank]

        mine = ExpertWeights(
            rows(experts.w1), rows(experts.w1_scale), rows(experts.w3), rows(experts.w3_scale),
            columns(experts.w2), columns(experts.w2_scale),
        )  # fmt: skip
        return comm.all_reduce(routed(latent, ids, weights, mine, **SITU))

    for total in run_virtual_ranks(size, body):
        torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_sharded_shared_expert_equals_unsharded(size: int) -> None:
    torch.manual_seed(2)
    x, gate, up, down = (torch.randn(s, dtype=F64) for s in ((5, 24), (32, 24), (32, 24), (24, 32)))
    whole = _situ(x @ gate.T, x @ up.T) @ down.T

    def body(comm):
        g, u, d = (t.chunk(size, dim)[comm.rank] for t, dim in ((gate, 0), (up, 0), (down, 1)))
        return comm.all_reduce(shared(x, g, u, d, **SITU))

    for total in run_virtual_ranks(size, body):
        torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-9)


def test_expert_outputs_are_rounded_before_they_are_weighted_and_summed() -> None:
    experts, (latent, ids, weights) = _experts(), _tokens(BF16)
    weights = weights.to(F32)
    w1, w3, w2 = (w.to(F32) for w in _wide(experts))
    z = latent.to(F32)
    expected = torch.zeros(ROWS, LATENT)
    for slot in range(TOP_K):
        for row in range(ROWS):
            e = ids[row, slot]
            hidden = _situ(w1[e] @ z[row], w3[e] @ z[row]).to(BF16).to(F32)
            expected[row] += weights[row, slot] * (w2[e] @ hidden).to(BF16).to(F32)
    got = routed(latent, ids, weights, experts, **SITU)
    assert got.dtype == BF16
    same = (got == expected.to(BF16)).double().mean().item()
    assert same > 0.98  # all but sums that fall on the other side of a tie in another order
    exact = routed(latent.to(F64), ids, weights.to(F64), experts, **SITU)
    assert (got == exact.to(BF16)).double().mean().item() < 0.9


def test_unfused_rounding_is_the_coarser_one() -> None:
    experts, (latent, ids, weights) = _experts(), _tokens(BF16)
    exact = routed(latent.to(F64), ids, weights, experts, **SITU)
    error = {}
    for fused in (True, False):
        out = routed(latent, ids, weights.to(F32), experts, fused_rounding=fused, **SITU)
        error[fused] = ((out.to(F64) - exact).norm() / exact.norm()).item()
    assert error[True] < error[False] < 4 * 2**-9


def test_shared_expert_rounds_gate_up_hidden_and_output() -> None:
    torch.manual_seed(3)
    x, gate, up, down = (torch.randn(s).to(BF16) for s in ((16, 48), (64, 48), (64, 48), (48, 64)))
    g, u = ((x.to(F32) @ w.to(F32).T).to(BF16).to(F32) for w in (gate, up))
    expected = (_situ(g, u).to(BF16).to(F32) @ down.to(F32).T).to(BF16)
    got = shared(x, gate, up, down, **SITU)
    assert (got == expected).double().mean().item() > 0.98
    once = (_situ(x.double() @ gate.double().T, x.double() @ up.double().T) @ down.double().T).to(BF16)
    assert (got == once).double().mean().item() < 0.9


def test_bad_calls_are_refused() -> None:
    experts, (latent, ids, weights) = _experts(), _tokens()
    with pytest.raises(InputError, match="unknown activation mode 'fp8'"):
        routed(latent, ids, weights, experts, activations="fp8", **SITU)
    for wrong in (-1, EXPERTS):
        ids[0, 0] = wrong
        with pytest.raises(InputError, match=r"expert ids must lie in 0\.\.5"):
            routed(latent, ids, weights, experts, **SITU)
