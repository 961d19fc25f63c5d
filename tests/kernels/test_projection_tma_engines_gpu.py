"""The TMA engines of the attention projection on a GPU: the twin's results, any row count, one order of summation."""

from __future__ import annotations

import dataclasses
import random

import pytest
from k3lab.kernels import K3, family
from k3lab.kernels.device import discover

pytestmark = pytest.mark.gpu
FAMILY = family("attention_projection")


@pytest.fixture(scope="module")
def device():
    found = discover()
    if found is None:
        pytest.skip("no GPU here")
    return found


@pytest.fixture(scope="module")
def engine(device):
    for name in ("cute_wgmma", "cute_tcgen05"):
        if device.arch in FAMILY.engine(name).archs:
            return FAMILY.engine(name)
    pytest.skip(f"no TMA engine for {device.arch}")


def picked(engine, problem, card, count, seed, **pins):
    """The default if it has the pinned values, and a few others that do."""
    space = engine.space(problem, card)
    legal = [c for c in space.legal if all(c[name] == value for name, value in pins.items())]
    first = [space.default] if all(space.default[name] == value for name, value in pins.items()) else []
    return [dict(c) for c in (*first, *random.Random(seed).sample(legal, min(count, len(legal))))]


@pytest.mark.parametrize("rows", [9, 16, 33, 64])
@pytest.mark.parametrize(("tp", "kind"), [(16, "kda"), (16, "mla"), (8, "kda"), (8, "mla")])
def test_equals_the_twin(device, engine, rows, tp, kind):
    from k3lab.tuning.check import check

    problem = FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)
    for seed, config in enumerate(picked(engine, problem, device.need_card(), 5, rows)):
        result = check(FAMILY, engine, problem, config, seed)
        assert result.how == "gpu"
        assert result.ok, f"{config}: {result.reason}"


@pytest.mark.parametrize("split", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("k_tile", [64, 128])
def test_every_split_equals_the_twin(device, engine, split, k_tile):
    from k3lab.tuning.check import check

    problem = FAMILY.problem(K3, tp=16, rows=24)
    for seed, config in enumerate(picked(engine, problem, device.need_card(), 2, split, split=split, k_tile=k_tile)):
        result = check(FAMILY, engine, problem, config, seed)
        assert result.ok, f"{config}: {result.reason}"


def run(engine, problem, config, arch, inputs, rows):
    """[rows, outputs] of one launch."""
    import torch
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config

    runner = Runner(compile_config(engine, problem, config, arch))
    out = torch.full((rows, problem.outputs), float("nan"), dtype=torch.bfloat16, device="cuda")
    runner.bind({**inputs, "out": out}, rows=rows)()
    torch.cuda.synchronize()
    return out


def test_a_row_keeps_its_bits_whatever_the_row_count(device, engine):
    import torch

    problem = FAMILY.problem(K3, tp=16, rows=64)
    inputs = FAMILY.inputs(problem, 3, "cuda")
    config = dict(engine.space(problem, device.need_card()).default)
    whole = run(engine, problem, config, device.arch, inputs, 64)
    for rows in (1, 8, 33, 63):
        case = {**inputs, "x": inputs["x"][:rows].contiguous()}
        assert torch.equal(run(engine, problem, config, device.arch, case, rows), whole[:rows]), rows


def test_invariant_configs_give_the_same_bits_for_all_rows_outputs_and_tiles(device, engine):
    import torch

    problem = FAMILY.problem(K3, tp=8, rows=64)
    inputs = FAMILY.inputs(problem, 5, "cuda")
    seen = None
    for rows, outputs in ((64, problem.outputs), (16, problem.outputs), (9, 3216), (64, 2880)):
        case = dataclasses.replace(problem, rows=rows, outputs=outputs)
        part = {"x": inputs["x"][:rows].contiguous(), "w": inputs["w"][:outputs].contiguous()}
        for config in picked(engine, case, device.need_card(), 4, rows, k_order="invariant"):
            out = run(engine, case, config, device.arch, part, rows)
            seen = out if seen is None else seen
            assert torch.equal(out, seen[:rows, :outputs]), (rows, outputs, config)


def test_dead_rows_of_x_are_never_read_into_a_result(device, engine):
    """Rows of x beyond the live ones hold NaN: the tensor map ends before them."""
    import torch

    problem = FAMILY.problem(K3, tp=16, rows=16)
    inputs = FAMILY.inputs(problem, 7, "cuda")
    inputs["x"][11:] = float("nan")
    config = dict(engine.space(problem, device.need_card()).default)
    assert bool(run(engine, problem, config, device.arch, inputs, 11).isfinite().all())
    assert not torch.isnan(inputs["w"]).any()
