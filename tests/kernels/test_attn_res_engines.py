"""Engines of AttnRes: refusals, spaces, index arithmetic, machine code, Triton on the interpreter; the PyTorch chain."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3
from k3lab.kernels.attn_res import common, cute_cluster_engine
from k3lab.kernels.attn_res.layout import LAST, PREFIX, WORDS, Row
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.check import row_cases
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.interpret import check_interpreted
from k3lab.tuning.sass_order import order, places, release_fault, wait_fault

from .attn_res_case import CUTE, FAMILY, TRITON, problem

CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WEIGHTS = r"LDG\.E\.NA(\.128)?"
KINDS = ("blocks", "first", "final")


def test_refusals_say_why() -> None:
    for engine in (CUTE, TRITON):
        assert engine.refuses(problem(64), "sm_103a") is None
        assert "sm_80" in str(engine.refuses(problem(8), "sm_80"))
        assert "kind final with 0 saved blocks" in str(engine.refuses(problem(8, "final", blocks=0), "sm_90a"))
        assert "kind first with 3 saved blocks" in str(engine.refuses(problem(8, "first", blocks=3), "sm_90a"))
    assert "9 saved blocks: the MMA holds 8" in str(CUTE.refuses(problem(8, blocks=9), "sm_90a"))
    assert "16 saved blocks" in str(TRITON.refuses(problem(8, blocks=16), "sm_90a"))
    for hidden in (7200, 7168 * 17, 100):
        assert f"hidden {hidden}: no 1 to 16 blocks" in str(CUTE.refuses(problem(8, hidden=hidden), "sm_90a"))


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_legal_on_every_card_and_for_every_hidden_that_is_served(kind: str) -> None:
    for rows in (1, 2, 3, 8, 12, 16, 24, 32, 33, 48, 64):
        for card in CARDS.values():
            for engine in (CUTE, TRITON):
                space = engine.space(problem(rows, kind), card)
                assert space.illegal(space.default) is None, (rows, card.name)
                assert space.size < 2000
    served = 0
    for hidden in range(64, 10241, 64):
        one = problem(8, kind, hidden=hidden)
        if CUTE.refuses(one, "sm_90a") is None:
            served += 1
            CUTE.space(one, CARDS["sm_90a"])
    assert served > 30
    small = FAMILY.problem(SMALL_K3, tp=4, rows=8, kind=kind)
    for engine in (CUTE, TRITON):
        if engine.refuses(small, "sm_90a") is None:
            engine.space(small, CARDS["sm_90a"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k_order": "invariant", "cluster": 4}, "invariant needs cluster 8, warps 7"),
        ({"cluster": 16, "warps": 4}, "do not divide hidden 7168"),
        ({"depth": 4}, "more steps of weights in flight"),
        ({"cluster": 2, "warps": 28}, "exceed a thread's registers"),
    ],
)
def test_illegal_configs_are_explained(change: dict, why: str) -> None:
    space = CUTE.space(problem(8), CARDS["sm_90a"])
    assert why in str(space.illegal({**space.default, **change}))


def test_an_odd_hidden_has_no_invariant_order() -> None:
    space = CUTE.space(problem(8, hidden=1024), CARDS["sm_90a"])
    assert "not 1024" in str(space.illegal({**space.default, "k_order": "invariant"}))
    assert "lie side by side" in str(TRITON.refuses(problem(8, blocks=20), "sm_90a"))
    triton = TRITON.space(problem(8), CARDS["sm_90a"])
    assert "entry or end" in str(triton.illegal({**triton.default, "release": "loads"}))


def test_invariant_configs_share_what_a_sum_depends_on() -> None:
    orders = set()
    for rows in (1, 8, 64):
        default = CUTE.space(problem(rows), CARDS["sm_90a"]).restricted({"k_order": "invariant"}).default
        orders.add(CUTE.summation_order(problem(rows), default))
    assert len(orders) == 1


# -- index arithmetic, on integers --------------------------------------------------------------
ROWS = [
    Row(7168, cluster, warps, 1) for cluster, warps in ((1, 14), (2, 16), (4, 28), (8, 7), (8, 14), (16, 2), (16, 14))
]


@pytest.mark.parametrize("row", ROWS)
def test_every_column_is_loaded_once_and_written_once(row: Row) -> None:
    loaded: Counter = Counter()
    written: Counter = Counter()
    for part in range(row.cluster):
        for warp in range(row.warps):
            for step in range(row.steps):
                first = row.column(part, warp, step)
                for quad in range(4):
                    loaded.update(range(first + 8 * quad, first + 8 * quad + 8))
                for lane in range(32):
                    if lane & 4 == 0:
                        written.update(first + row.out_column(lane) + i for i in range(2))
    assert loaded == written == Counter(dict.fromkeys(range(7168), 1))


def test_a_lane_ends_with_columns_that_it_has_held() -> None:
    """Of its own 8 columns, the half and quarter that its bits 4 and 3 say: as the exchange halves what a lane holds."""
    for lane in range(32):
        left = list(range(lane % 4 * 8, lane % 4 * 8 + 8))
        for step, half in ((16, 4), (8, 2)):
            left = left[half:] if lane & step else left[:half]
        assert left[0] == ROWS[0].out_column(lane) == ROWS[0].out_column(lane ^ 4)


def test_a_part_has_a_place_for_each_product_and_no_two_share_one() -> None:
    """As the lanes of a warp write it: accumulators of rows 0 to 7, of rows 8 to 10, and of the prefix's column."""
    row, found = ROWS[0], Counter()
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        found.update(row.word(group, 2 * quad + half) for half in range(2))
        if group < 3:
            found.update(row.word(PREFIX + group, 2 * quad + half) for half in range(2))
        if group < 3 and quad == 0:
            found[row.last_word(PREFIX + group)] += 1
    assert found == Counter(dict.fromkeys(range(LAST + 3), 1))
    assert LAST + 3 <= WORDS and WORDS % 4 == 0 and WORDS // 4 <= 32, "a lane of one warp tells each packet"


