"""AttnRes' engines on a GPU: the twin's rows, fewer rows and blocks, many launches, graphs, changing rows."""

import random

import pytest
import torch
from k3lab.tuning.compare import compare

from .attn_res_case import CUTE, FAMILY, TRITON, problem, spread, with_fewer

pytestmark = pytest.mark.gpu
KINDS = ("blocks", "first", "final")


class Case:
    """A compiled engine, its runner, tensors on the GPU and what they should become."""

    def __init__(self, device, one, changes=None, engine=CUTE, seed=0, inputs=None):
        from k3lab.kernels.launch import Runner

        self.one = one
        chosen = {**engine.space(one, device.need_card()).default, **(changes or {})}
        self.inputs = inputs or spread(one, seed)
        self.runner = Runner(engine.compile(one, chosen, device.arch))
        self.out = torch.empty(one.rows, one.hidden, dtype=torch.bfloat16, device="cuda")
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, "out": self.out}

    def run(self, rows=None, saved=None, pdl=None, dead=False):
        """One launch on a poisoned output; ``dead``: rows and blocks that it has not are NaN."""
        self.out.fill_(float("nan"))
        rows, tensors = rows or self.one.rows, dict(self.tensors)
        if dead:
            tensors["prefix"] = tensors["prefix"].clone()
            tensors["prefix"][rows:] = float("nan")
            if "blocks" in tensors:
                tensors["blocks"] = tensors["blocks"].clone()
                tensors["blocks"][:, rows:] = float("nan")
                tensors["blocks"][saved or self.one.blocks :] = float("nan")
        self.runner.bind(tensors, rows=rows, pdl=pdl, fewer={"blocks": saved} if saved else None)()
        torch.cuda.synchronize()

    def judge(self, rows=None, saved=None):
        rows = rows or self.one.rows
        wanted = with_fewer(self.one, self.inputs, saved) if saved else FAMILY.twin(self.one, self.inputs)["out"]
        got = self.out.cpu()
        for row in range(rows):
            result = compare("out", got[row : row + 1], wanted[row : row + 1], FAMILY.tolerance(self.one, "out"))
            assert result.ok, f"row {row} of {rows}, {saved} saved: {result.message}"
        assert got[rows:].isnan().all()

    def bits(self):
        return self.out.view(torch.int16).clone()


def drawn(one, card, count, seed=0):
    """Legal configs drawn point by point."""
    space, rng, found = CUTE.space(one, card), random.Random(seed), []
    while len(found) < count:
        point = {param.name: rng.choice(param.values) for param in space.params}
        if space.illegal(point) is None:
            found.append(point)
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 33, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_twin_in_many_launches_and_at_fewer_rows(device, rows, kind):
    case = Case(device, problem(rows, kind))
    case.run()
    case.judge()
    first = case.bits()
    for _ in range(20):
        case.run()
        assert torch.equal(first, case.bits())
    for fewer in sorted({1, rows // 2 or 1, rows}):
        case.run(fewer, dead=True)
        case.judge(fewer)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("engine", [CUTE, TRITON], ids=["cute_cluster", "triton"])
def test_a_step_that_has_saved_fewer_blocks(device, rows, engine):
    case = Case(device, problem(rows), engine=engine)
    for saved in range(1, 9):
        case.run(saved=saved, dead=True)
        case.judge(saved=saved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_configs_of_the_whole_space_pass_the_house_check(device, rows, kind):
    from k3lab.tuning.check import check

    one = problem(rows, kind)
    for seed, config in enumerate(drawn(one, device.need_card(), 4, seed=rows)):
        result = check(FAMILY, CUTE, one, config, seed)
        assert result.ok, f"{config}: {result.reason}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_warps", [4, 16])
def test_triton_passes_the_house_check(device, kind, num_warps):
    from k3lab.tuning.check import check

    one = problem(8, kind)
    result = check(FAMILY, TRITON, one, {"num_warps": num_warps, "release": "entry"})
    assert result.ok, result.reason


def test_row_counts_and_saved_blocks_change_from_launch_to_launch(device):
    case = Case(device, problem(64))
    for rows, saved in ((64, 8), (1, 1), (8, 3), (64, 5), (33, 8), (1, 8), (64, 1)):
        case.run(rows, saved=saved)
        case.judge(rows, saved=saved)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device, rows):
    case = Case(device, problem(rows))
    case.run(pdl=False)
    case.judge()
    first = case.bits()
    call = case.runner.bind(case.tensors)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    for _ in range(200):
        case.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, case.bits())


def test_invariant_rows_have_the_same_bits_at_any_row_count(device):
    big = spread(problem(64), 5)
    found = {}
    for rows in (1, 3, 8, 16, 64):
        one = problem(rows)
        chosen = CUTE.space(one, device.need_card()).restricted({"k_order": "invariant"}).default
        inputs = {**big, "prefix": big["prefix"][:rows].clone(), "blocks": big["blocks"][:, :rows].contiguous()}
        case = Case(device, one, chosen, inputs=inputs)
        case.run()
        found[rows] = case.bits()
    for rows, got in found.items():
        assert torch.equal(got, found[64][:rows]), rows


def test_a_source_that_is_nan_spoils_its_row_alone(device):
    one = problem(8)
    inputs = spread(one, 7)
    inputs["blocks"][4, 1, 1000] = float("nan")
    for engine in (CUTE, TRITON):
        case = Case(device, one, engine=engine, inputs=inputs)
        case.run()
        assert case.out[1].isnan().all()
        assert not case.out[[0, 2, 3, 4, 5, 6, 7]].isnan().any()


def test_a_final_mix_has_the_official_rounding_points(device):
    from k3lab.kernels.attn_res.twin import attn_res_norm

    one = problem(8, "final")
    case = Case(device, one, seed=3)
    case.run()
    t = case.inputs
    args = (list(t["blocks"]), t["prefix"], t["res_norm"], t["res_proj"], t["norm_w"], one.eps)
    rounded, once = (attn_res_norm(*args, single_rounding=single) for single in (False, True))
    got = case.out.cpu()
    assert float((got == rounded).float().mean()) > 0.95 > 0.9 > float((got == once).float().mean())


def test_clusters_of_sixteen_run_where_a_gpc_has_room(device):
    case = Case(device, problem(2), {"cluster": 16, "warps": 7, "depth": 2})
    case.run()
    case.judge()
