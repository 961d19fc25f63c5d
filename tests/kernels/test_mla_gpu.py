"""The MLA core's engines on a GPU: the twin, exact inputs to the bit, caches, dead rows, many launches, graphs, configs."""

from __future__ import annotations

import random

import pytest
import torch
from k3lab.kernels.mla.family import Mla

from .gpu_acts import same
from .mla_case import FAMILY, drawn, exact_inputs, inserted, judge, judge_exact, problem, same_cache, written

CUTE, TRITON = FAMILY.engine("cute_mma"), FAMILY.engine("triton")
ENGINES = [CUTE, TRITON]


def legal_change(engine, one, card, **changes):
    """The default with changes that the engine has parameters for."""
    space = engine.space(one, card)
    names = {param.name for param in space.params}
    chosen = {**space.default, **{name: value for name, value in changes.items() if name in names}}
    assert space.illegal(chosen) is None, space.illegal(chosen)
    return chosen


class Case:
    """A compiled engine, its runner, tensors on the GPU."""

    def __init__(self, device, engine, one: Mla, inputs=None, seed=0, config=None):
        from k3lab.kernels.launch import Runner

        self.one, self.inputs = one, inputs or drawn(one, seed)
        self.config = config or dict(engine.space(one, device.need_card()).default)
        self.runner = Runner(engine.compile(one, self.config, device.arch))
        self.out = torch.empty(one.rows, one.heads * one.v_dim, dtype=torch.bfloat16, device="cuda")
        self.given = {name: tensor.cuda() for name, tensor in self.inputs.items()}
        self.cache = self.given["cache"].clone()

    def run(self, rows=None, pdl=None, dead=False):
        """One launch on a fresh cache, all scratch NaN; dead rows NaN, dead requests' tables out of bounds."""
        self.out.fill_(float("nan"))
        for tensor in self.runner.buffers.values():
            tensor.view(torch.uint8).fill_(0xFF)
        self.cache.copy_(self.given["cache"])
        tensors = {**self.given, "cache": self.cache, "out": self.out}
        if dead:
            alive = -(-rows // self.one.q_len)
            tensors |= {name: self.given[name].clone() for name in ("proj", "block_table", "context")}
            tensors["proj"][rows:] = float("nan")
            tensors["block_table"][alive:] = 2**30
            tensors["context"][alive:] = 2**30
        self.runner.bind(tensors, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()

    def judge(self, rows=None):
        rows = rows or self.one.rows
        judge(self.one, self.inputs, self.out.cpu(), rows)
        mask = written(self.one, self.inputs, rows)
        same_cache(self.cache.cpu(), inserted(self.one, self.inputs), self.inputs["cache"], mask)

    def bits(self):
        return self.out.view(torch.int16).clone(), self.cache.view(torch.uint8).clone()


SHAPES = [
    ("bf16", 1, 16), ("bf16", 3, 16), ("bf16", 8, 8), ("bf16", 17, 16), ("bf16", 64, 16), ("bf16_verify8", 8, 16),
    ("bf16_verify4", 12, 8), ("bf16_verify3", 63, 16), ("bf16_verify8", 8, 4), ("fp8", 1, 16), ("fp8", 33, 16), ("fp8", 8, 4),
    ("fp8_verify8", 8, 16), ("fp8_verify2", 64, 8), ("fp8_verify8", 64, 16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize(("kind", "rows", "tp"), SHAPES)
def test_equals_the_twin_in_many_launches_and_at_fewer_rows(device, engine, kind, rows, tp):
    case = Case(device, engine, problem(rows, kind, tp))
    case.run()
    case.judge()
    first = case.bits()
    for _ in range(10):
        case.run()
        assert same(first, case.bits())
    for fewer in sorted({1, (rows + 1) // 2, rows - 1} - {0}):
        case.run(fewer, dead=True)
        case.judge(fewer)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("kind", ["bf16_128k", "fp8_128k_verify8", "bf16_8k"])
def test_long_contexts(device, engine, kind):
    case = Case(device, engine, problem(8 if kind != "bf16_128k" else 1, kind))
    case.run()
    case.judge()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_exact_inputs_give_the_twins_bits(device, engine, kind, splits):
    """Whole pages, half a page, one token, and none before the new one."""
    one = problem(6, kind)
    contexts = [1023, 511, 31, 1, 0, 127]
    config = legal_change(engine, one, device.need_card(), splits=splits)
    case = Case(device, engine, one, exact_inputs(one, contexts), config=config)
    case.run()
    judge_exact(one, case.inputs, case.out)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("kind", "rows"), [("bf16", 1), ("bf16", 8), ("bf16_verify8", 8), ("fp8_verify8", 8), ("fp8", 64)]
)
def test_configs_of_the_whole_space_pass_the_house_check(device, engine, kind, rows):
    from k3lab.tuning.check import check

    one, dice = problem(rows, kind), random.Random(rows)
    space, done = engine.space(one, device.need_card()), 0
    while done < 3:
        config = {param.name: dice.choice(param.values) for param in space.params}
        if space.illegal(config) is None:
            result = check(FAMILY, engine, one, config, done)
            assert result.ok, f"{config}: {result.reason}"
            done += 1


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_row_counts_change_from_launch_to_launch(device, engine):
    case = Case(device, engine, problem(64))
    for rows in (64, 1, 8, 64, 33, 16, 17, 64):
        case.run(rows)
        case.judge(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize(("kind", "rows"), [("bf16", 1), ("bf16_verify8", 8), ("fp8", 8)])
def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device, engine, kind, rows):
    case = Case(device, engine, problem(rows, kind))
    case.run(pdl=False)
    case.judge()
    first = case.bits()
    call = case.runner.bind({**case.given, "cache": case.cache, "out": case.out})
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
        assert same(first, case.bits())


@pytest.mark.gpu
def test_invariant_rows_have_the_same_bits_at_any_row_count_and_tp(device):
    """A request's head is the same number whoever shares the step, and however many heads the rank has."""
    big = problem(64, "bf16", 8)
    inputs = FAMILY.inputs(big, 5)
    found = {}
    for rows, tp in ((64, 8), (3, 8), (16, 16), (1, 16)):
        one = problem(rows, "bf16", tp)
        heads, nope = one.heads, one.nope + one.rope
        gate = inputs["proj"][:rows, one.q_lora + one.width :][:, : heads * one.v_dim]
        mine = {
            **inputs, "proj": torch.cat([inputs["proj"][:rows, : one.q_lora + one.width], gate], dim=1).contiguous(),
            "q_b": inputs["q_b"][: heads * nope].contiguous(), "w_uk": inputs["w_uk"][:heads].contiguous(),
            "w_uv": inputs["w_uv"][:heads].contiguous(), "block_table": inputs["block_table"][:rows].contiguous(),
            "context": inputs["context"][:rows].contiguous(),
        }  # fmt: skip
        space = CUTE.space(one, device.need_card()).restricted({"k_order": "invariant"})
        case = Case(device, CUTE, one, mine, config=dict(space.default))
        case.run()
        found[rows, tp] = case.out[:, : problem(1).heads * one.v_dim].clone().view(torch.int16)
    for (rows, tp), bits in found.items():
        assert torch.equal(bits, found[64, 8][:rows]), f"{rows} rows at TP {tp}: other bits than 64 at TP 8"


@pytest.mark.gpu
def test_programmatic_edges_stay_in_a_graph(device):
    """Each launch but the first waits for the one before by itself."""
    from k3lab.tuning.graphs import captured, programmatic_edges

    case = Case(device, CUTE, problem(8))
    call = case.runner.bind({**case.given, "cache": case.cache, "out": case.out})
    call()
    torch.cuda.synchronize()
    assert programmatic_edges(captured([call] * 4)) == 4 * len(case.runner.compiled.launches) - 1


def test_the_cases_above_can_be_drawn_and_judged_without_a_gpu():
    from .mla_case import H200

    for kind, rows, tp in SHAPES:
        for engine in ENGINES:
            one = problem(rows, kind, tp)
            assert engine.refuses(one, "sm_90a") is None
            assert engine.space(one, H200).illegal(engine.space(one, H200).default) is None
    for splits in (1, 4, 16):
        for engine in ENGINES:
            legal_change(engine, problem(6), H200, splits=splits)
    one = problem(6, heads=1, q_lora=256)
    inputs = exact_inputs(one, [1023, 511, 31, 1, 0, 127])
    judge_exact(one, inputs, FAMILY.twin(one, inputs)["out"].to(torch.bfloat16))
    orders = set()
    for rows, tp in ((64, 8), (3, 8), (16, 16), (1, 16)):
        space = CUTE.space(problem(rows, "bf16", tp), H200).restricted({"k_order": "invariant"})
        orders.add(CUTE.summation_order(problem(rows, "bf16", tp), space.default))
    assert len(orders) == 1
