"""Who does what in the experts' kernel: every element of every product once, no two lanes in one bank, places that fit."""

from __future__ import annotations

import dataclasses

import pytest
from k3lab.kernels import K3, family
from k3lab.kernels.experts.cute_engine import buffers, plan_of
from k3lab.kernels.experts.plan import PART, Plan
from k3lab.kernels.gpu_cards import gpu_card

FAMILY = family("experts")
ENGINE = FAMILY.engine("cute")


def plan(rows: int, tp: int = 16, kind: str = "bf16", **change: int) -> Plan:
    problem = FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)
    return plan_of(problem, {**ENGINE.space(problem, gpu_card("H200")).default, **change})


SHAPES = [
    plan(1),
    plan(1, kind="routed"),
    plan(8),
    plan(8, warps=8, tasks=2, per_sm=2, x_depth=2),
    plan(64),
    plan(8, 8),
    plan(8, 4),
    plan(33, 16, "routed", tasks=7),
    plan(8, tasks=7),
    plan(8, tasks=7, reserved=16),
]


@pytest.mark.parametrize("made", SHAPES)
def test_units_cover_every_block_of_the_weights_once(made: Plan) -> None:
    assert made.refusal() is None
    for expert in (0, 895):
        first = [
            made.first_block(expert, tile, warp) + step
            for tile in range(made.tiles) for warp in range(made.warps) for step in range(made.steps1)
        ]  # fmt: skip
        count = made.tiles * made.groups1
        assert sorted(first) == list(range(expert * count, (expert + 1) * count))
        second = [
            made.second_block(expert, chunk, warp) + step
            for chunk in range(made.chunks) for warp in range(made.warps) for step in range(made.steps2)
        ]  # fmt: skip
        count = made.groups1 * made.groups2
        assert sorted(second) == list(range(expert * count, (expert + 1) * count))
    if made.wide:
        first = [
            made.shared_first_block(unit, warp) + step
            for unit in range(made.shared_first) for warp in range(made.warps) for step in range(made.shared_steps1)
        ]  # fmt: skip
        assert sorted(first) == list(range(2 * made.wide // 8 * made.hidden // 32))
        second = [
            made.shared_second_block(unit, warp) + step
            for unit in range(made.shared_second) for warp in range(made.warps) for step in range(made.shared_steps2)
        ]  # fmt: skip
        assert sorted(second) == list(range(made.hidden // 8 * made.wide // 32))


def units_of(made: Plan) -> list[list[tuple[str, int]]]:
    """Units of each block for a single row, in its order: numbers dealt in turn, but for those that are left out or kept together."""
    numbers: list[tuple[str, int] | None] = [("shared first", unit) for unit in range(made.shared_first)]
    firsts = [("first", unit) for unit in range(made.top_k * made.tiles)]
    before = made.blocks - made.shared_first if made.hole else 0
    numbers += [*firsts[:before], *([None] * made.hole), *firsts[before:]]
    numbers += [("shared second", unit) for unit in range(made.shared_second)]
    dealt: list[list[tuple[str, int]]] = [[] for _ in range(made.blocks)]
    for number, unit in enumerate(numbers):
        if unit:
            dealt[number % made.blocks].append(unit)
    for unit in range(made.top_k * made.chunks):
        place = made.spared + unit % (made.blocks - made.spared) if made.spared else (len(numbers) + unit) % made.blocks
        dealt[place].append(("second", unit))
    return dealt


@pytest.mark.parametrize(("sms", "most"), [(132, 2), (152, 1)])
def test_second_products_of_one_row_go_to_blocks_that_have_a_first_one_less(sms: int, most: int) -> None:
    """Two a block at most, and none behind two first products."""
    made = plan(1, kind="routed", sms=sms)
    assert made.spared == 192 - sms and not made.hole
    for units in units_of(made):
        kinds = [kind for kind, _ in units]
        assert kinds.count("second") <= (most if kinds.count("first") == 1 else 0)
    assert plan(8, kind="routed").spared == plan(8).spared == plan(8).hole == plan(1, kind="routed", sms=64).spared == 0


@pytest.mark.parametrize(("sms", "most"), [(132, 1.09), (152, 1.19)])
def test_one_row_and_a_shared_expert_are_nearly_even_shares(sms: int, most: float) -> None:
    """Bytes of the block that has most, beside the mean; all dealt in turn it would have 1.26 and 1.22 times as many."""
    made = plan(1, sms=sms)
    sizes = {
        "shared first": made.shared_steps1 * 512, "first": made.steps1 * 544,
        "shared second": made.shared_steps2 * 512, "second": made.steps2 * 544,
    }  # fmt: skip
    assert made.hole == made.shared_first == 96
    loads = [sum(sizes[kind] for kind, _ in units) for units in units_of(made)]
    assert max(loads) <= most * sum(loads) / made.blocks


def asked_ahead(made: Plan) -> list[tuple[int, int]]:
    """Steps in flight in a unit, which are those it asks for of the next one, and in the one behind it in some block."""
    routed, shared = (made.depth, made.depth2), (made.depth, made.shared_depth2)
    if not made.wide:
        return [routed]
    if made.reserved:
        return [routed, shared]
    # a block may lack units of any kind but the first
    return [(made.depth, made.depth), routed, shared, (made.shared_depth2, made.depth2)]


@pytest.mark.parametrize("made", SHAPES)
def test_the_ring_meets_its_slots_again_from_unit_to_unit(made: Plan) -> None:
    """A step of the next unit lands in the slot it is taken from: what is in flight divides the steps of each kind of unit."""
    assert made.steps1 % made.depth == made.steps1 % made.x_depth == made.steps2 % made.depth2 == 0
    for before, after in asked_ahead(made):
        assert after <= before, "a unit takes steps that the one before it never asked for"
    if made.wide:
        assert made.shared_steps1 % made.depth == made.shared_steps2 % made.shared_depth2 == 0
    assert made.groups2 % made.batch == 0


def test_no_two_lanes_share_a_bank() -> None:
    made = plan(8)
    for tile in range(2):
        for upper in range(2):
            for i in range(2):
                stored = {
                    made.part_at(1, 3, tile, 8 * upper + lane // 4, 2 * (lane % 4) + i) % 32 for lane in range(32)
                }
                assert len(stored) == 32
        for two in range(4):
            assert len({made.part_at(0, 2, tile, lane % 16, 2 * two + lane // 16) % 32 for lane in range(32)}) == 32
    words = [made.part_at(0, 0, 0, row, token) for row in range(16) for token in range(8)]
    assert len(set(words)) == 128 and max(words) < PART


@pytest.mark.parametrize("made", SHAPES)
def test_places_are_distinct_and_inside_their_buffers(made: Plan) -> None:
    sizes = {buffer.name: buffer.shape[0] for buffer in buffers(made)}
    pairs = min(made.pairs, 40)
    hidden = {
        made.hidden_at(pair, group, quad, half)
        for pair in range(pairs) for group in range(made.groups2) for quad in range(4) for half in range(2)
    }  # fmt: skip
    assert len(hidden) == pairs * made.groups2 * 8 == pairs * made.hidden_packets
    assert made.hidden_at(made.pairs - 1, made.groups2 - 1, 3, 1) == sizes["hidden"] - 1
    # who makes four hidden columns: tile t, rows 4 k to 4 k + 3
    made_by = {made.hidden_at(2, 0, 0, 0) + tile * 4 + quad for tile in range(made.tiles) for quad in range(4)}
    assert made_by == {
        made.hidden_at(2, group, q, h) for group in range(made.groups2) for q in range(4) for h in range(2)
    }
    assert made.output_at(made.pairs - 1, made.row_packets - 1) == sizes["outputs"] - 1
    last = made.part_at(1, made.warps - 1, 1, 15, 7)
    assert (
        last < made.parts and made.shared_part_at(1, made.warps - 1, made.rows - 1, 7) < made.parts
    ) or not made.wide


@pytest.mark.parametrize("made", SHAPES)
def test_an_items_word_keeps_its_parts(made: Plan) -> None:
    for expert in (0, 1, made.experts - 1):
        for place in (0, made.pairs - 1):
            for count in (1, 8):
                assert made.item_parts(made.item_word(expert, place, count)) == (expert, place, count)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"warps": 5}, "scale groups of the latent do not divide"),
        ({"depth": 5}, "do not divide the 7 of a warp"),
        ({"tasks": 2}, "do not divide latent 3584"),
        ({"latent": 64, "warps": 2}, "latent 64 is not a multiple of 128"),
        ({"hidden": 7168 + 512}, "7 steps in flight do not divide the 15 of a warp"),
        ({"inner": 200}, "are not multiples of 32"),
        ({"reserved": 132}, "132 of 132 blocks for the shared expert"),
        ({"reserved": 4, "wide": 0}, "4 of 132 blocks for a shared expert that is not there"),
    ],
)
def test_what_does_not_divide_is_said(change: dict[str, int], why: str) -> None:
    change = {"depth": 1, "x_depth": 1, **change} if "latent" in change else change
    assert why in (dataclasses.replace(plan(8), **change).refusal() or "")
