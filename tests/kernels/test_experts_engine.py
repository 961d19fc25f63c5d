"""The cute engine of the experts: what it refuses, its space, and the machine code of its configs."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from k3lab.kernels import K3, SMALL_K3, family
from k3lab.kernels.contract import Launch
from k3lab.kernels.experts.cute_engine import plan_of, registers
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.residency import concerned, refusal, room_by_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import kernel_resources, sass
from k3lab.tuning.sass_order import order, places, release_fault, wait_fault

FAMILY = family("experts")
ENGINE = FAMILY.engine("cute")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WEIGHTS = r"LDG\.E\.NA(\..*)?"
WORDS = r"LDG\.E\.NA\..*128.*"


def problem(rows, kind="bf16", tp=16):
    return FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)


def config(one, arch="sm_90a", **change):
    space = ENGINE.space(one, CARDS[arch])
    chosen = {**space.default, **change}
    assert space.illegal(chosen) is None, space.illegal(chosen)
    return chosen


@cache
def compiled(rows, kind, arch, tp, change) -> Launch:
    one = problem(rows, kind, tp)
    (launch,) = compile_config(ENGINE, one, config(one, arch, **dict(change)), arch).launches
    return launch


def built(rows, kind="bf16", arch="sm_90a", tp=16, **change):
    return compiled(rows, kind, arch, tp, tuple(sorted(change.items())))


def test_refusals_say_why():
    assert ENGINE.refuses(problem(64), "sm_103a") is None
    assert "sm_80" in ENGINE.refuses(problem(1), "sm_80")
    assert "latent 64 is not a multiple of 512" in ENGINE.refuses(FAMILY.problem(SMALL_K3, tp=1, rows=1), "sm_90a")
    assert "8192 experts" in ENGINE.refuses(dataclasses.replace(problem(1), experts=8192), "sm_90a")
    assert "64 of them" in ENGINE.refuses(dataclasses.replace(problem(64), top_k=64), "sm_90a")


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["bf16", "routed", "mxfp8_ceil_floor"])
def test_spaces_are_legal_and_their_grids_fit_at_once(card, tp, kind):
    for rows in (1, 7, 8, 33, 64):
        one = problem(rows, kind, tp)
        space = ENGINE.space(one, card)
        assert space.illegal(space.default) is None
        for chosen in space.legal:
            made = plan_of(one, chosen)
            assert made.refusal() is None
            assert made.blocks == chosen["per_sm"] * card.sms
            assert registers(made) * made.threads * chosen["per_sm"] <= card.registers_per_sm


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k_order": "invariant"}, "invariant needs warps 8"),
        ({"depth": 4}, "do not divide the widths"),
        ({"tasks": 2}, "do not divide the widths"),
        ({"per_sm": 2}, "exceeds the registers"),
        ({"warps": 8, "per_sm": 2}, "exceeds the registers"),
    ],
)
def test_illegal_configs_are_explained(change, why):
    space = ENGINE.space(problem(8), CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_there_is_an_invariant_choice_in_one_order_at_any_rows_and_tp():
    orders = set()
    for rows, tp, kind in ((1, 16, "bf16"), (8, 8, "routed"), (32, 4, "mxfp8_ceil"), (64, 16, "bf16")):
        one = problem(rows, kind, tp)
        space = ENGINE.space(one, CARDS["sm_90a"]).restricted({"k_order": "invariant"})
        orders.add(ENGINE.summation_order(one, space.default))
        assert space.default["warps"] == 8
    assert len(orders) == 1


CODE = [
    ("sm_90a", 1, "routed", 16), ("sm_90a", 1, "bf16", 16), ("sm_90a", 8, "bf16", 16), ("sm_103a", 8, "bf16", 16), ("sm_100a", 64, "routed", 16), ("sm_90a", 40, "mxfp8_ceil_floor", 8),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "rows", "kind", "tp"), CODE)
def test_machine_code(arch, rows, kind, tp):
    """Weights of the shared expert in flight before the wait and nothing else; no step spills; all that is loaded is multiplied."""
    launch = built(rows, kind, arch, tp)
    one = problem(rows, kind, tp)
    made = plan_of(one, config(one, arch))
    found, code = kernel_resources(launch), order(launch.cubin)
    assert found.kernel.startswith("k3_experts_cute_stream")
    assert launch.pdl and launch.needs_residency and concerned(launch)
    assert refusal(launch, room_by_card(launch, 1, CARDS[arch])) is None
    assert found.registers * found.threads <= 65536 and found.dynamic_shared_bytes <= CARDS[arch].shared_per_block
    assert found.registers <= registers(made) + 16 or made.threads < 512
    # a handful of values that live across all units, none of them in a step
    assert found.spill_instructions <= 8 and found.stack_bytes <= 16
    assert wait_fault(code, WEIGHTS, ahead=made.depth if made.wide else 0) is None
    assert release_fault(code, WEIGHTS, "loads") in (
        None,
        "the release does not lie between the last load of weights and the first store",
    )
    (release,), loads = places(code, "PREEXIT"), places(code, WORDS)
    assert loads[-1] < release < places(code, r"STG\..*")[-1]
    # two tiles of two MMAs for every load of routed weights, two for each of 16 rows of the shared expert's
    steps = made.steps1 + made.steps2
    shared = (made.shared_steps1 + made.shared_steps2) * made.row_tiles if made.wide else 0
    assert len(places(code, r"HMMA\.16816\.F32\.BF16")) == 4 * steps + 2 * shared


@pytest.mark.parametrize(("arch", "rows", "kind", "tp"), CODE)
def test_no_shuffle_doubts_that_its_warp_is_together(arch, rows, kind, tp):
    """Where lanes leave a poll one by one, each later shuffle has a slow path out of line; in other kernels an H200 took it: cold code."""
    text = sass(built(rows, kind, arch, tp).cubin)
    assert "SHFL" in text
    assert "BRA.DIV" not in text and "ENDCOLLECTIVE" not in text


@pytest.mark.parametrize("rows", [1, 8])
def test_what_a_layer_runs_by_default_spills_nothing(rows):
    """16 warps of 128 registers are all an SM has: see where a number takes an address's place."""
    found = kernel_resources(built(rows))
    assert found.registers <= 128 and found.spill_instructions == 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_blocks_for_the_shared_expert_alone_are_the_same_code_but_for_who_takes_what(arch):
    """Weights are in flight before the wait all the same, and every product is there once."""
    one, found = problem(8, "bf16"), []
    for reserved in (0, 16):
        (launch,) = compile_config(ENGINE, one, config(one, arch, reserved=reserved), arch).launches
        code, held = order(launch.cubin), kernel_resources(launch)
        assert held.spill_instructions <= 8 + (2 if reserved else 0)  # how far units lie apart lives across all of them
        assert wait_fault(code, WEIGHTS, ahead=plan_of(one, config(one, arch)).depth) is None
        found.append((len(code), len(places(code, "HMMA.*")), len(places(code, WORDS))))
    (few, *steps), (many, *others) = found
    assert steps == others and few < many < few + 128


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_a_single_row_asks_for_its_activations_and_experts_first_and_meets_no_barrier_before_its_weights(arch):
    """What all warps need is no part of the weights' queue; nothing is waited for together until sums are added."""
    launch = built(1, "routed", arch)
    code, made = order(launch.cubin), plan_of(problem(1, "routed"), config(problem(1, "routed"), arch))
    first, whole = places(code, WEIGHTS)[0], r"LDG\.E\.128"
    assert made.known and made.stashed and made.x_depth == made.steps1
    assert len([at for at in places(code, whole) if at < first]) == made.x_depth == len(places(code, whole))
    assert places(code, r"BAR\..*")[0] > places(code, r"HMMA.*")[0] > first


