"""Output projection: sharded equals unsharded, the residual restarts, the rounding points."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels.attn_res.twin import attn_res, attn_res_norm
from k3lab.kernels.collectives import SingleRank, run_virtual_ranks
from k3lab.kernels.output_projection.twin import output_projection

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
ROWS, WIDTH, H, EPS = 5, 64, 32, 1e-2


def _case(dtype: torch.dtype = F64, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    case = {
        "x": torch.randn(ROWS, WIDTH, dtype=F64), "w_o": torch.randn(H, WIDTH, dtype=F64) * 0.2,
        "prefix": torch.randn(ROWS, H, dtype=F64), "res_norm": torch.randn(H, dtype=F64),
        "res_proj": torch.randn(1, H, dtype=F64), "norm_w": torch.randn(H, dtype=F64),
    }  # fmt: skip
    case = {name: tensor.to(dtype) for name, tensor in case.items()}
    return {**case, "blocks": [torch.randn(ROWS, H, dtype=F64).to(dtype) for _ in range(3)]}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("restart", [False, True])
def test_sharded_by_columns_equals_the_formula(size: int, restart: bool) -> None:
    case = _case()
    if restart:
        case["prefix"] = None
    y = case["x"] @ case["w_o"].T
    prefix = y if restart else case["prefix"] + y
    mix = attn_res(case["blocks"], prefix, case["res_norm"], case["res_proj"], EPS)
    mlp_input = mix / (mix.square().mean(-1, keepdim=True) + EPS).sqrt() * case["norm_w"]

    def body(comm):
        mine = {name: case[name].chunk(size, dim=-1)[comm.rank] for name in ("x", "w_o")}
        return output_projection(**{**case, **mine}, eps=EPS, comm=comm)

    for got_prefix, got_input in run_virtual_ranks(size, body):
        torch.testing.assert_close(got_prefix, prefix, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got_input, mlp_input, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("single_rounding", [True, False])
def test_partials_sum_and_residual_are_rounded(single_rounding: bool) -> None:
    case, size = _case(BF16), 4
    parts = [
        (x.to(F32) @ w.to(F32).T).to(BF16).to(F32)
        for x, w in zip(case["x"].chunk(size, -1), case["w_o"].chunk(size, -1), strict=True)
    ]
    total = (parts[0] + parts[1] + parts[2] + parts[3]).to(BF16)
    prefix = (case["prefix"].to(F32) + total.to(F32)).to(BF16)
    args = (case["blocks"], prefix, case["res_norm"], case["res_proj"], case["norm_w"], EPS)

    def body(comm):
        mine = {name: case[name].chunk(size, dim=-1)[comm.rank] for name in ("x", "w_o")}
        return output_projection(**{**case, **mine}, eps=EPS, comm=comm, single_rounding=single_rounding)

    for got_prefix, got_input in run_virtual_ranks(size, body):
        assert torch.equal(got_prefix, prefix)
        assert torch.equal(got_input, attn_res_norm(*args, single_rounding=single_rounding))


def test_no_input_is_changed() -> None:
    case = _case()
    copies = {name: tensor.clone() for name, tensor in case.items() if isinstance(tensor, torch.Tensor)}
    output_projection(**case, eps=EPS, comm=SingleRank())
    assert all(torch.equal(case[name], copy) for name, copy in copies.items())
