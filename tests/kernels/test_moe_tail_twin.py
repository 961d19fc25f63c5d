"""MoE tail: sharded equals the unsharded formula, and the rounding points."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels.attn_res.twin import attn_res, attn_res_norm
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.moe_tail.twin import moe_tail
from k3lab.kernels.numerics import rms_norm

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
ROWS, H, LATENT, EPS = 5, 32, 24, 1e-2


def _case(size: int, dtype: torch.dtype = F64) -> tuple[list[torch.Tensor], list[torch.Tensor], dict]:
    """Each rank's partial latents and shared outputs, and the rest."""
    torch.manual_seed(size)
    latents, shareds = (
        [(torch.randn(ROWS, width, dtype=F64) * 0.3).to(dtype) for _ in range(size)] for width in (LATENT, H)
    )
    rest = {
        "latent_norm": torch.randn(LATENT, dtype=F64), "w_up": torch.randn(H, LATENT, dtype=F64) * 0.2,
        "prefix": torch.randn(ROWS, H, dtype=F64), "res_norm": torch.randn(H, dtype=F64),
        "res_proj": torch.randn(1, H, dtype=F64), "norm_w": torch.randn(H, dtype=F64),
    }  # fmt: skip
    rest = {name: tensor.to(dtype) for name, tensor in rest.items()}
    return latents, shareds, {**rest, "blocks": [torch.randn(ROWS, H, dtype=F64).to(dtype) for _ in range(2)]}


def _run(size: int, latents, shareds, rest, **options):
    def body(comm):
        mine = {**rest, "w_up": rest["w_up"].chunk(size)[comm.rank]}
        return moe_tail(latents[comm.rank], shareds[comm.rank], **mine, eps=EPS, comm=comm, **options)

    return run_virtual_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_sharded_equals_the_unsharded_formula(size: int) -> None:
    latents, shareds, rest = _case(size)
    latent = torch.stack(latents).sum(0)
    latent = latent / (latent.square().mean(-1, keepdim=True) + EPS).sqrt() * rest["latent_norm"]
    prefix = rest["prefix"] + latent @ rest["w_up"].T + torch.stack(shareds).sum(0)
    mix = attn_res(rest["blocks"], prefix, rest["res_norm"], rest["res_proj"], EPS)
    following = mix / (mix.square().mean(-1, keepdim=True) + EPS).sqrt() * rest["norm_w"]
    for got_prefix, got_next in _run(size, latents, shareds, rest):
        torch.testing.assert_close(got_prefix, prefix, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got_next, following, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("single_rounding", [True, False])
def test_rounding_points(single_rounding: bool) -> None:
    size = 4
    latents, shareds, rest = _case(size, BF16)

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return (parts[0].to(F32) + parts[1].to(F32) + parts[2].to(F32) + parts[3].to(F32)).to(BF16)

    latent = rms_norm(total(latents), rest["latent_norm"], EPS, single_rounding)
    up = (latent.to(F32) @ rest["w_up"].to(F32).T).to(BF16)
    delta = (up.to(F32) + total(shareds).to(F32)).to(BF16)
    prefix = (rest["prefix"].to(F32) + delta.to(F32)).to(BF16)
    args = (rest["blocks"], prefix, rest["res_norm"], rest["res_proj"], rest["norm_w"], EPS)
    for got_prefix, got_next in _run(size, latents, shareds, rest, single_rounding=single_rounding):
        assert got_prefix.dtype == BF16
        assert (got_prefix == prefix).double().mean() > 0.98  # the up-projection's sums may round at a tie
        assert (got_next == attn_res_norm(*args, single_rounding=single_rounding)).double().mean() > 0.95
