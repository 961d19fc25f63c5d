"""AttnRes' CuTe DSL kernel as the compiler made it, run on the CPU: the twin's rows, whatever the shape of the cluster."""

from __future__ import annotations

import pytest
import torch

from .attn_res_case import problem, run, spread

BEFORE = {"ld.global.L1_no_allocate.v4.u32", "ld.global.L1_no_allocate.u32"}


@pytest.mark.parametrize(
    ("rows", "live", "saved", "change"),
    [
        (1, 1, 8, {"cluster": 8, "warps": 7, "depth": 1}),
        (3, 2, 5, {"cluster": 8, "warps": 7, "depth": 1}),
        (2, 2, 1, {"cluster": 4, "warps": 7, "depth": 1}),
        (2, 1, 8, {"cluster": 2, "warps": 7, "depth": 2}),
        (2, 2, 7, {"cluster": 1, "warps": 14, "depth": 4}),
        (1, 1, 8, {"cluster": 1, "warps": 28, "depth": 2}),
    ],
)
def test_rows_are_the_twins(monkeypatch, rows, live, saved, change):
    done = run(problem(rows, hidden=1792), monkeypatch, live=live, saved=saved, **change)
    done.check()
    assert set(done.machine.before_wait) == BEFORE


def test_a_whole_row_of_the_model_by_the_default_config(monkeypatch):
    run(problem(1), monkeypatch).check()


@pytest.mark.parametrize("kind", ["first", "final"])
def test_the_first_and_the_final_mix(monkeypatch, kind):
    for cluster, warps in ((8, 7), (1, 28)):
        depth = 1 if cluster == 8 else 2
        done = run(problem(3, kind, hidden=1792), monkeypatch, live=2, cluster=cluster, warps=warps, depth=depth)
        done.check()


def test_a_final_mix_is_rounded_before_the_norm_and_before_the_weight(monkeypatch):
    """Nearly all bits are those of the official code's rounding points, which the single rounding has not."""
    from k3lab.kernels.attn_res.twin import attn_res_norm

    one = problem(2, "final", hidden=1792)
    inputs = spread(one, 3)
    done = run(one, monkeypatch, inputs=inputs, cluster=8, warps=7, depth=1)
    args = (list(inputs["blocks"]), inputs["prefix"], inputs["res_norm"], inputs["res_proj"], inputs["norm_w"], one.eps)
    rounded, once = (attn_res_norm(*args, single_rounding=single) for single in (False, True))
    assert float((done.out == rounded).float().mean()) > 0.98 > 0.9 > float((done.out == once).float().mean())


def test_fewer_sources_than_the_mma_has_rows_for(monkeypatch):
    run(problem(2, hidden=1792, blocks=3), monkeypatch, cluster=8, warps=7, depth=1).check()


def test_equal_sources_give_themselves(monkeypatch):
    """Each weight is one ninth, whatever the scores; the mix's square is one source's."""
    one = problem(1, hidden=1792)
    inputs = spread(one, 5)
    inputs["blocks"][:] = inputs["prefix"]
    run(one, monkeypatch, inputs=inputs, cluster=8, warps=7, depth=1).check()


def test_opposite_sources_of_equal_weight_cancel_without_a_nan(monkeypatch):
    one = problem(1, hidden=1792, blocks=1)
    inputs = spread(one, 6)
    inputs["res_proj"][:] = 0.0  # all scores are zero
    inputs["prefix"] = torch.randn(1, 1792, generator=torch.Generator().manual_seed(1)).mul(300).to(torch.bfloat16)
    inputs["blocks"][0] = -inputs["prefix"]
    done = run(one, monkeypatch, inputs=inputs, cluster=8, warps=7, depth=1)
    # what is left of products of 150 in FP32, over the root of eps; the twin's two products round to the same
    assert float(done.out.abs().max()) < 150 * 4 * 2**-24 / one.eps**0.5


def test_a_square_that_rounding_takes_below_zero_is_none(monkeypatch):
    """Three sources of equal weight that sum to zero in every column: what is left of the square has either sign."""
    one = problem(6, hidden=1792, blocks=2)
    inputs = spread(one, 8)
    inputs["res_proj"][:] = 0.0
    two = torch.randint(-127, 128, (2, 6, 1792), generator=torch.Generator().manual_seed(2))
    inputs["blocks"], inputs["prefix"] = two.to(torch.bfloat16), -two.sum(0).to(torch.bfloat16)
    done = run(one, monkeypatch, inputs=inputs, cluster=8, warps=7, depth=1)
    assert not bool(done.out.isnan().any())


def test_a_source_that_is_nan_spoils_its_row_alone(monkeypatch):
    one = problem(3, hidden=1792)
    inputs = spread(one, 7)
    inputs["blocks"][4, 1, 1000] = float("nan")
    done = run(one, monkeypatch, inputs=inputs, cluster=8, warps=7, depth=1)
    assert bool(done.out[1].isnan().all())
    assert not bool(done.out[[0, 2]].isnan().any())
