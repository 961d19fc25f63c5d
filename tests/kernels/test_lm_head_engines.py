"""Engines of the head: refusals, spaces, index arithmetic, machine code, Triton on the interpreter; the PyTorch chain."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.lm_head import common, cute_mma_engine
from k3lab.kernels.lm_head.layout import Board, Head, Lookup
from k3lab.kernels.lm_head.peers import best_of_peers, own_slot, played, tokens_of_others
from k3lab.tuning.check import row_cases
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources, sass
from k3lab.tuning.interpret import check_interpreted
from k3lab.tuning.sass_order import order, places, release_fault, wait_fault

from .lm_head_case import CUTE, FAMILY, ROWS, TRITON, engine_of, problem, whole_numbers

CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WEIGHTS = r"LDG\.E\.NA\.LTC\S*128|LDG\.E\.NA\.128"


def test_refusals_say_why() -> None:
    assert CUTE.refuses(problem(64), "sm_103a") is None
    assert "sm_80" in CUTE.refuses(problem(8), "sm_80")
    assert "hidden 7200 is not a multiple of 256" in CUTE.refuses(problem(8, hidden=7200), "sm_90a")
    assert "TP 32" in CUTE.refuses(problem(8, tp=32), "sm_90a")
    assert CUTE.refuses(problem(8, "shard", tp=32), "sm_90a") is None
    assert "5119 vocabulary rows a rank do not go in pairs" in CUTE.refuses(problem(8, vocab=5119), "sm_90a")
    assert "cute_rows looks rows up" in CUTE.refuses(problem(8, "embed"), "sm_90a")
    assert "cute_mma makes logits" in ROWS.refuses(problem(8), "sm_90a")
    assert ROWS.refuses(problem(8, "embed"), "sm_103a") is None
    assert "hidden 7172 is not a multiple of 8" in ROWS.refuses(problem(8, "embed", hidden=7172), "sm_90a")
    assert "TP 32" in ROWS.refuses(problem(8, "embed", tp=32), "sm_90a")
    assert "publishes no packets" in TRITON.refuses(problem(8), "sm_90a")
    assert "multiple of 64" in TRITON.refuses(problem(8, "shard", hidden=7200), "sm_90a")


@pytest.mark.parametrize("kind", ["shard", "argmax", "embed"])
@pytest.mark.parametrize("tp", [4, 8, 16])
def test_defaults_are_legal_on_every_card_and_spaces_can_be_listed(tp: int, kind: str) -> None:
    from k3lab.tuning.propose import ENUMERABLE

    for rows in (1, 2, 3, 8, 12, 16, 24, 32, 48, 64):
        for card in CARDS.values():
            for engine in (CUTE, ROWS, TRITON):
                if engine.refuses(problem(rows, kind, tp), card.arch) is None:
                    space = engine.space(problem(rows, kind, tp), card)
                    assert space.illegal(space.default) is None, (rows, card.name)
                    assert space.size <= ENUMERABLE
    small = FAMILY.problem(SMALL_K3, tp=4, rows=8, kind=kind)
    if engine_of(small).refuses(small, "sm_90a") is None:
        engine_of(small).space(small, CARDS["sm_90a"])


@pytest.mark.parametrize(
    ("rows", "change", "why"),
    [
        (8, {"k_order": "invariant"}, "invariant needs chunks 1, warps_k 8"),
        (8, {"chunks": 4}, "exceed the 16 rows of an MMA"),
        (4, {"warps_k": 14, "chunks": 4, "depth": 6, "tile": 8}, "more steps in flight"),
        (8, {"warps_k": 16, "chunks": 1, "tile": 80, "depth": 1, "warps_n": 4}, "more than 1024 threads"),
        (64, {"warps_k": 16, "tile": 40, "depth": 1}, "exceed a thread's registers"),
        (64, {"warps_k": 2, "warps_n": 1, "tile": 80, "chunks": 1}, "exceed a thread's registers"),
        (8, {"tile": 8, "warps_n": 4}, "leave one without work"),
    ],
)
def test_illegal_configs_are_explained(rows: int, change: dict, why: str) -> None:
    space = CUTE.space(problem(rows), CARDS["sm_90a"])
    assert why in str(space.illegal({**space.default, **change}))


def test_invariant_configs_share_what_a_sum_depends_on() -> None:
    orders = set()
    for rows, tp, kind in ((1, 16, "shard"), (8, 8, "argmax"), (64, 4, "argmax"), (33, 16, "shard")):
        one = problem(rows, kind, tp)
        default = CUTE.space(one, CARDS["sm_90a"]).restricted({"k_order": "invariant"}).default
        orders.add(CUTE.summation_order(one, default))
    assert len(orders) == 1


# -- index arithmetic, on integers --------------------------------------------------------------
SHAPES = [
    Head(rows, 512, 50, 4, tile, chunks, 1, warps_n, warps_k)
    for rows, tile, chunks, warps_n, warps_k in (
        (1, 8, 8, 1, 2), (2, 12, 8, 1, 2), (3, 10, 4, 2, 2), (8, 20, 2, 1, 4), (8, 20, 2, 2, 4), (16, 24, 1, 2, 2), (40, 40, 1, 4, 2),
        (64, 80, 1, 2, 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("head", SHAPES)
def test_every_weight_meets_its_input_once_and_every_output_has_its_parts(head: Head) -> None:
    """Over lanes and steps each (row of the tile, column) is loaded; the MMA's products fall where sums are kept."""
    columns: Counter = Counter()
    for warp in range(head.warps):
        for lane in range(32):
            for j in range(head.n_tiles):
                for step in range(head.steps):
                    row = head.weight_row(warp, lane, j)
                    first = head.weight_column(warp, lane) + step * head.width * head.warps_k
                    if row < head.tile:
                        columns.update((row, first + i) for i in range(8))
    assert columns == Counter({(row, column): 1 for row in range(head.tile) for column in range(head.hidden)})
    places_of: Counter = Counter()
    for warp in range(head.warps):
        # what each MMA row and column stands for, as the loads have it
        inputs = {(m, h * 8 + g): head.input_row(4 * g, m, h) for m in range(head.m_tiles) for h in range(head.halves) for g in range(8)}  # fmt: skip
        for lane in range(32):
            for m in range(head.m_tiles):
                for j in range(head.n_tiles):
                    for e in range(2 * head.halves):
                        row, n, chunk, same = head.sum_place(warp, lane, m, j, e)
                        assert (row, chunk) == inputs[m, e // 2 * 8 + lane // 4]
                        owner = (lane % 4 * 2 + e % 2) * 4  # a lane that loads the MMA's column
                        assert n == head.weight_row(warp, owner, j)
                        if chunk == same and row < head.rows and n < head.tile:
                            assert head.input_column(warp, 0, chunk) == head.weight_column(warp, owner)
                            places_of[head.part(warp, same), row, n] += 1
    wanted = {(part, row, n): 1 for part in range(head.parts) for row in range(head.rows) for n in range(head.tile)}
    assert places_of == Counter(wanted)


def test_packets_do_not_overlap_and_slots_are_whole_packets() -> None:
    board = Board(16, 5)
    found = [board.offset(slot, parity, row) for slot in range(16) for parity in range(2) for row in range(5)]
    assert sorted(found) == [16 * place for place in range(160)]
    mailbox, table = board.buffers("mailbox")
    assert mailbox.shape[0] * mailbox.shape[1] * 4 == 160 * 16
    assert table.targets_of == "mailbox"


def test_packets_and_beacons_of_rows_do_not_overlap() -> None:
    one = Lookup(3, 264, 50, 4, 64)
    assert (one.packets, one.parts, one.blocks) == (66, 2, 6)
    found = [
        slot * one.slot_bytes + at
        for slot in range(4)
        for at in (
            *(one.within(parity, row, index) for parity in range(2) for row in range(3) for index in range(66)),
            one.beacon(0),
            one.beacon(1),
        )
    ]
    assert sorted(found) == [16 * place for place in range(len(found))]
    mailbox, _ = one.buffers("mailbox")
    assert mailbox.shape[0] * mailbox.shape[1] * 4 == len(found) * 16


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_tokens_are_of_every_rank_that_a_slot_can_play(ranks: int) -> None:
    owners = (tokens_of_others(ranks, 32, 100, seed=1) // 100).tolist()
    assert set(owners) == {rank for rank in range(ranks) if rank == 0 or rank != own_slot(ranks)}


def test_cold_calls_read_other_rows_of_the_same_ranks() -> None:
    one = problem(8, "embed", vocab=100, hidden=16)
    inputs = FAMILY.inputs(one, 1)
    copies = FAMILY.cold_copies(one, inputs, 10 * 8 * 16 * 2)
    assert copies is not None and len(copies) == 11
    owners = {tuple((copy["tokens"] // 100).tolist()) for copy in copies}
    assert owners == {tuple((inputs["tokens"] // 100).tolist())}
    places = torch.cat([copy["tokens"] % 100 for copy in copies])
    assert places.unique().numel() == 88
    assert FAMILY.cold_copies(problem(8, "shard"), {}, 100) is None


@pytest.mark.parametrize("ranks", [1, 4, 8, 16])
def test_the_table_of_the_others_has_ids_of_the_rank_that_a_slot_plays(ranks: int) -> None:
    table = best_of_peers(ranks, 7, 100, seed=1)
    assert sorted(played(ranks)) == list(range(ranks)) and played(ranks)[own_slot(ranks)] == 0
    assert (table[..., 1] // 100).tolist() == [[rank] * 7 for rank in played(ranks)]
    values = table[..., 0].view(torch.float32)
    assert torch.equal(values.to(torch.bfloat16).float(), values) and bool((values > 0).all())


# -- machine code -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arch", "rows", "kind"),
    [
        ("sm_90a", 8, "shard"), ("sm_90a", 1, "argmax"), ("sm_90a", 8, "argmax"), ("sm_90a", 64, "argmax"),
        ("sm_100a", 1, "argmax"), ("sm_103a", 16, "shard"),
    ],
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
        found, code, head = kernel_resources(launch), order(launch.cubin), cute_mma_engine.layout(one, chosen)
        assert found.kernel.startswith(f"k3_lm_head_cute_mma_{kind}"), chosen
        assert found.spill_instructions == 0 and found.stack_bytes == 0, chosen
        assert found.dynamic_shared_bytes == launch.shared_bytes <= CARDS[arch].shared_per_block
        assert (launch.grid[0], launch.pdl, launch.needs_residency) == (head.tiles, True, False)
        depth = min(head.depth, head.steps)
        bodies = depth * (2 if head.steps // depth > 1 else 1) + head.steps % depth  # of the loop, and behind it
        assert found.instructions["HMMA"] == 2 * head.n_tiles * head.m_tiles * bodies, chosen
        assert wait_fault(code, WEIGHTS, ahead=min(head.depth, head.steps) * head.n_tiles) is None, chosen
        assert release_fault(code, WEIGHTS, str(chosen["release"])) is None, chosen
        assert len(places(code, r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")) <= (2 if kind == "argmax" else 0), "one arrival"
        # where the compiler cannot prove that a warp is together, as behind polls that end lane by lane, it gives the maxima a
        # second form that first brings the warp together: out of line, so cold, and about a microsecond where it is taken
        assert not re.search(r"BRA\.DIV|ENDCOLLECTIVE", sass(launch.cubin)), chosen


@pytest.mark.parametrize(("arch", "rows"), [("sm_90a", 64), ("sm_103a", 8)])
def test_machine_code_of_rows(arch: str, rows: int) -> None:
    """Nothing is read before the wait, nobody needs a fence, and all blocks of a rank are there together."""
    one = problem(rows, "embed")
    (launch,) = ROWS.compile(one, ROWS.space(one, CARDS[arch]).default, arch).launches
    found, code = kernel_resources(launch), order(launch.cubin)
    assert found.kernel.startswith("k3_lm_head_cute_rows_embed")
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert found.registers <= 32, "2048 threads an SM"
    assert (launch.grid[0], launch.pdl, launch.needs_residency) == (7 * rows, True, True)
    assert found.dynamic_shared_bytes == launch.shared_bytes == 0
    assert wait_fault(code, "nothing", ahead=0) is None
    assert not places(code, r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")


def test_one_wave_of_blocks_holds_the_shard_of_sixteen_ranks() -> None:
    """The default at 8 rows: four blocks an SM by registers, and no more blocks than 132 SMs hold of them."""
    one = problem(8, "shard")
    chosen = CUTE.space(one, CARDS["sm_90a"]).default
    (launch,) = CUTE.compile(one, chosen, "sm_90a").launches
    found = kernel_resources(launch)
    a_sm = 65536 // (found.registers * launch.threads)
    assert 0.9 * 132 * a_sm <= launch.grid[0] <= 132 * a_sm


# -- Triton -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "change"), [(3, {"block_n": 16, "block_k": 64}), (17, {"block_n": 32, "block_k": 256})]
)
def test_triton_equals_the_twin_on_the_interpreter(rows: int, change: dict) -> None:
    one = problem(rows, "shard", hidden=512, vocab=50)
    result = check_interpreted(FAMILY, TRITON, one, {**TRITON.space(one, CARDS["sm_90a"]).default, **change}, 0)
    assert result.how == "interpreter"
    assert result.ok, result.reason
    assert {case["rows"] for case in result.cases} <= set(row_cases(rows))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_triton_compiles_without_spills_and_asks_for_weights_before_the_wait(arch: str) -> None:
    for rows in (8, 64):
        one = problem(rows, "shard")
        (launch,) = TRITON.compile(one, TRITON.space(one, CARDS[arch]).default, arch).launches
        found = kernel_resources(launch)
        assert re.match(r"k3_lm_head_triton_shard$", found.kernel)
        assert found.spill_instructions == 0 and found.registers <= 128
        assert found.dynamic_shared_bytes == launch.shared_bytes <= CARDS[arch].shared_per_block
        assert found.instructions.get({"sm_90a": "HGMMA", "sm_103a": "UTCHMMA"}[arch], 0) > 0
        assert launch.pdl
        assert wait_fault(order(launch.cubin), r"LDG\..*") is None


# -- what a user would write --------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["shard", "argmax", "embed"])
def test_the_pytorch_chain_computes_what_the_twin_does(kind: str) -> None:
    one = problem(5, kind, tp=4, vocab=256, hidden=512)
    inputs = FAMILY.inputs(one, 2)
    wanted = FAMILY.twin(one, inputs)
    outputs = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in FAMILY.output_specs(one).items()
    }  # fmt: skip
    FAMILY.alternative(one, {**inputs, **outputs})()
    for found in (FAMILY.operators(one)(inputs), outputs):
        for name, (_, dtype) in FAMILY.output_specs(one).items():
            assert found[name].dtype == getattr(torch, dtype)
            result = compare(name, found[name], wanted[name], FAMILY.tolerance(one, name))
            assert result.ok, result.message


def test_whole_numbers_have_equal_best_logits_within_a_rank_and_over_ranks() -> None:
    """Otherwise the tests of ties would test nothing."""
    one = problem(16, tp=4, vocab=50, hidden=512)
    inputs = whole_numbers(one, 1)
    logits = (inputs["h"].float() @ inputs["w"].float().T).to(torch.bfloat16)
    best = inputs["peers"][..., 0].view(torch.float32)
    assert bool(((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).any())
    assert bool(((best == best.amax(0)).sum(0) > 1).any())


def test_bars_are_of_problems_that_there_are() -> None:
    bars = json.loads((Path(common.__file__).parent / "bars.json").read_text())
    assert bars["gpu"] == "H200"
    for bar in bars["bars"]:
        for rows in bar["rows"]:
            one = FAMILY.problem(K3, tp=bar["tp"], rows=rows, kind=bar["kind"])
            assert CUTE.refuses(one, "sm_90a") is None
            assert bar["us"] > FAMILY.traffic(one).bytes / CARDS["sm_90a"].read_bandwidth * 1e6


def test_a_problem_without_a_kind_is_a_shard() -> None:
    data = problem(8, "shard").to_json()
    del data["kind"]
    assert FAMILY.problem_from_json(data) == problem(8, "shard")