def test_the_query_in_halves_is_the_product_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    gamma, query = (torch.randn(100_000, generator=generator).to(torch.bfloat16).float() for _ in range(2))
    product = gamma * query
    upper = product.to(torch.bfloat16).float()
    lower = (product - upper).to(torch.bfloat16).float()
    assert torch.equal(upper + lower, product)


# -- machine code -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arch", "rows", "kind"),
    [("sm_90a", 1, "blocks"), ("sm_90a", 8, "final"), ("sm_90a", 64, "blocks"), ("sm_100a", 8, "first"), ("sm_103a", 8, "blocks")],
)  # fmt: skip
def test_machine_code(arch: str, rows: int, kind: str) -> None:
    """The default, and on Hopper another one from anywhere in the space."""
    one = problem(rows, kind)
    space, rng = CUTE.space(one, CARDS[arch]), random.Random(rows)
    configs = [dict(space.default)]
    while arch == "sm_90a" and len(configs) < 2:
        point = {param.name: rng.choice(param.values) for param in space.params}
        configs += [point] if space.illegal(point) is None else []
    for chosen in configs:
        (launch,) = CUTE.compile(one, chosen, arch).launches
        found, code, row = kernel_resources(launch), order(launch.cubin), cute_cluster_engine.row_of(one, chosen)
        assert found.kernel.startswith("k3_attn_res_cute_cluster_mix"), chosen
        assert found.spill_instructions == 0 and found.stack_bytes == 0, chosen
        assert found.dynamic_shared_bytes == launch.shared_bytes == cute_cluster_engine.shared(row), chosen
        assert (launch.grid, launch.cluster) == ((rows * row.cluster, 1, 1), (row.cluster, 1, 1))
        assert launch.pdl and not launch.needs_residency, "blocks wait for those of their own cluster only"
        early = row.steps + (2 * row.ahead if kind != "first" else 0)
        assert wait_fault(code, WEIGHTS, ahead=early) is None, chosen
        assert release_fault(code, WEIGHTS, str(chosen["release"])) is None, chosen
        assert not places(code, r"MEMBAR\.(ALL|SC)\.(GPU|SYS)"), "a cluster's barrier counts bytes"
        assert found.instructions.get("STAS", 0) == (row.cluster if row.cluster > 1 else 0)


def test_machine_code_of_one_row_is_short() -> None:
    """Between the last load and the result: two MMAs a step and half of each kind, three barriers of a block."""
    (launch,) = CUTE.compile(problem(1), CUTE.space(problem(1), CARDS["sm_90a"]).default, "sm_90a").launches
    found = kernel_resources(launch)
    assert (found.instructions["HMMA"], found.instructions["STAS"]) == (8, 8)
    assert found.registers <= 64
    assert sum(found.instructions.values()) < 620


# -- Triton -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_triton_equals_the_twin_on_the_interpreter(kind: str) -> None:
    one = problem(3, kind, hidden=1000, **({} if kind == "first" else {"blocks": 5}))
    result = check_interpreted(FAMILY, TRITON, one, dict(TRITON.space(one, CARDS["sm_90a"]).default), 0)
    assert result.how == "interpreter"
    assert result.ok, result.reason
    assert {case["rows"] for case in result.cases} <= set(row_cases(3))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_triton_compiles_without_spills_and_asks_for_weights_before_the_wait(arch: str) -> None:
    for kind in KINDS:
        one = problem(8, kind)
        (launch,) = TRITON.compile(one, TRITON.space(one, CARDS[arch]).default, arch).launches
        found = kernel_resources(launch)
        assert re.match(r"k3_attn_res_triton_row$", found.kernel)
        assert found.spill_instructions == 0 and found.registers <= 72
        assert found.dynamic_shared_bytes == launch.shared_bytes <= 128, "what 16 warps add up"
        assert launch.pdl
        assert wait_fault(order(launch.cubin), r"LDG\..*") is None


# -- what a user would write --------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_the_pytorch_chain_computes_what_the_twin_does(kind: str) -> None:
    one = problem(5, kind, hidden=512)
    inputs = FAMILY.inputs(one, 2)
    outputs = {"out": torch.zeros(5, 512, dtype=torch.bfloat16)}
    FAMILY.alternative(one, {**inputs, **outputs})()
    wanted = FAMILY.twin(one, inputs)["out"]
    for found in (FAMILY.operators(one)(inputs), outputs):
        assert found["out"].dtype == torch.bfloat16
        result = compare("out", found["out"], wanted, FAMILY.tolerance(one, "out"))
        assert result.ok, result.message


def test_bars_are_of_problems_that_there_are() -> None:
    bars = json.loads((Path(common.__file__).parent / "bars.json").read_text())
    assert bars["gpu"] == "H200"
    for bar in bars["bars"]:
        for rows in bar["rows"]:
            one = FAMILY.problem(K3, tp=bar["tp"], rows=rows, kind=bar["kind"])
            assert one.blocks == 8
            assert CUTE.refuses(one, "sm_90a") is None
            assert bar["us"] > FAMILY.traffic(one).bytes / CARDS["sm_90a"].read_bandwidth * 1e6


def test_a_problem_without_a_kind_is_of_blocks() -> None:
    data = problem(8).to_json()
    del data["kind"]
    assert FAMILY.problem_from_json(data) == problem(8)