def counts(launch):
    """Instructions by what they are for."""
    code = order(launch.cubin)
    return {
        "bits": len(places(code, r"LOP3\..*|SHF\.[LR].*|PRMT|IMAD\.SHL.*")),
        "steps": len(places(code, r"HMMA.*")) // 4,
        "sums": len(places(code, r"FFMA")),
        "all": len(code),
    }


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_a_weight_becomes_an_operand_in_one_instruction_and_a_step_takes_two_a_weight(arch):
    """What 14 more steps of the first product add, 32 weights a lane and step: those of twice the columns.

    Eight of a step's instructions take four scales from their word: four masks, four shifts.
    """
    chosen, found = config(problem(8, "routed"), arch, warps=8, x_depth=2), []
    for latent in (3584, 7168):
        one = dataclasses.replace(problem(8, "routed"), latent=latent)
        (launch,) = compile_config(ENGINE, one, chosen, arch).launches
        found.append(counts(launch))
    few, many = found
    steps = many["steps"] - few["steps"]
    assert steps == 14
    added = {name: (many[name] - few[name]) / steps for name in few}
    assert 31 <= added["bits"] - 8 <= 1.05 * 32, (
        "bit operations a step beside those of its scales: at most 1.25 a weight are allowed"
    )
    assert added["bits"] <= 1.3 * 32
    assert 8 <= added["sums"] <= 8.5
    assert added["all"] <= 2.1 * 32
