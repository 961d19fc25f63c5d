"""Shared arithmetic: rounding points, eps, bounds, and E4M3 rounding against torch's own cast."""

from __future__ import annotations

import math

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.numerics import E4M3_MAX, compute_dtype, linear, rms_norm, round_e4m3, situ

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_compute_dtype_is_fp32_until_one_operand_is_fp64() -> None:
    assert compute_dtype(torch.zeros(1, dtype=BF16), torch.zeros(1, dtype=torch.uint8)) == F32
    assert compute_dtype(torch.zeros(1, dtype=BF16), torch.zeros(1, dtype=F64)) == F64


def test_linear_accumulates_in_fp32_and_rounds_once() -> None:
    # 256 + 1 + ... + 1: a BF16 accumulator never leaves 256
    x = torch.tensor([[256.0] + [1.0] * 16], dtype=BF16)
    assert linear(x, torch.ones(1, 17, dtype=BF16)).item() == 272
    torch.manual_seed(0)
    x, w = torch.randn(5, 96, dtype=F64), torch.randn(7, 96, dtype=F64)
    out = linear(x.to(BF16), w.to(BF16))
    assert out.dtype == BF16
    exact = x.to(BF16).to(F64) @ w.to(BF16).to(F64).T
    assert ((out.to(F64) - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    assert torch.equal(linear(x, w), x @ w.T)


def test_linear_refuses_other_widths() -> None:
    with pytest.raises(InputError, match="x has 3 columns, the weight reduces over 4"):
        linear(torch.zeros(1, 3), torch.zeros(2, 4))


def test_rms_norm_follows_its_formula_element_by_element() -> None:
    x, w, eps = [3.0, -4.0, 0.5], [2.0, 0.25, -1.0], 0.37
    scale = 1 / math.sqrt(sum(v * v for v in x) / 3 + eps)
    expected = torch.tensor([v * scale * g for v, g in zip(x, w, strict=True)], dtype=F64)
    for single in (False, True):
        got = rms_norm(torch.tensor(x, dtype=F64), torch.tensor(w, dtype=F64), eps, single)
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


def test_plain_rms_norm_has_the_bits_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(1)
    x, w = (torch.randn(9, 320) * 0.01).to(BF16), (1 + 0.2 * torch.randn(320)).to(BF16)
    oracle = modeling.KimiLinearRMSNorm(320, eps=1e-5)
    oracle.weight.data = w
    assert torch.equal(rms_norm(x, w, 1e-5), oracle(x).detach())


def test_single_rounding_is_nearer_the_exact_norm_than_the_plain_one() -> None:
    torch.manual_seed(2)
    x, w = torch.randn(64, 128).to(BF16), (1 + 0.3 * torch.randn(128)).to(BF16)
    exact = rms_norm(x.to(F64), w.to(F64), 1e-5)
    assert torch.equal(rms_norm(x, w, 1e-5, single_rounding=True), exact.to(BF16))
    assert not torch.equal(rms_norm(x, w, 1e-5), exact.to(BF16))


def test_situ_follows_its_formula_and_bounds() -> None:
    for g, u in ((0.7, -1.3), (-3.0, 8.0), (11.0, 60.0), (0.0, 5.0)):
        sigmoid = 1 / (1 + math.exp(-g))
        expected = 4 * math.tanh(g / 4) * sigmoid * 25 * math.tanh(u / 25)
        got = situ(torch.tensor([g], dtype=F64), torch.tensor([u], dtype=F64), 4.0, 25.0).item()
        assert got == pytest.approx(expected, rel=1e-13, abs=1e-300)
    far = torch.tensor([-1e4, -30.0, 30.0, 1e4], dtype=F64)
    values = situ(far[:, None].expand(4, 4), far.expand(4, 4), 4.0, 25.0)
    assert values.abs().max() <= 100
    assert values[3, 3].item() == pytest.approx(100, rel=1e-12)  # both caps reached
    assert values[0].abs().max() < 1e-12  # a closed gate


def test_situ_rounds_once() -> None:
    torch.manual_seed(3)
    g, u = (torch.randn(512) * 3).to(BF16), (torch.randn(512) * 3).to(BF16)
    exact = situ(g.to(F64), u.to(F64), 4.0, 25.0)
    assert torch.equal(situ(g, u, 4.0, 25.0), exact.to(BF16))


def test_round_e4m3_agrees_with_torch_on_every_code_and_between_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].unique()
    assert torch.equal(round_e4m3(codes), codes)
    middles = (codes[1:] + codes[:-1]) / 2  # ties
    near = torch.cat([middles, middles * 1.001, middles * 0.999])
    assert torch.equal(round_e4m3(near), near.to(torch.float8_e4m3fn).float())


def test_round_e4m3_saturates_and_keeps_nan() -> None:
    got = round_e4m3(torch.tensor([1e9, -464.5, math.inf, -math.inf, math.nan]))
    assert got[:4].tolist() == [E4M3_MAX, -E4M3_MAX, E4M3_MAX, -E4M3_MAX]
    assert got[4].isnan()


def test_round_e4m3_does_not_round_fp64_twice() -> None:
    # just above the tie between 1 and 1.125: FP32 would land on the tie and go to even, down
    assert round_e4m3(torch.tensor([1.0625 + 1e-12], dtype=F64)).item() == 1.125
    assert round_e4m3(torch.tensor([1.0625], dtype=F64)).item() == 1.0
