"""The TMA engines of the attention projection on a GPU: the twin's results, any row count, one order of summation."""

from __future__ import annotations

import dataclasses
import random

import pytest
from k3lab.kernels import K3, family

pytestmark = pytest.mark.gpu
FAMILY = family("attention_projection")


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


@pytest.mark.parametrize("split", [1, 2, 3, 4])
@pytest.mark.parametrize("multicast", [1, 2, 4])
@pytest.mark.parametrize("reduce", ["pull", "push"])
@pytest.mark.parametrize("producers", [1, 2])
def test_every_cluster_equals_the_twin(device, engine, split, multicast, reduce, producers):
    from k3lab.tuning.check import check

    problem, card = FAMILY.problem(K3, tp=16, rows=24), device.need_card()
    pins = {"split": split, "multicast": multicast, "reduce": reduce, "producers": producers}
    configs = picked(engine, problem, card, 3, split, **pins)
    assert bool(configs) == (split * multicast <= 8)
    for seed, config in enumerate(configs):
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


def twins_but_for(space, change):
    """Pairs of legal configs of which the second has the changed values."""
    legal = {tuple(sorted(c.items())) for c in space.legal}
    pairs = [
        (dict(c), {**c, **change})
        for c in space.legal
        if c["k_start"] == "first" and any(c[name] != change[name] for name in change)
    ]
    return [pair for pair in pairs if tuple(sorted(pair[1].items())) in legal]


@pytest.mark.parametrize("change", [{"reduce": "push"}, {"producers": 2}, {"multicast": 2}], ids=str)
@pytest.mark.parametrize("rows", [9, 64])
def test_how_data_travels_leaves_the_bits_alone(device, engine, change, rows):
    import torch

    problem = FAMILY.problem(K3, tp=16, rows=rows)
    inputs = FAMILY.inputs(problem, 4, "cuda")
    pairs = twins_but_for(engine.space(problem, device.need_card()), change)
    for pair in random.Random(rows).sample(pairs, 6):
        first, second = (run(engine, problem, config, device.arch, inputs, rows) for config in pair)
        assert torch.equal(first, second), pair


def test_launches_behind_each_other_meet_no_leftovers(device, engine):
    """Barriers, pushed sums and multicast copies of one launch end with it: a hundred in a row, the same bits."""
    import torch
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config

    problem = FAMILY.problem(K3, tp=16, rows=64)
    inputs = FAMILY.inputs(problem, 6, "cuda")
    config = picked(engine, problem, device.need_card(), 1, 8, multicast=2, split=2, reduce="push", producers=2)[0]
    runner = Runner(compile_config(engine, problem, config, device.arch))
    outs = [torch.full((64, problem.outputs), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(100)]
    for out in outs:
        runner.bind({**inputs, "out": out})()
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs) and bool(outs[0].isfinite().all())


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
