"""CuTe engines of the router: refusals, spaces, who makes and sends what, machine code; the PyTorch chain."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3, InputError
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.residency import refusal, room_by_card
from k3lab.kernels.router import arithmetic, common
from k3lab.kernels.router.choice_layout import Choice
from k3lab.kernels.router.layout import Board, Front, power_of_two
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources, sass
from k3lab.tuning.sass_order import WAIT, behind_fault, order, places, release_fault, unwaited, wait_fault

from .router_case import FAMILY, FUSED, MMA, config, engine_of, problem

CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WEIGHTS = r"LDG\.E\.NA\.LTC\S*128|LDG\.E\.NA\.128"
BIAS = r"LDG\.E\.NA\.64"
# where the compiler cannot prove that a warp is together, as behind polls that end lane by lane, it gives shuffles and votes
# a second form that first brings the warp together: out of line, so cold, and about a microsecond where it is taken
SLOW_PATHS = re.compile(r"BRA\.DIV|ENDCOLLECTIVE")


def drawn(one, card, count, seed=0):
    """Legal configs drawn point by point."""
    space, rng, found = engine_of(one).space(one, card), random.Random(seed), []
    while len(found) < count:
        point = {param.name: rng.choice(param.values) for param in space.params}
        if space.illegal(point) is None:
            found.append(point)
    return found


def test_refusals_say_why():
    assert FUSED.refuses(problem(64), "sm_103a") is None
    assert MMA.refuses(problem(8, "choice"), "sm_90a") is None
    assert "cute_fused has the whole step" in MMA.refuses(problem(8), "sm_90a")
    assert "cute_mma has its halves" in FUSED.refuses(problem(8, "front"), "sm_90a")
    assert "sm_80" in FUSED.refuses(problem(8), "sm_80")
    assert "hidden 4096 is not a multiple of 1792" in FUSED.refuses(problem(8, hidden=4096), "sm_90a")
    assert "do not go in pairs" in FUSED.refuses(problem(8, experts=57), "sm_90a")
    assert "1792 experts" in FUSED.refuses(problem(8, experts=112), "sm_90a")
    assert "top-12" in FUSED.refuses(problem(8, top_k=12), "sm_90a")
    assert "TP 32" in FUSED.refuses(problem(8, tp=32, experts=28), "sm_90a")
    small = FAMILY.problem(SMALL_K3, tp=4, rows=8)
    assert "hidden" in FUSED.refuses(small, "sm_90a")


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["uniform", "front", "choice"])
def test_defaults_are_legal_on_every_card_and_spaces_can_be_listed(tp, kind):
    from k3lab.tuning.propose import ENUMERABLE

    for rows in (1, 2, 3, 8, 12, 16, 24, 32, 48, 64):
        one = problem(rows, kind, tp)
        for card in CARDS.values():
            space = engine_of(one).space(one, card)
            assert space.illegal(space.default) is None, (rows, card.name)
            assert space.size <= ENUMERABLE


@pytest.mark.parametrize(
    ("rows", "kind", "change", "why"),
    [
        (8, "front", {"k_order": "invariant", "chunks": 2}, "invariant needs split_k 8, chunks 1, warps_k 4"),
        (8, "front", {"chunks": 4, "depth": 1}, "exceed the 16 rows of an MMA"),
        (8, "front", {"warps_k": 16}, "do not divide hidden 7168"),
        (8, "front", {"depth": 7}, "more steps in flight"),
        (8, "front", {"tile": 2, "split_k": 16, "chunks": 2, "warps_k": 7, "depth": 1}, "less than one load"),
        (8, "front", {"tile": 8, "warps_n": 3}, "leave one without work"),
        (8, "front", {"tile": 56, "split_k": 1, "chunks": 1, "depth": 1}, "too few blocks"),
        (64, "front", {"tile": 96, "split_k": 8}, "exceed a thread's registers"),
        (8, "uniform", {"choosers": 4}, "some without one of 8 rows"),
        (64, "uniform", {"split_k": 1, "tile": 2, "warps_n": 1, "warps_k": 14, "depth": 1}, "cannot share the choice of 64 rows"),
        (64, "uniform", {"warps_n": 1, "warps_k": 14}, "H200 does not hold their clusters of 8"),
        (8, "choice", {"blocks": 16}, "blocks without a row"),
        (64, "choice", {"blocks": 1, "warps": 4}, "too many rows for warps"),
        (8, "choice", {"release": "loads"}, "loads no weights"),
    ],
)  # fmt: skip
def test_illegal_configs_are_explained(rows, kind, change, why):
    one = problem(rows, kind)
    space = engine_of(one).space(one, CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_invariant_configs_share_what_a_sum_depends_on():
    orders = set()
    for rows, tp, kind in (
        (1, 16, "front"),
        (8, 8, "front"),
        (64, 4, "front"),
        (1, 16, "uniform"),
        (64, 16, "uniform"),
    ):
        one = problem(rows, kind, tp)
        space = engine_of(one).space(one, CARDS["sm_90a"]).restricted({"k_order": "invariant"})
        orders.add(engine_of(one).summation_order(one, space.default).split("; the chosen")[0])
    assert len(orders) == 1


# -- index arithmetic, on integers --------------------------------------------------------------
def fronts():
    """Fronts of all kinds of shape."""
    for tp in (8, 16):
        for rows in (1, 3, 8, 33):
            for tile, split, chunks, warps_n, warps_k in (
                (2, 1, 8, 1, 14), (4, 1, 8, 1, 7), (16, 8, 2, 1, 7), (24, 8, 1, 1, 7), (56, 16, 1, 2, 7), (40, 4, 1, 3, 4),
            ):  # fmt: skip
                if chunks == 1 or chunks * power_of_two(rows) <= 16:
                    yield Front(Board(tp, rows, 896 // tp, 3584 // tp), 7168, tile, split, chunks, 1, warps_n, warps_k)


def test_every_pair_is_sent_once_to_every_rank_and_lies_where_readers_look():
    for front in fronts():
        sheet = front.board
        written: Counter = Counter()
        for part in range(front.split):
            sent = Counter(
                (front.rank(t), front.place(t, turn))
                for t in range(front.threads) for turn in range(front.turns)
                if front.rank(t) < sheet.ranks and front.place(t, turn) < front.share
            )  # fmt: skip
            assert set(sent.values()) == {1} and len(sent) == sheet.ranks * front.share
            written.update(part * front.share + place for rank, place in sent if rank == 0)
        assert all(written[pair] == 1 for pair in range(front.pairs))
        # neighbours in the shared sums are the pairs of a row
        assert front.columns * 2 == front.tile
        words = Counter()
        for tile in range(front.tiles):
            for pair in range(front.pairs):
                row, n = pair // front.columns, tile * front.tile + pair % front.columns * 2
                if n < front.outputs:
                    words[row, sheet.word(n)] += 1
                    if n < sheet.logits:
                        words[row, sheet.word(n) + 1] += 1
        assert words == Counter({(row, word): 1 for row in range(sheet.rows) for word in range(sheet.words)})


def test_packets_lie_in_the_mailbox_where_the_layout_says():
    sheet = Board(16, 5, 56, 224)
    for epoch in (1, 2, 2**31):
        for row in range(5):
            for word in range(sheet.words):
                assert sheet.within(epoch & 1, row, word) == sheet.mail.within(epoch, row, word)
    assert sheet.slot_bytes == 2 * 5 * 168 * 8


CHOICES = [
    Choice(Board(16, rows, 56, 224), 16, blocks, warps)
    for rows, blocks in ((1, 1), (8, 8), (8, 4), (64, 16)) for warps in (4, 7, 8, 14, 16, 28, 32)
]  # fmt: skip


@pytest.mark.parametrize("choice", [one for one in CHOICES if common.choice_faults(one) is None])
def test_every_expert_has_one_lane_and_enough_groups(choice):
    held = Counter(
        choice.pair(lane, index) for lane in range(choice.lanes) for index in range(choice.pairs_a_lane)
        if choice.pair(lane, index) < choice.pairs
    )  # fmt: skip
    assert held == Counter(dict.fromkeys(range(448), 1))
    for lane in range(choice.lanes):  # ascending, so that the first of equal ones is the lowest
        mine = [choice.pair(lane, index) for index in range(choice.pairs_a_lane)]
        assert mine == sorted(mine)
    groups = {
        (lane // 32, lane % 32 % choice.groups_a_warp) for lane in range(choice.lanes) if choice.pair(lane, 0) < 448
    }
    assert choice.top_k <= choice.filled == len(groups) <= choice.groups <= 32
    assert [choice.place(pair) for pair in (0, 27, 28, 447)] == [(0, 0), (0, 54), (1, 0), (15, 54)]
    # all experts of as many groups as are chosen
    sizes = Counter()
    for lane in range(choice.lanes):
        own = sum(2 for index in range(choice.pairs_a_lane) if choice.pair(lane, index) < 448)
        sizes[lane // 32, lane % 32 % choice.groups_a_warp] += own
    assert sum(sorted(sizes.values())[-16:]) <= choice.most


def test_the_kernels_sigmoid_has_the_constants_of_the_exact_one():
    from k3lab.kernels.router.cute_words import SIGMOID

    a = arithmetic
    numbers = (
        a.LEAST, a.LOG2E, a.MAGIC, a.MAGIC, -a.LN2_HIGH, -a.LN2_LOW, *a.POLYNOMIAL, a.BIG, float("inf"), 1.0, float("nan"),
    )  # fmt: skip
    assert re.findall(r"0f([0-9A-F]{8})", SIGMOID) == [f"{a.fp32_bits(number):08X}" for number in numbers]


# -- machine code -------------------------------------------------------------------------------
SHAPES = [
    ("sm_90a", 1), ("sm_90a", 8), ("sm_90a", 64), ("sm_100a", 8), ("sm_103a", 1),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("sm_100a", 1), ("sm_103a", 8))),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "rows"), SHAPES)
def test_machine_code_of_fronts(arch, rows):
    """The default, and another one from anywhere in the space."""
    one = problem(rows, "front")
    space = MMA.space(one, CARDS[arch])
    for chosen in (space.default, *drawn(one, CARDS[arch], 1 if arch == "sm_90a" else 0, seed=rows)):
        (launch,) = MMA.compile(one, chosen, arch).launches
        found, front, code = kernel_resources(launch), common.front_of(one, chosen), order(launch.cubin)
        assert found.kernel.startswith("k3_router_cute_mma_front"), chosen
        assert found.spill_instructions == 0 and found.stack_bytes == 0, chosen
        assert (launch.cluster, launch.pdl, launch.needs_residency) == ((front.split, 1, 1), True, False)
        assert found.dynamic_shared_bytes == front.shared_bytes <= CARDS[arch].shared_per_block
        assert wait_fault(code, WEIGHTS, ahead=min(front.depth, front.steps) * front.n_tiles) is None, chosen
        assert release_fault(code, WEIGHTS, chosen["release"]) is None, chosen
        assert len(places(code, r"UCGABAR_WAIT")) == (1 if front.split > 1 else 0)
        assert not places(code, r"MEMBAR\.(ALL|SC)\.(GPU|SYS)"), "packets need no fence"


def test_machine_code_of_a_default_front_at_one_row_is_short():
    """Between the last weight and the packets: two MMAs a load, one barrier, five shuffles a sum, one store a word."""
    one = problem(1, "front")
    (launch,) = MMA.compile(one, config(one), "sm_103a").launches
    found = kernel_resources(launch)
    assert found.instructions["HMMA"] == 8
    assert (found.instructions["BAR"], found.instructions["SHFL"]) == (1, 10)
    assert sum(found.instructions.values()) < 320


@pytest.mark.parametrize(("arch", "rows"), SHAPES)
def test_machine_code_of_steps(arch, rows):
    one = problem(rows)
    chosen = engine_of(one).space(one, CARDS[arch]).default
    (launch,) = FUSED.compile(one, chosen, arch).launches
    found, front, choice = kernel_resources(launch), common.front_of(one, chosen), common.choice_of(one, chosen)
    code = order(launch.cubin)
    assert found.kernel.startswith("k3_router_cute_fused_step")
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert launch.needs_residency and launch.pdl
    assert launch.grid[0] == (front.tiles + 2 * chosen["choosers"]) * front.split
    assert launch.shared_bytes == max(front.shared_bytes, choice.shared_bytes)
    # a role each: makes and publishes, chooses, copies. Each waits, and asks for nothing but weights and biases before.
    waits = places(code, WAIT)
    assert len(waits) == 3 and not any(code[place].predicated for place in waits)
    before = [code[place] for place in unwaited(code)]
    early = [one.mnemonic for one in before if re.match(r"(LDG|LD|STG|ST|ATOM|RED)\.", one.mnemonic)]
    assert {bool(re.fullmatch(f"{WEIGHTS}|{BIAS}", one)) for one in early} == {True}
    assert sum(bool(re.fullmatch(WEIGHTS, one)) for one in early) >= min(front.depth, front.steps) * front.n_tiles
    # each role releases behind its own: the experts may read x early
    assert chosen["release"] == "loads" and len(places(code, "PREEXIT")) == 3
    assert FUSED.releases_behind(chosen) and behind_fault(code) is None
    assert not places(code, r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")
    assert not SLOW_PATHS.search(sass(launch.cubin))


def test_machine_code_of_steps_with_several_rows_a_block_has_no_slow_paths():
    one = problem(2)
    chosen = config(one) | {"choosers": 1}
    assert common.choice_of(one, chosen).rows_a_block > 1
    (launch,) = FUSED.compile(one, chosen, "sm_90a").launches
    assert not SLOW_PATHS.search(sass(launch.cubin))


@pytest.mark.parametrize(("tp", "rows"), [(16, 17), (16, 33), (8, 24)])
def test_all_clusters_of_a_default_step_are_there_at_once_with_the_registers_they_have(tp, rows):
    """A warp's registers come from one of four parts of an SM: not every block that fits by their sum does."""
    one, card = problem(rows, tp=tp), CARDS["sm_90a"]
    (launch,) = FUSED.compile(one, config(one), "sm_90a").launches
    found = kernel_resources(launch)
    warps = card.registers_per_sm // 4 // (-(-found.registers // 8) * 8 * 32) * 4
    a_sm = min(warps * 32 // launch.threads, card.shared_per_sm // (launch.shared_bytes + 1024))
    assert refusal(launch, room_by_card(launch, a_sm, card)) is None


@pytest.mark.parametrize(("arch", "rows"), [("sm_90a", 64), ("sm_100a", 1), ("sm_103a", 8)])
def test_machine_code_of_choices(arch, rows):
    one = problem(rows, "choice")
    (launch,) = MMA.compile(one, config(one), arch).launches
    found, code = kernel_resources(launch), order(launch.cubin)
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert found.registers <= 40 and found.dynamic_shared_bytes <= 48 * 1024
    assert wait_fault(code, BIAS) is None


# -- what a user would write --------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["uniform", "zipf", "hot", "front", "choice"])
def test_the_pytorch_chain_computes_what_the_twin_does(kind):
    one = problem(5, kind)
    inputs = FAMILY.inputs(one, 2)
    found, wanted = FAMILY.operators(one)(inputs), FAMILY.twin(one, inputs)
    for name, (_, dtype) in FAMILY.output_specs(one).items():
        assert found[name].dtype == getattr(torch, dtype)
        result = compare(name, found[name], wanted[name], FAMILY.tolerance(one, name))
        assert result.ok, result.message


def test_bars_are_of_problems_that_there_are():
    import json
    from pathlib import Path

    bars = json.loads((Path(common.__file__).parent / "bars.json").read_text())
    assert bars["gpu"] == "H200"
    for bar in bars["bars"]:
        for rows in bar["rows"]:
            one = FAMILY.problem(K3, tp=bar["tp"], rows=rows, kind=bar["kind"])
            assert engine_of(one).refuses(one, "sm_90a") is None
            assert bar["us"] > FAMILY.traffic(one).bytes / CARDS["sm_90a"].read_bandwidth * 1e6


def test_a_wrong_profile_is_refused():
    from k3lab.kernels.router.profiles import frequencies

    with pytest.raises(InputError, match="unknown routing profile 'cold'"):
        frequencies("cold", 896)
    with pytest.raises(InputError, match="one positive frequency"):
        frequencies([1.0] * 895, 896)
