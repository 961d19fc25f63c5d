"""What a check on one GPU expects of kernels over loopback: the formula written out, slot by slot."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels import family
from k3lab.kernels.attn_res.twin import attn_res_norm
from k3lab.kernels.collectives import LoopbackGroup, SingleRank, TwoShot, run_virtual_ranks
from k3lab.kernels.output_projection import OutputProjection
from k3lab.kernels.transports import Loopback, loopback_factors

FAMILY = family("output_projection")


def problem(tp: int, kind: str = "kda") -> OutputProjection:
    return OutputProjection(tp=tp, rows=3, kind=kind, width=32, hidden=112, blocks=2, eps=1e-5)


def outputs(problem: OutputProjection, inputs: dict, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    t = {name: tensor.double() for name, tensor in inputs.items()}
    prefix = total if problem.kind == "restart" else t["prefix"] + total
    norm = attn_res_norm(list(t["blocks"]), prefix, t["res_norm"], t["res_proj"], t["norm_w"], problem.eps)
    return prefix, norm


@pytest.mark.parametrize("kind", ["kda", "mla", "restart"])
@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_slot_r_holds_a_power_of_two_times_the_partial(tp: int, kind: str) -> None:
    one = problem(tp, kind)
    inputs = FAMILY.inputs(one, 3)
    partial = inputs["x"].double() @ inputs["w_o"].double().T
    total = sum(partial * 2.0 ** (slot - tp // 2) for slot in range(tp))
    got = FAMILY.expected(one, {}, inputs)
    for name, wanted in zip(FAMILY.outputs, outputs(one, inputs, total), strict=True):
        torch.testing.assert_close(got[name].double(), wanted, rtol=1e-5, atol=1e-5)
    assert Loopback(tp).factors == loopback_factors(tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_two_shot_adds_what_goes_to_each_owner_and_sends_that_to_all(tp: int) -> None:
    one = problem(tp)
    inputs = FAMILY.inputs(one, 4)
    factors = loopback_factors(tp)
    sent = (inputs["x"].double() @ inputs["w_o"].double().T).chunk(tp, dim=1)
    own = sum(columns * factor for columns, factor in zip(sent, factors, strict=True))
    total = torch.cat([own * factor for factor in factors], dim=1)
    got = FAMILY.expected(one, {"exchange": "two_shot"}, inputs)
    for name, wanted in zip(FAMILY.outputs, outputs(one, inputs, total), strict=True):
        torch.testing.assert_close(got[name].double(), wanted, rtol=1e-5, atol=1e-5)


def test_with_one_slot_alone_the_sum_is_that_slots_partial() -> None:
    one = problem(4)
    inputs = FAMILY.inputs(one, 5)
    twin = FAMILY.twin(one, inputs)
    for slot in range(4):
        got = FAMILY.expected(one, {"exchange": "one_shot"}, inputs, Loopback.only(4, slot).factors)
        assert all(torch.equal(got[name], twin[name]) for name in twin)


def test_the_sum_goes_up_the_slots_in_fp32_and_is_rounded_once() -> None:
    x = torch.tensor([[1.0]], dtype=torch.bfloat16)
    assert LoopbackGroup((2.0**26, -(2.0**26), 1.0)).all_reduce(x).item() == 1.0
    assert LoopbackGroup((1.0, 2.0**26, -(2.0**26))).all_reduce(x).item() == 0.0  # in FP32 the one is lost
    assert LoopbackGroup((256.0, 1.0, 1.0)).all_reduce(x).item() == 258.0  # BF16 sums would stay at 256


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_two_shots_have_the_bits_of_one_in_a_real_group(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = torch.randn(size, 3, 8, dtype=torch.float64).to(dtype)

    def body(comm):
        return comm.all_reduce(parts[comm.rank]), TwoShot(comm).all_reduce(parts[comm.rank])

    for one, two in run_virtual_ranks(size, body):
        assert torch.equal(one, two)
    assert torch.equal(TwoShot(SingleRank()).all_reduce(parts[0]), parts[0])
