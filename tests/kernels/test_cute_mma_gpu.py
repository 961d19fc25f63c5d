"""cute_mma on a GPU: equal to the twin all over its space; the invariant choice gives the same bits for any shape."""

import pytest
from k3lab.kernels import K3, family
from k3lab.kernels.attention_projection.cute_mma_engine import INVARIANT

from .test_cute_mma import drawn

pytestmark = pytest.mark.gpu
FAMILY = family("attention_projection")
ENGINE = FAMILY.engine("cute_mma")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 33, 64])
def test_configs_of_the_whole_space_equal_the_twin(device, rows):
    from k3lab.tuning.check import check

    problem = FAMILY.problem(K3, tp=16, rows=rows)
    for seed, config in enumerate(drawn(rows, device.need_card(), 6, seed=rows)):
        result = check(FAMILY, ENGINE, problem, config, seed)
        assert result.ok, f"{config}: {result.reason}"


def test_invariant_results_have_the_same_bits_at_any_rows_outputs_and_tile(device):
    import torch
    from k3lab.kernels.launch import Runner
    from k3lab.tuning.compiling import compile_config

    big = FAMILY.problem(K3, tp=8, rows=64)
    inputs = FAMILY.inputs(big, 5, "cuda")
    bits = {}
    for tp in (8, 16):
        for rows in (1, 3, 8, 16, 64):
            problem = FAMILY.problem(K3, tp=tp, rows=rows)
            for tile, depth in ((8, 2), (16, 1)):
                space = ENGINE.space(problem, device.need_card())
                config = {**space.default, **INVARIANT, "k_order": "invariant", "tile_n": tile, "depth": depth}
                assert space.illegal(config) is None
                out = torch.full((rows, problem.outputs), float("nan"), dtype=torch.bfloat16, device="cuda")
                tensors = {"x": inputs["x"][:rows], "w": inputs["w"][: problem.outputs], "out": out}
                Runner(compile_config(ENGINE, problem, config, device.arch)).bind(tensors)()
                torch.cuda.synchronize()
                bits[tp, rows, tile] = out[:, :2880].view(torch.int16)
    reference = bits[8, 64, 8]
    for (tp, rows, tile), found in bits.items():
        assert torch.equal(found, reference[:rows]), (
            f"tp {tp}, {rows} rows, tile {tile}: other bits than 64 rows at tp 8"
        )
