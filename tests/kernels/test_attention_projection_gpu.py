"""Attention projection on a GPU: correctness of every engine, honest timing."""

import dataclasses
import random

import pytest
from k3lab.kernels import K3, family

from .device_stats import record

pytestmark = pytest.mark.gpu
FAMILY = family("attention_projection")


def configs(engine, problem, card, count, seed=0):
    space = engine.space(problem, card)
    legal = list(space.legal)
    return [dict(space.default), *random.Random(seed).sample(legal, min(count, len(legal)))]


@pytest.mark.parametrize("name", ["triton", "cute_skinny"])
@pytest.mark.parametrize("rows", [1, 3, 8, 33, 64])
@pytest.mark.parametrize(("tp", "kind"), [(16, "kda"), (16, "mla"), (8, "kda")])
def test_engine_equals_twin(device, name, rows, tp, kind):
    from k3lab.tuning.check import check

    engine, problem = FAMILY.engine(name), FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)
    if engine.refuses(problem, device.arch):
        assert rows > 8
        return
    for seed, config in enumerate(configs(engine, problem, device.need_card(), 4, seed=rows)):
        result = check(FAMILY, engine, problem, config, seed)
        assert result.how == "gpu"
        assert result.ok, f"{config}: {result.reason}"


@pytest.mark.parametrize("rows", range(1, 9))
def test_skinny_equals_twin_in_every_shape_of_a_block(device, rows):
    """Each value of each parameter at least once, beside the default."""
    from k3lab.tuning.check import check

    engine, card = FAMILY.engine("cute_skinny"), device.need_card()
    problem = FAMILY.problem(K3, tp=16, rows=rows)
    space = engine.space(problem, card)
    legal = list(space.legal)
    random.Random(rows).shuffle(legal)
    wanted = {(param.name, value) for param in space.params for value in param.values}
    tried = 0
    for config in legal:
        if fresh := wanted & set(config.items()):
            wanted -= fresh
            result = check(FAMILY, engine, problem, config, seed=rows)
            assert result.ok, f"{config}: {result.reason}"
            tried += 1
    assert tried >= 4


def test_the_invariant_choice_gives_the_same_bits_for_any_rows_and_block(device):
    import torch
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config

    engine = FAMILY.engine("cute_skinny")
    wide = FAMILY.inputs(FAMILY.problem(K3, tp=8, rows=8), 7, "cuda")
    seen = None
    for rows, a_block, outputs in ((8, 1, 3216), (1, 1, 6288), (2, 4, 2880), (4, 2, 6288), (3, 1, 16), (1, 8, 6288)):
        problem = dataclasses.replace(FAMILY.problem(K3, tp=8, rows=rows), outputs=outputs)
        space = engine.space(problem, device.need_card())
        config = {**space.default, "outputs_a_block": a_block, "depth": 4}
        assert space.illegal(config) is None
        out = torch.full((rows, outputs), float("nan"), dtype=torch.bfloat16, device="cuda")
        tensors = {"x": wide["x"][:rows].contiguous(), "w": wide["w"][:outputs].contiguous(), "out": out}
        Runner(compile_config(engine, problem, config, device.arch)).bind(tensors)()
        torch.cuda.synchronize()
        first = out[0, :16].view(torch.int16).clone()
        assert seen is None or torch.equal(seen, first), (rows, a_block, outputs)
        seen = first


def test_changing_row_counts_with_one_object(device):
    import torch
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compare import compare
    from k3lab.tuning.compiling import compile_config

    engine, problem = FAMILY.engine("triton"), FAMILY.problem(K3, tp=16, rows=64)
    runner = Runner(compile_config(engine, problem, engine.space(problem, device.need_card()).default, device.arch))
    for seed, rows in enumerate((64, 1, 8, 64, 33)):
        case = dataclasses.replace(problem, rows=rows)
        inputs = FAMILY.inputs(case, seed, "cuda")
        out = torch.full((rows, problem.outputs), float("nan"), dtype=torch.bfloat16, device="cuda")
        runner.bind({**inputs, "out": out}, rows=rows)()
        torch.cuda.synchronize()
        result = compare("out", out, FAMILY.twin(case, inputs)["out"], FAMILY.tolerance(case, "out"))
        assert result.ok, result.message


def test_a_wrong_kernel_fails_the_check(device, monkeypatch):
    from k3lab.tuning import check
    from k3lab.tuning.compiling import compile_config

    engine, problem = FAMILY.engine("triton"), FAMILY.problem(K3, tp=16, rows=8)
    compiled = compile_config(engine, problem, engine.space(problem, device.need_card()).default, device.arch)
    (launch,) = compiled.launches
    short = dataclasses.replace(launch, grid=(launch.grid[0] - 1, *launch.grid[1:]))
    result = check.check_compiled(FAMILY, dataclasses.replace(compiled, launches=(short,)), seed=0)
    assert not result.ok
    assert "never written" in result.reason


@pytest.mark.parametrize("name", ["triton", "cute_skinny", "cute_mma", "cute_wgmma"])
def test_timing(device, name, benchmark):
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.timing import time_compiled

    engine, problem = FAMILY.engine(name), FAMILY.problem(K3, tp=16, rows=1)
    compiled = compile_config(engine, problem, engine.space(problem, device.need_card()).default, device.arch)
    timing = time_compiled(FAMILY, compiled, alternative=True)
    assert timing.stable, timing.notes
    assert timing.cold.copies >= 9
    assert timing.hot_us < timing.cold_us  # 46 MB fit in the L2
    assert timing.cold_us >= timing.floor_us * 0.97
    record(benchmark, timing)
