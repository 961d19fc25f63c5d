"""Engines of KDA: refusals, spaces, who does what, machine code, the declared contract; the PyTorch chain."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.kda import cute_engine
from k3lab.kernels.kda.layout import DIM, GATE_TILES, MOST_STEPS, Split
from k3lab.tuning.compare import compare
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import WAIT, behind_fault, order, places, release_fault, unwaited, wait_fault

from .kda_case import ENGINE, FAMILY, READ_EARLY, config, problem

CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
EARLY = r"LDG\.E\.NA.*|LDGSTS\..*"
"""Weights, slots and states: loads that stay out of L1, and copies to shared memory."""


def drawn(one, card, count, seed=0):
    """Legal configs drawn point by point."""
    space, rng, found = ENGINE.space(one, card), random.Random(seed), []
    while len(found) < count:
        point = {param.name: rng.choice(param.values) for param in space.params}
        if space.illegal(point) is None:
            found.append(point)
    return found


def test_refusals_say_why():
    assert ENGINE.refuses(problem(64), "sm_103a") is None
    assert "sm_80" in ENGINE.refuses(problem(8), "sm_80")
    assert "rank 64" in ENGINE.refuses(problem(8, gate_rank=64), "sm_90a")
    assert "heads of" in ENGINE.refuses(FAMILY.problem(SMALL_K3, tp=4, rows=8), "sm_90a")


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["plain", "verify2", "verify8"])
def test_defaults_are_legal_on_every_card_and_spaces_can_be_listed(tp, kind):
    from k3lab.tuning.propose import ENUMERABLE

    tokens = problem(64, kind).q_len
    for requests in (1, 2, 3, 8, 12, 16, 24, 32, 48, 64):
        if requests * tokens > 64:
            continue
        one = problem(requests * tokens, kind, tp)
        for card in CARDS.values():
            space = ENGINE.space(one, card)
            assert space.illegal(space.default) is None, (requests, card.name)
            assert space.size <= ENUMERABLE


def test_defaults_fill_an_h200_in_one_wave():
    def split(rows: int, kind: str = "plain") -> Split:
        return cute_engine.split_of(problem(rows, kind), config(problem(rows, kind)))

    shapes = {rows: (split(rows).parts, split(rows).together, split(rows).blocks) for rows in (1, 8, 32, 64)}
    assert shapes == {1: (8, 1, 48), 8: (2, 1, 96), 32: (2, 3, 132), 64: (2, 6, 132)}
    assert split(8, "verify8").blocks == 48


@pytest.mark.parametrize(
    ("rows", "kind", "change", "why"),
    [
        (8, "plain", {"k_order": "invariant", "parts": 2}, "invariant needs parts 4, warps 8, lanes 8"),
        (8, "verify4", {"together": 3}, "exceed the 8 columns of the gate's MMA"),
        (8, "verify4", {"together": 2}, "has a block of its own"),
        (4, "plain", {"together": 8}, "more requests a block than there are"),
        (8, "plain", {"depth": 2}, "more states in flight than a block has"),
        (8, "plain", {"parts": 16, "warps": 16, "lanes": 8}, "do not share out the rows of 16 parts"),
        (8, "plain", {"together": 4, "depth": 2, "release": "loads"}, "no last load before the stores"),
        (8, "plain", {"parts": 1, "warps": 4, "lanes": 8}, "exceed a thread's registers"),
        (8, "plain", {"together": 4, "run": 1}, "runs of 1 channels take more warps"),
        (8, "verify8", {"form": "wy", "lanes": 8, "parts": 4}, "8 are too few"),
        (2, "verify2", {"form": "wy", "run": 2}, "normalised keys"),
        (8, "plain", {"form": "wy"}, "form"),
    ],
)
def test_illegal_configs_are_explained(rows, kind, change, why):
    one = problem(rows, kind)
    space = ENGINE.space(one, CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_invariant_configs_share_what_a_sum_depends_on():
    orders = set()
    for rows, tp, kind in ((1, 16, "plain"), (64, 16, "plain"), (8, 8, "verify8"), (64, 4, "plain")):
        one = problem(rows, kind, tp)
        space = ENGINE.space(one, CARDS["sm_90a"]).restricted({"k_order": "invariant"})
        orders.add(ENGINE.summation_order(one, space.default))
    assert len(orders) == 1


# -- index arithmetic, on integers --------------------------------------------------------------
def splits():
    """Of all kinds of shape."""
    for rows, kind in ((1, "plain"), (5, "plain"), (64, "plain"), (8, "verify8"), (12, "verify3")):
        one = problem(rows, kind)
        for chosen in (config(one), *drawn(one, CARDS["sm_90a"], 12, seed=rows)):
            yield cute_engine.split_of(one, chosen)


def test_every_state_row_and_output_belongs_to_one_block():
    for split in splits():
        owned = Counter()
        for block in range(split.blocks):
            group, head, part = split.place(block)
            owned[group, head, part] += 1
        assert set(owned.values()) == {1}
        assert len(owned) == split.groups * split.heads * split.parts
        steps = [group * split.steps + s for group in range(split.groups) for s in range(split.steps)]
        assert set(range(split.requests * split.tokens)) <= set(steps) and len(set(steps)) == len(steps)
        # the blocks of a cluster are the parts of one head
        for first in range(0, split.blocks, split.parts):
            cluster = [split.place(first + i) for i in range(split.parts)]
            assert len({one[:2] for one in cluster}) == 1 and [one[2] for one in cluster] == list(range(split.parts))


def test_every_element_of_a_slice_is_in_one_register():
    for split in {dataclasses.replace(one, requests=1, together=1) for one in splits()}:
        held = Counter(
            (split.row(t, turn), 4 * split.quad(t, index) + key)
            for t in range(split.threads) for turn in range(split.turns)
            for index in range(split.quads) for key in range(4)
        )  # fmt: skip
        assert held == Counter({(row, key): 1 for row in range(split.slice_rows) for key in range(DIM)})
        assert split.state_words == 4 * split.turns * split.quads
        # lanes that share a row are neighbours, so that a butterfly adds them
        for t in range(split.threads):
            assert split.row(t, 0) == split.row(t // split.lanes * split.lanes, 0)


def test_every_query_key_value_and_gate_row_is_made_once():
    for split in splits():
        queries = Counter(
            share for warp in range(split.warps) for turn in range(split.query_turns)
            if (share := split.query(warp, turn))[0] < split.steps
        )  # fmt: skip
        assert queries == Counter((s, share) for s in range(split.steps) for share in range(split.spread))
        assert split.spread * 32 * split.run == DIM
        values = Counter(
            place for t in range(split.threads) for turn in range(split.value_turns)
            if (place := split.value(t, turn))[0] < split.steps
        )  # fmt: skip
        assert values == Counter((s, run) for s in range(split.steps) for run in range(split.slice_runs))
        # a thread's runs are of the same channels in every turn
        assert all(
            len({split.value(t, turn)[1] for turn in range(split.value_turns)}) == 1 for t in range(split.threads)
        )
        tiles = [warp + turn * split.warps for warp in range(split.warps) for turn in range(split.gate_turns)]
        assert [tile for tile in sorted(tiles) if tile < GATE_TILES] == list(range(GATE_TILES))


def test_sums_of_all_tokens_are_dealt_to_one_place_of_each_row_each():
    """Lanes as the halving butterfly leaves them, and keys over their decays as rows behind those of the state."""
    seen = 0
    for split in splits():
        if split.form != "wy":
            continue
        seen += 1
        for lane in range(32):
            first = lane // split.lanes * split.lanes
            for kind, step in itertools.product(range(2), range(split.padded_steps)):
                holder = split.holder(lane, kind, step)
                assert first <= holder < first + split.lanes and split.dealt(holder) == (kind, step)
        assert Counter(split.dealt(lane) for lane in range(split.lanes)) == Counter(
            {(kind, step): split.lanes_a_sum for kind in range(2) for step in range(split.padded_steps)}
        )
        rows = [split.key_row(t, turn) for t in range(split.threads) for turn in range(split.key_turns)]
        assert {row: rows.count(row) for row in rows if row < split.steps} == dict.fromkeys(
            range(split.steps), split.lanes
        )
    assert seen > 2


def test_shared_memory_is_laid_out_without_overlap_and_taps_meet_no_bank_twice():
    for split in splits():
        sizes = [
            (0, split.steps * split.vectors * DIM * 4), (split.values_at, split.steps * split.slice_rows * 4), (split.scalars_at, 2 * MOST_STEPS * 4),
            (split.factors_at, 8 * split.padded_steps**2 if split.form == "wy" else 0),
            (split.sums_at, split.warps * split.padded_steps * 4), (split.pushed_at, split.parts * split.padded_steps * 4),
            (split.taps_at, 16 * split.channels), (split.barrier_at, 16),
        ]  # fmt: skip
        for (at, size), (following, _) in itertools.pairwise(sizes):
            assert at + size <= following
            assert following % 16 == 0 or following in (split.pushed_at, split.sums_at)
        assert split.pushed_at % (4 * split.padded_steps // split.packets) == 0
        assert split.shared_bytes == split.barrier_at + 16
        assert sorted(split.tap_place(channel) for channel in range(split.channels)) == list(range(split.channels))
    for quarter in range(0, 32, 8):  # of a warp: what one access serves
        for i in range(4):
            banks = {Split.tap_place(4 * lane + i) % 8 for lane in range(quarter, quarter + 8)}
            assert len(banks) == 8


def test_a_block_gets_the_sums_of_all_steps_from_all_blocks():
    for split in splits():
        assert split.steps <= split.padded_steps == split.packets * (split.padded_steps // split.packets)
        assert split.expected_bytes == sum(
            4 * (split.padded_steps // split.packets) for _ in range(split.parts * split.packets)
        )


# -- machine code -------------------------------------------------------------------------------
SHAPES = [("sm_90a", 1, "plain"), ("sm_100a", 8, "plain"), ("sm_103a", 1, "plain"), ("sm_90a", 64, "plain"), ("sm_103a", 8, "verify8"), ("sm_90a", 8, "verify8"), ("sm_90a", 8, "plain")]  # fmt: skip


@pytest.mark.parametrize(("arch", "rows", "kind"), SHAPES)
def test_machine_code(arch, rows, kind):
    """The default, and on one architecture another one from anywhere in the space."""
    one = problem(rows, kind)
    space = ENGINE.space(one, CARDS[arch])
    for chosen in (space.default, *drawn(one, CARDS[arch], 1 if arch == "sm_90a" else 0, seed=rows)):
        (launch,) = ENGINE.compile(one, chosen, arch).launches
        found, split, code = kernel_resources(launch), cute_engine.split_of(one, chosen), order(launch.cubin)
        assert found.kernel.startswith("k3_kda_cute_step"), chosen
        assert found.spill_instructions == 0 and found.stack_bytes == 0, chosen
        assert (launch.cluster, launch.pdl, launch.needs_residency) == ((split.parts, 1, 1), True, False)
        assert launch.grid == (split.blocks, 1, 1) and launch.threads == split.threads
        assert found.dynamic_shared_bytes == split.shared_bytes <= 48 * 1024
        gate = 8 * split.gate_turns
        state = split.turns * split.quads * split.depth
        assert wait_fault(code, EARLY, ahead=gate + state) is None, chosen
        early = [code[place].mnemonic for place in unwaited(code)]
        assert sum(mnemonic == "LDG.E.NA.128" for mnemonic in early) == gate + state, (
            "states are asked for before the wait"
        )
        assert release_fault(code, EARLY, chosen["release"]) is None, chosen
        assert (behind_fault(code) is None) == ENGINE.releases_behind(chosen), chosen
        stores = places(code, r"STG\.E\.128")
        if split.parts > 1 and split.form != "rolled":
            assert places(code, r"STAS.*")[-1] < stores[-split.turns * split.quads], "the last state behind the sums"
        bodies = {"serial": split.steps, "rolled": min(2 + split.steps % 2, split.steps), "wy": 2}[split.form]
        assert len(stores) == bodies * split.turns * split.quads, "a state a step, stored once"
        if split.parts > 1:
            exchanged = places(code, r"SYNCS\.PHASECHK.*")[0]
            raw = places(code, {4: r"STG\.E\.64", 2: r"STG\.E", 1: r"STG\.E\.U16"}[split.run])
            assert len(raw) >= 9 and raw[-9] > exchanged, "history is overwritten after all blocks have read"
            met = places(code, r"UCGABAR_WAIT")[0]
            assert places(code, WAIT)[0] < met < places(code, r"SHFL\..*")[-1] and met < stores[0]
        assert stores[0] > places(code, WAIT)[0]
        assert not places(code, r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")


def test_machine_code_of_one_request_is_short():
    (launch,) = ENGINE.compile(problem(1), config(problem(1)), "sm_90a").launches
    found = kernel_resources(launch)
    assert found.registers <= 128, "two blocks an SM, or one beside its neighbours in the chain"
    assert found.instructions["HMMA"] == 8 and found.instructions["STAS"] == 1
    assert sum(found.instructions.values()) < 900
    (launch,) = ENGINE.compile(problem(1), config(problem(1), run=1), "sm_90a").launches
    spread = kernel_resources(launch)
    assert sum(spread.instructions.values()) < sum(found.instructions.values()) - 100 and spread.registers <= 128


@pytest.mark.parametrize(("rows", "kind"), [(1, "plain"), (8, "plain"), (8, "verify8")])
def test_little_stands_between_a_slot_and_the_loads_that_need_it(rows, kind):
    """The slots are the first load; what does not need them is computed before they are waited for."""
    (launch,) = ENGINE.compile(problem(rows, kind), config(problem(rows, kind)), "sm_90a").launches
    code = order(launch.cubin)
    asked, known = places(code, r"LDG\..*")[0], places(code, r"SHFL\.IDX")[0]
    register = code[asked].operands.split(",")[0]
    assert code[asked].mnemonic == "LDG.E.NA" and register in code[known].operands.split(", ")
    assert not any(register in re.findall(r"R\d+", one.operands) for one in code[asked + 1 : known])
    loads = [place for place in places(code, r"LDG\..*") if place > known]
    assert loads[0] - known < 50
    assert len([place for place in loads if place < places(code, WAIT)[0]]) >= 9 + 2, "histories and states"


@pytest.mark.parametrize(
    ("rows", "kind", "form"),
    [(1, "plain", "serial"), (8, "plain", "serial"), *((8, "verify8", form) for form in ("serial", "rolled", "wy"))],
)
def test_what_is_read_behind_the_wait_is_all_asked_for_before_any_of_it_is_used(rows, kind, form):
    one = problem(rows, kind)
    (launch,) = ENGINE.compile(one, config(one, form=form), "sm_90a").launches
    code = order(launch.cubin)
    loads = [place for place in places(code, r"LDG\..*") if place > places(code, WAIT)[0]]
    assert len(loads) == {"plain": 9 if rows == 1 else 10, "verify8": 18}[kind]
    pending = set()
    for place in range(loads[0], loads[-1] + 1):
        registers = [int(number) for number in re.findall(r"\bR(\d+)", code[place].operands)]
        if place in loads:
            assert not pending & set(registers[1:]), code[place]
            wide = {"64": 2, "128": 4}.get(code[place].mnemonic.split(".")[-1], 1)
            pending |= set(range(registers[0], registers[0] + wide))
        else:
            assert not pending & set(registers), code[place]


def test_machine_code_of_several_tokens_is_shorter_in_a_loop():
    one, sizes = problem(8, "verify8"), {}
    for form in ("serial", "rolled", "wy"):
        (launch,) = ENGINE.compile(one, config(one, form=form), "sm_90a").launches
        found = kernel_resources(launch)
        assert found.spill_instructions == 0, form
        sizes[form] = sum(found.instructions.values())
        sums = places(order(launch.cubin), r"SHFL\.BFLY.*")
        assert len(sums) < {"serial": 100, "rolled": 48, "wy": 64}[form]
        if form == "wy":
            sent, stored = places(order(launch.cubin), r"STAS\..*")[0], places(order(launch.cubin), r"STG\.E\.128")
            assert stored[0] < sent < stored[-1], "stores begin before the exchange, which their second half covers"
    assert sizes["rolled"] < min(sizes["wy"], sizes["serial"]) - 300


# -- the declared contract ----------------------------------------------------------------------
def test_what_is_read_early_is_declared_as_written_by_nobody_in_the_step():
    assert {*FAMILY.rotated, *FAMILY.constant} == READ_EARLY
    assert not set(READ_EARLY) & {*FAMILY.outputs, *FAMILY.mutated}
    one = problem(8)
    from k3lab.tuning.chain import handed_over

    assert handed_over(FAMILY, FAMILY.inputs(one, 0)) == ["proj"]
    assert FAMILY.row_axes(one)["proj"] == 0


def test_cold_copies_have_states_of_their_own_to_read_and_to_write():
    one = problem(2, heads=1)
    tensors = {**FAMILY.inputs(one, 0)}
    for name, (shape, dtype) in FAMILY.output_specs(one).items():
        tensors[name] = torch.zeros(shape, dtype=getattr(torch, dtype))
    copies = FAMILY.cold_copies(one, tensors, 2_000_000)
    own = {"state", "states", "conv_state", "conv_states", "f_b"}
    for name in tensors:
        assert len({copy[name].data_ptr() for copy in copies}) == (
            len(copies) if name in own or name in FAMILY.rotated else 1
        )
    a_copy = sum(
        copies[0][name].numel() * copies[0][name].element_size() for name in (*FAMILY.rotated, "states", "conv_states")
    )
    assert (len(copies) - 1) * a_copy >= 2_000_000 > (len(copies) - 2) * a_copy


def test_slots_of_requests_differ_and_begin_at_one():
    one = problem(24, "verify3")
    slots = FAMILY.inputs(one, 5)["slots"]
    assert sorted(slots[:, 0].tolist()) == list(range(1, 9)) and slots[:, 0].tolist() != list(range(1, 9))
    assert slots[:, 1:].flatten().tolist() == list(range(1, 25))


# -- what a user would write --------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "kind"), [(3, "plain"), (8, "verify4")])
def test_the_pytorch_chain_computes_what_the_twin_does(rows, kind):
    one = problem(rows, kind, heads=2)
    tensors = FAMILY.inputs(one, 2)
    found, wanted = FAMILY.operators(one)(tensors), FAMILY.twin(one, tensors)
    for name, (shape, dtype) in FAMILY.output_specs(one).items():
        assert found[name].dtype == getattr(torch, dtype)
        result = compare(name, found[name], wanted[name], FAMILY.tolerance(one, name))
        assert result.ok, result.message
        tensors[name] = torch.full(shape, float("nan"), dtype=getattr(torch, dtype))
    FAMILY.alternative(one, tensors)()
    for name in FAMILY.output_specs(one):
        assert torch.equal(tensors[name], found[name])


def test_bars_are_of_problems_that_there_are():
    bars = json.loads((Path(cute_engine.__file__).parent / "bars.json").read_text())
    assert bars["gpu"] == "H200"
    for bar in bars["bars"]:
        for rows in bar["rows"]:
            one = FAMILY.problem(K3, tp=bar["tp"], rows=rows, kind=bar["kind"])
            assert ENGINE.refuses(one, "sm_90a") is None
            assert bar["us"] > FAMILY.traffic(one).bytes / CARDS["sm_90a"].read_bandwidth * 1e6
