"""The CuTe DSL engine of the MLA core: refusals, spaces, who handles what, machine code."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.mla.cute_mma_engine import around_of, attend_of, front_registers
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.propose import ENUMERABLE
from k3lab.tuning.sass_order import behind_fault, order, places, release_fault, wait_fault

from .mla_case import FAMILY, H200, problem, row_counts

ENGINE = FAMILY.engine("cute_mma")
WEIGHTS = r"LDG\.E\.NA\S*128|LDGSTS\S*"
KEYS = r"LDGSTS\S*|LDG\.E"


def config(one, **changes):
    return {**ENGINE.space(one, H200).default, **changes}


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", FAMILY.kinds[::3])
def test_defaults_are_legal_and_the_space_can_be_listed(tp, kind):
    for rows in row_counts(kind):
        one = problem(rows, kind, tp)
        assert ENGINE.refuses(one, "sm_90a") is None
        for card in ("H200", "GB300"):
            space = ENGINE.space(one, gpu_card(card))
            assert space.illegal(space.default) is None
            assert space.size <= ENUMERABLE


@pytest.mark.parametrize(
    ("kind", "rows", "queries", "longest"),
    [("bf16", 1, 8, 1), ("bf16_verify8", 8, 16, 1), ("fp8_verify8", 8, 16, 1), ("bf16", 64, 8, 9), ("bf16_128k_verify8", 8, 48, 16)],
)  # fmt: skip
def test_defaults_of_short_contexts_have_parts_of_one_tile_and_blocks_of_few_queries(kind, rows, queries, longest):
    """Where the GPU holds a block for each tile; keys of a long context are read once."""
    one = problem(rows, kind)
    attend = attend_of(one, config(one))
    assert attend.queries == queries
    assert attend.part(one.held) // attend.tile <= longest


def test_refusals_and_illegal_configs_say_why():
    assert "sm_80" in ENGINE.refuses(problem(8), "sm_80")
    for change, why in (
        ({"kv_lora": 128}, "kv_lora 128"), ({"q_lora": 384}, "q_lora 384"), ({"block_size": 32}, "cache blocks of 32"),
        ({"v_dim": 96}, "do not go in eights"), ({"rope": 16}, "no multiples of 32"),
    ):  # fmt: skip
        assert why in ENGINE.refuses(problem(8, **change), "sm_90a"), change
    one = problem(1)
    space = ENGINE.space(one, H200)
    for change, why in (
        ({"release": "entry"}, "must release behind its own wait"),
        ({"queries": 16}, "a request has fewer"),
        ({"splits": 132}, "fewer than 16 tokens each"),
        ({"stages": 4}, "shared memory"),
        ({"k_order": "invariant", "tile": 32}, "tile 64"),
        ({"cluster": 4}, "registers"),
    ):
        assert why in space.illegal({**space.default, **change}), change


def attends():
    """Attentions of all kinds of shape."""
    for kind, rows, change in (
        ("bf16", 3, {"queries": 8, "tile": 64, "stages": 2}), ("bf16_verify8", 8, {"queries": 48, "tile": 64, "stages": 2}),
        ("fp8", 2, {"queries": 8, "tile": 128, "stages": 2}), ("fp8_verify8", 16, {"queries": 16, "tile": 32, "stages": 4}),
        ("bf16_verify4", 8, {"queries": 32, "tile": 32, "stages": 3}),
    ):  # fmt: skip
        one = problem(rows, kind)
        yield one, attend_of(one, config(one, **change))


def test_every_key_is_copied_once_and_every_score_made_once():
    for one, attend in attends():
        copied = Counter(
            (p * attend.rows_a_pass + t // attend.threads_a_row, c * attend.threads_a_row + t % attend.threads_a_row)
            for t in range(256) for p in range(attend.passes) for c in range(attend.chunks_a_thread)
            if t // attend.threads_a_row < attend.rows_a_pass
        )  # fmt: skip
        wanted = {(row, chunk) for row in range(attend.tile) for chunk in range(attend.row_bytes // 16)}
        assert set(copied) == wanted and set(copied.values()) == {1}
        assert attend.page % attend.rows_a_pass == 0, "a pass may cross a page"
        scores = Counter(
            ((wm * attend.m_own + m) * 16 + row, (wn * attend.n_own + n) * 8)
            for warp in range(8) for wm, wn in [(warp % attend.warps_m, warp // attend.warps_m)] if wn < attend.warps_n
            for m in range(attend.m_own) for n in range(attend.n_own) for row in range(16)
        )  # fmt: skip
        assert set(scores) == {(t, q) for t in range(attend.tile) for q in range(0, attend.queries, 8)}
        assert set(scores.values()) == {1}
        assert attend.m_sums % 2 == 0 and 8 * attend.latents == one.kv_lora


def test_parts_hold_every_token_once_in_whole_tiles():
    for _, attend in attends():
        for splits in (1, 2, 7, 132):
            cut = dataclasses.replace(attend, splits=splits)
            for tokens in (1, 31, 64, 65, 1025, 131080):
                part = cut.part(tokens)
                assert part % cut.tile == 0 and splits * part >= tokens > splits * (part - cut.tile)


def test_eight_rows_of_shared_memory_meet_no_bank_twice():
    for _, attend in attends():
        for pitch in (attend.pitch, attend.query_pitch, attend.weight_pitch):
            assert pitch % 16 == 0 and len({row * pitch // 16 % 8 for row in range(8)}) == 8


def test_every_share_of_a_head_belongs_to_one_block():
    for rows, cluster in ((1, 8), (8, 16), (40, 4)):
        one = problem(rows)
        around = around_of(one, config(one, cluster=cluster))
        made = Counter()
        for part in range(cluster):
            for output in range(around.outputs):
                meets = output < around.own_nope
                made[
                    part * around.own_nope + output
                    if meets
                    else one.nope + part * around.own_rope + output - around.own_nope
                ] += 1
        assert made == Counter(range(one.nope + one.rope))
        merged = Counter(
            (unit % around.tile_rows, unit // around.tile_rows, t % around.lanes)
            for turn in range(around.merge_turns) for t in range(256)
            for unit in [turn * (256 // around.lanes) + t // around.lanes] if unit // around.tile_rows < around.merge_groups
        )  # fmt: skip
        units = {
            (r, g, c) for r in range(around.tile_rows) for g in range(around.merge_groups) for c in range(around.lanes)
        }
        assert set(merged) == units and set(merged.values()) == {1}
        assert around.insert_blocks * 8 >= rows and around.insert_blocks % cluster == 0


@pytest.mark.parametrize(
    ("arch", "kind", "rows"), [("sm_90a", "bf16", 1), ("sm_103a", "bf16", 64), ("sm_90a", "fp8_128k_verify8", 8)]
)
def test_machine_code_waits_in_order_and_keeps_to_its_registers(arch, kind, rows):
    one = problem(rows, kind)
    chosen = config(one)
    attend, around = attend_of(one, chosen), around_of(one, chosen)
    query, core, value = ENGINE.compile(one, chosen, arch).launches
    for launch, most, weights, ahead in (
        (query, front_registers(around), WEIGHTS, 6 * around.n_tiles), (core, attend.registers + 40, KEYS, 2),
        (value, 255, WEIGHTS, 2 * around.v_tiles),
    ):  # fmt: skip
        found, code = kernel_resources(launch), order(launch.cubin)
        assert found.spill_instructions == 0 and found.registers <= min(255, most), found.kernel
        assert launch.pdl and wait_fault(code, weights, ahead=ahead) is None, found.kernel
    # keys may be asked for early only because the query's launch releases behind its own wait
    # and the output projection may read the residual early only because the last one does
    assert places(order(query.cubin), "PREEXIT") and places(order(value.cubin), "PREEXIT")
    assert ENGINE.releases_behind(chosen) and not any(behind_fault(order(one.cubin)) for one in (query, value))
    late = ENGINE.compile(one, {**chosen, "early": "none"}, arch).launches[1] if rows == 1 else None
    assert late is None or wait_fault(order(late.cubin), "LDG.never", ahead=0) is None
    if rows == 1:
        assert release_fault(order(value.cubin), r"LDG\.E\.NA\S*128", "loads") is None
    products = Counter(instruction.mnemonic.split(".")[0] for instruction in order(core.cubin))["HMMA"]
    per_tile = attend.m_own * attend.n_own * attend.width // 16 + attend.tile // 16 * attend.m_sums * attend.n_tiles
    assert products == per_tile
