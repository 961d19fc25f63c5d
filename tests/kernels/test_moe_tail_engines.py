"""The tail's engine: refusals, space, machine code, the PyTorch chain."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from k3lab.kernels import SMALL_K3, InputError
from k3lab.kernels.moe_tail import common
from k3lab.kernels.moe_tail.cute_fused_engine import INVARIANT
from k3lab.kernels.residency import refusal, room_by_card
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import WAIT, order, places, unwaited

from .moe_tail_case import CARDS, FAMILY, FUSED, config, problem


def test_refusals_say_why():
    assert FUSED.refuses(problem(), "sm_103a") is None
    assert "sm_80" in FUSED.refuses(problem(), "sm_80")
    assert "hidden 7000" in FUSED.refuses(problem(hidden=7000), "sm_90a")
    assert "at most 16 warps of 512" in FUSED.refuses(problem(hidden=16384), "sm_90a")
    assert "latent 3000" in FUSED.refuses(problem(latent=3000), "sm_90a")
    assert "9 saved blocks" in FUSED.refuses(problem(blocks=9), "sm_90a")
    assert "TP 32" in FUSED.refuses(problem(tp=32), "sm_90a")
    assert "65 rows" in FUSED.refuses(dataclasses.replace(problem(), rows=65), "sm_90a")
    with pytest.raises(InputError, match="there is peer alone"):
        FUSED.compile(problem(), {**config(problem()), "stores": "multicast"}, "sm_90a")


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("rows", [*range(1, 9), 12, 16, 24, 32, 33, 48, 64])
def test_defaults_are_legal_and_fit_on_every_card(tp, rows):
    from k3lab.tuning.propose import ENUMERABLE

    one = problem(rows, tp)
    assert FUSED.refuses(one, "sm_90a") is None
    for card in CARDS.values():
        space = FUSED.space(one, card)
        assert space.illegal(space.default) is None and space.size <= ENUMERABLE
        for chosen in space.legal:
            shape = common.cut(one, chosen)
            clusters = sum(sms // shape.split for sms in card.gpc_sms)
            assert shape.blocks % shape.split == 0 and shape.blocks <= clusters * shape.split
            assert shape.finishing * int(chosen["rows_each"]) >= rows


@pytest.mark.parametrize(
    ("tp", "rows", "change", "why"),
    [
        (4, 8, {"split_k": 8}, "more than the 132 SMs"),
        (8, 16, {"split_k": 8}, "more clusters of 8 than the GPCs"),
        (16, 1, {"rows_each": 2}, "one row has one block"),
        (16, 8, {"k_order": "invariant", "split_k": 4}, "invariant needs split_k 8"),
        (16, 64, {"split_k": 4, "exchange": "one_shot"}, "exceed a thread's registers"),
        (4, 8, {"at_once": 8}, "8 at once of TP 4"),
    ],
)
def test_illegal_configs_are_explained(tp, rows, change, why):
    space = FUSED.space(problem(rows, tp), CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_invariant_configs_share_what_the_sum_depends_on():
    orders = set()
    for rows, tp in ((1, 16), (8, 16), (64, 16), (8, 8)):
        one = problem(rows, tp)
        chosen = config(one, **INVARIANT, k_order="invariant")
        assert FUSED.space(one, CARDS["sm_90a"]).illegal(chosen) is None
        orders.add(FUSED.summation_order(one, chosen))
    assert len(orders) == 1


def test_the_bars_are_those_of_the_issue():
    bars = json.loads((Path(common.__file__).parent / "bars.json").read_text())
    assert [(bar["rows"], bar["us"]) for bar in bars["bars"]] == [([1, 1], 6.0), ([2, 8], 8.0)]
    assert {bar["tp"] for bar in bars["bars"]} == {16} and bars["gpu"] == "H200"


def test_work_grows_with_the_hand_overs_and_two_shots_move_less():
    one = problem(8, 16)
    shots = [FUSED.work(one, config(one, exchange=how)) for how in ("one_shot", "two_shot")]
    assert shots[0].link_bytes > 2 * shots[1].link_bytes and shots[0].link_hops == 2
    assert shots[1].dependent_steps == shots[0].dependent_steps + 1 and shots[1].link_hops == 3


@pytest.mark.parametrize(
    ("arch", "tp", "rows", "change"),
    [
        ("sm_90a", 16, 1, {}), ("sm_90a", 16, 8, {}), ("sm_103a", 16, 8, {}), ("sm_90a", 16, 8, {"exchange": "one_shot", "release": "entry"}),
        ("sm_103a", 4, 8, {"release": "end", "backoff": 20}), ("sm_90a", 16, 64, {}),
    ],
)  # fmt: skip
def test_machine_code(arch, tp, rows, change):
    """No spills; weights on their way before either wait and nothing else; packets are single accesses; waits look."""
    one = problem(rows, tp)
    chosen = config(one, arch, **change)
    assert FUSED.space(one, CARDS[arch]).illegal(chosen) is None
    made = FUSED.compile(one, chosen, arch)
    (launch,), shape = made.launches, common.cut(one, chosen)
    found, code = kernel_resources(launch), order(launch.cubin)
    assert launch.kernel.startswith("k3_moe_tail_cute_fused_step")
    assert (launch.blocks, launch.pdl, launch.needs_residency) == (shape.blocks, True, True)
    assert launch.cluster == (shape.split, 1, 1) and refusal(launch, room_by_card(launch, 1, CARDS[arch])) is None
    assert found.spill_instructions == 0 and found.stack_bytes == 0 and found.registers <= common.LEAST_REGISTERS
    assert found.dynamic_shared_bytes == launch.shared_bytes >= shape.memory_bytes
    assert not any(code[place].mnemonic == "EXIT" for place in unwaited(code)), "a block ends without its wait"
    # behind a loop that lanes leave one by one every shuffle takes a slow way, about 1 us on an H200
    assert not places(code, r"BRA\.DIV.*|.*COLLECTIVE.*")
    # one wait for the making blocks, one for the others; each thread passes one
    waits = places(code, WAIT)
    assert len(waits) == 2 and not any(code[wait].predicated for wait in waits)
    loads = places(code, r"LDG\..*|LD\..*|LDGSTS.*")
    exits = [place for place in places(code, "EXIT") if waits[0] < place < waits[1]]
    weights = [code[place].mnemonic for place in loads if place < waits[0]]
    # of the up-projection nothing is loaded: copies bring it, ahead of all loads, which so have nothing to wait behind
    assert weights == ["LDG.E.NA.64"]
    copies = places(code, r"UTMALDG.*")
    assert len(copies) == shape.chunks_each and all(copy < loads[0] < waits[0] for copy in copies)
    between = [code[place].mnemonic for place in loads if exits[-1] < place < waits[1]]
    assert between == ["LDG.E.NA.128"] * 6
    stores = places(code, r"STG\..*|ATOM.*|RED\..*|REDG.*")
    assert not [place for place in stores if place < waits[0] or exits[-1] < place < waits[1]]
    releases = places(code, "PREEXIT")
    assert len(releases) == (0 if chosen["release"] == "end" else 2)
    assert all(any(release < wait for wait in waits) for release in releases)
    # packets: two in one access, to and from the other ranks at system scope; nothing is fenced
    assert not places(code, r"(STG|LDG)\.E\.(64\.)?STRONG\.SYS|MEMBAR.*|ERRBAR.*")
    ahead = min(shape.tasks_ahead, shape.turns)
    batches = 2 if shape.turns > ahead else 1  # the first one, and those of a loop
    sends = batches * ahead * shape.ranks_each + shape.quads_each + shape.two_shot
    assert len(places(code, r"STG\.E\.128\.STRONG\.SYS")) == sends
    assert len(places(code, r"STAS\.128")) == 2
    assert bool(places(code, "NANOSLEEP")) == (chosen["backoff"] > 0)
    assert len(places(code, r"HMMA\.16816\.F32\.BF16")) == 2 * 8 * shape.chunks_each
    # each wait looks at the clock and can claim the record
    rounds = shape.rounds // shape.rounds_at_once
    at_once = -(-tp // min(tp, int(chosen["at_once"])))
    waits_of_ranks = (rounds + at_once if shape.two_shot else rounds * at_once) + at_once + 1
    assert len(places(code, r"ATOMG\.E\.CAS\.STRONG\.GPU")) == waits_of_ranks


@pytest.mark.parametrize(
    ("tp", "rows", "change"),
    [
        (8, 64, {}), (16, 64, {"split_k": 4, "exchange": "one_shot", "at_once": 8}),
        pytest.param(8, 12, {}, marks=pytest.mark.slow), pytest.param(4, 64, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_wide_shares_of_many_rows_do_not_spill(tp, rows, change):
    """Four blocks a cluster: two runs of latents a warp, and rows in several passes."""
    one = problem(rows, tp)
    chosen = config(one, **change)
    assert FUSED.space(one, CARDS["sm_90a"]).illegal(chosen) is None
    (launch,) = FUSED.compile(one, chosen, "sm_90a").launches
    assert kernel_resources(launch).spill_instructions == 0


def test_the_third_architecture_compiles_without_spills():
    one = problem(8, 16)
    (launch,) = FUSED.compile(one, config(one, "sm_100a"), "sm_100a").launches
    assert kernel_resources(launch).spill_instructions == 0


@pytest.mark.parametrize("blocks", [0, 3])
def test_any_number_of_saved_blocks_compiles(blocks):
    one = problem(2, 8, blocks=blocks)
    (launch,) = FUSED.compile(one, config(one), "sm_90a").launches
    assert kernel_resources(launch).spill_instructions == 0 and len(launch.args) == 23


def test_delays_are_compiled_in_only_when_asked_for():
    one = problem()
    (launch,) = FUSED.compile(one, {**config(one), "jitter": 7}, "sm_90a").launches
    assert places(order(launch.cubin), "NANOSLEEP")  # and none without: see the machine code above


def test_buffers_are_kept_and_the_record_is_among_them():
    one = problem()
    shapes = [common.cut(one, config(one, exchange=how)) for how in ("one_shot", "two_shot")]
    one_shot, two_shot = ({buffer.name: buffer for buffer in common.buffers(shape)} for shape in shapes)
    assert set(two_shot) - set(one_shot) == {"totals", "totals_targets"} and "health" in one_shot
    assert all(buffer.persistent or buffer.targets_of for buffer in two_shot.values())
    assert {arg.name for arg in common.tensor_args(shapes[0]).values()} >= set(one_shot)


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_the_chain_of_operators_equals_the_twin(tp):
    one = dataclasses.replace(FAMILY.problem(SMALL_K3, tp=1, rows=3), tp=tp)
    inputs = FAMILY.inputs(one, 1)
    outputs = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in FAMILY.output_specs(one).items()
    }
    twin = FAMILY.expected(one, {}, inputs)
    FAMILY.alternative(one, {**inputs, **outputs})()
    for found in (outputs, FAMILY.operators(one)(inputs)):
        for name in FAMILY.outputs:
            result = compare(name, found[name], twin[name], FAMILY.tolerance(one, name))
            assert result.ok, result.message
