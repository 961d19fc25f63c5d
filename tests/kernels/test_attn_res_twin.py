"""AttnRes against its formula in numpy, and its rounding points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from k3lab.kernels.attn_res.twin import attn_res, attn_res_norm
from k3lab.kernels.numerics import rms_norm

BF16, F64 = torch.bfloat16, torch.float64
H, EPS = 24, 1e-2  # a large eps, so that a wrong place for it shows


def _case(
    sources: int, seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    scales = 10.0 ** torch.linspace(-1.5, 1.5, sources, dtype=F64)
    tensors = [torch.randn(5, H, dtype=F64) * scale for scale in scales]
    norm, proj, after = (torch.randn(H, dtype=F64) + 1 for _ in range(3))
    return tensors[:-1], tensors[-1], norm, proj[None], after


def _by_formula(blocks, prefix, norm, proj) -> np.ndarray:
    out = np.zeros(prefix.shape)
    for row in range(prefix.shape[0]):
        values = [source[row].numpy() for source in (*blocks, prefix)]
        scores = []
        for value in values:
            dot = sum(value[d] * norm[d].item() * proj[0, d].item() for d in range(H))
            scores.append(dot / np.sqrt((value**2).mean() + EPS))
        weights = np.exp(np.array(scores) - max(scores))
        weights /= weights.sum()
        out[row] = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return out


@pytest.mark.parametrize("sources", [1, 2, 5, 9])
def test_attn_res_follows_its_formula(sources: int) -> None:
    blocks, prefix, norm, proj, _ = _case(sources)
    expected = _by_formula(blocks, prefix, norm, proj)
    np.testing.assert_allclose(attn_res(blocks, prefix, norm, proj, EPS).numpy(), expected, rtol=1e-11, atol=1e-12)


def test_one_source_returns_the_prefix_bit_for_bit() -> None:
    _, prefix, norm, proj, _ = _case(1)
    assert torch.equal(attn_res([], prefix, norm, proj, EPS), prefix)
    assert torch.equal(attn_res([], prefix.to(BF16), norm.to(BF16), proj.to(BF16), EPS), prefix.to(BF16))


def test_rows_do_not_mix() -> None:
    blocks, prefix, norm, proj, _ = _case(4)
    whole = attn_res(blocks, prefix, norm, proj, EPS)
    for row in range(5):
        alone = attn_res([b[row : row + 1] for b in blocks], prefix[row : row + 1], norm, proj, EPS)
        torch.testing.assert_close(whole[row : row + 1], alone, rtol=1e-12, atol=0)


def test_norm_after_the_mix_uses_its_own_weight() -> None:
    blocks, prefix, norm, proj, after = _case(4)
    mix = torch.tensor(_by_formula(blocks, prefix, norm, proj))
    expected = mix / (mix.square().mean(-1, keepdim=True) + EPS).sqrt() * after
    for single in (True, False):
        got = attn_res_norm(blocks, prefix, norm, proj, after, EPS, single_rounding=single)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_rounding_points() -> None:
    blocks, prefix, norm, proj, after = _case(6, seed=3)
    args = ([b.to(BF16) for b in blocks], prefix.to(BF16), norm.to(BF16), proj.to(BF16))
    exact = attn_res([b.to(F64) for b in args[0]], *(t.to(F64) for t in args[1:]), EPS)
    mix = attn_res(*args, EPS)
    assert mix.dtype == BF16
    assert ((mix.to(F64) - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    twice = attn_res_norm(*args, after.to(BF16), EPS, single_rounding=False)
    once = attn_res_norm(*args, after.to(BF16), EPS, single_rounding=True)
    assert torch.equal(twice, rms_norm(mix, after.to(BF16), EPS))
    target = rms_norm(exact, after.to(BF16).to(F64), EPS)
    assert (once.to(F64) - target).norm() < 0.9 * (twice.to(F64) - target).norm()
    assert ((once.to(F64) - target).abs() <= target.abs() * 2**-8 + 1e-4).all()
