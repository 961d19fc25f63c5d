"""Contexts over ranks on one GPU that plays all of them (loopback): the twin's numbers, the same bits, a rank that never publishes."""

from __future__ import annotations

import random

import pytest
import torch
from k3lab.kernels.health import check_health
from k3lab.kernels.transports import Loopback
from k3lab.tuning.compare import compare

from .gpu_acts import delay_often, replay_often, run_often, silence
from .mla_case import FAMILY, drawn, exact_inputs, problem
from .mla_dcp_case import ENGINE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHAPES = [
    ("bf16_dcp", 1, 16), ("bf16_dcp", 8, 16), ("bf16_dcp", 33, 8), ("bf16_dcp", 64, 4), ("bf16_verify8_dcp", 8, 16),
    ("bf16_verify3_dcp", 12, 2), ("fp8_dcp", 1, 16), ("fp8_dcp", 17, 16), ("fp8_verify8_dcp", 64, 8), ("fp8_verify2_dcp", 8, 16),
    ("bf16_128k_dcp", 1, 16), ("fp8_128k_verify8_dcp", 8, 16),
]  # fmt: skip


EXACT, SHORT = [255, 127, 31, 7], {"tile": 32, "stages": 2}
"""Contexts of which this rank of four holds a power of two of tokens, in equal parts of so short tiles."""


def factors_of(tp):
    """That tell slots apart without a sum of zero, one of a rank without tokens."""
    return tuple(0.0 if rank == 1 and tp > 2 else (-1.0) ** (rank // 2) * 2.0 ** (rank % 3) for rank in range(tp))


class Case:
    """A compiled engine, its runner over loopback, tensors on the GPU; scratch that no launch leaves to the next is poisoned."""

    def __init__(self, device, one, inputs=None, factors=None, **change):
        from k3lab.kernels.launch import Runner
        from k3lab.tuning.compiling import compile_config

        self.one, self.inputs = one, inputs or drawn(one, 1)
        self.factors = factors or factors_of(one.tp)
        chosen = {**ENGINE.space(one, device.need_card()).default, **change}
        self.runner = Runner(compile_config(ENGINE, one, chosen, device.arch), transport=Loopback(one.tp, self.factors))
        self.out = torch.empty(one.rows, one.heads * one.v_dim, dtype=torch.bfloat16, device="cuda")
        self.before = self.inputs["cache"].cuda()
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, "out": self.out}
        self.wanted = FAMILY.over_loopback(one, self.inputs, self.factors)["out"]

    def poison(self):
        self.out.fill_(float("nan"))
        for name in ("partial", "lse"):
            self.runner.buffers[name].view(torch.uint8).fill_(0xFF)
        self.tensors["cache"].copy_(self.before)

    def run(self, rows=None, pdl=None, dead=False):
        self.poison()
        tensors = dict(self.tensors)
        if dead:
            alive = -(-rows // self.one.q_len)
            tensors |= {name: tensors[name].clone() for name in ("proj", "block_table", "context")}
            tensors["proj"][rows:] = float("nan")
            tensors["block_table"][alive:] = 2**30
            tensors["context"][alive:] = 2**30
        self.runner.bind(tensors, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def judge(self, rows=None):
        rows = rows or self.one.rows
        got = self.out.cpu()
        result = compare("out", got[:rows], self.wanted[:rows], FAMILY.tolerance(self.one, "out"))
        assert result.ok, result.message
        assert bool(got[rows:].isnan().all())

    def bits(self):
        return self.out.view(torch.int16).clone(), self.tensors["cache"].view(torch.uint8).clone()


@pytest.mark.parametrize(("kind", "rows", "tp"), SHAPES)
def test_equals_the_twin_in_many_launches_and_at_fewer_rows(device, kind, rows, tp):
    case = Case(device, problem(rows, kind, tp))
    run_often(case)
    for fewer in sorted({1, (rows + 1) // 2, rows - 1} - {0}):
        case.run(fewer, dead=True)
        case.judge(fewer)


@pytest.mark.parametrize("kind", ["bf16_dcp", "fp8_dcp"])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_exact_inputs_give_the_twins_bits(device, kind, splits):
    """All tokens are as heavy: factors of one, so that every rank says the same."""
    one = problem(4, kind, 4)
    case = Case(device, one, exact_inputs(one, EXACT), (1.0,) * 4, splits=splits, **SHORT)
    case.run()
    assert bool(case.wanted.any()) and torch.equal(case.out.cpu(), case.wanted.to(torch.bfloat16))


@pytest.mark.parametrize(("kind", "rows"), [("bf16_dcp", 1), ("bf16_dcp", 8), ("fp8_verify8_dcp", 8), ("fp8_dcp", 64)])
def test_configs_of_the_whole_space_pass_the_house_check(device, kind, rows):
    from k3lab.tuning.check import check

    one, dice = problem(rows, kind), random.Random(rows)
    space, done = ENGINE.space(one, device.need_card()), 0
    while done < 3:
        config = {param.name: dice.choice(param.values) for param in space.params}
        if space.illegal(config) is None:
            result = check(FAMILY, ENGINE, one, config, done)
            assert result.ok, f"{config}: {result.reason}"
            done += 1


@pytest.mark.parametrize(("kind", "rows"), [("bf16_dcp", 1), ("bf16_verify8_dcp", 8), ("fp8_dcp", 8)])
def test_a_graph_of_pdl_launches_gives_the_same_bits_two_hundred_times(device, kind, rows):
    replay_often(Case(device, problem(rows, kind)), 200)


@pytest.mark.parametrize("kind", ["bf16_dcp", "fp8_verify2_dcp"])
def test_delays_at_every_hand_over_change_no_bit(device, kind):
    one = problem(4, kind)
    delay_often(Case(device, one), Case(device, one, jitter=7), 50)


@pytest.mark.parametrize(
    ("table", "match"), [("queries", "did not publish its queries"), ("latents", "did not publish its partial sums")]
)
def test_a_rank_that_never_publishes_is_named_and_all_is_well_after_re_arming(device, table, match):
    silence(Case(device, problem(2, "bf16_dcp", 8)), 3, f"rank 3 {match}", table, at_most_s=2.0)


def test_row_counts_change_from_launch_to_launch(device):
    case = Case(device, problem(64, "bf16_dcp"))
    for rows in (64, 1, 8, 64, 33, 16, 17, 64):
        case.run(rows)
        case.judge(rows)


def test_programmatic_edges_stay_in_a_graph(device):
    from k3lab.tuning.graphs import captured, programmatic_edges

    case = Case(device, problem(8, "bf16_dcp"))
    call = case.runner.bind(case.tensors)
    call()
    torch.cuda.synchronize()
    assert programmatic_edges(captured([call] * 4)) == 4 * len(case.runner.compiled.launches) - 1
