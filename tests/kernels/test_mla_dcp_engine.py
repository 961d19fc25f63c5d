"""Contexts over ranks in the MLA core's engine: who holds and sends what, refusals, the twin over loopback, machine code."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from k3lab.kernels import Compiled, InputError
from k3lab.kernels.collectives import LoopbackGroup
from k3lab.kernels.mla.cute_mma_engine import INVARIANT
from k3lab.kernels.mla.cute_mma_shapes import around_of, attend_of, ranks_of, send_of, value_of
from k3lab.kernels.mla.ranks import LAUNCHES
from k3lab.kernels.mla.twin import Shard
from k3lab.kernels.mla.twin_context import merged
from k3lab.kernels.transports import Loopback, own_buffers
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.propose import ENUMERABLE
from k3lab.tuning.sass_order import behind_fault, order, wait_fault

from . import test_mla_dcp_gpu, test_mla_dcp_ranks_gpu
from .mla_case import FAMILY, H200, exact_inputs, problem, row_counts
from .mla_dcp_case import ENGINE, all_ranks, judge_rank, small
from .test_mla_engines import KEYS, WEIGHTS

KINDS = [kind for kind in FAMILY.kinds if kind.endswith("_dcp")]


def config(one, **changes):
    return {**ENGINE.space(one, H200).default, **changes}


@pytest.mark.parametrize("tp", [2, 8, 16])
@pytest.mark.parametrize("kind", KINDS[::7])
def test_defaults_are_legal_and_fill_their_columns(tp, kind):
    for rows in row_counts(kind):
        one = problem(rows, kind, tp)
        assert ENGINE.refuses(one, "sm_90a") is None
        space = ENGINE.space(one, H200)
        assert space.illegal(space.default) is None and space.size <= ENUMERABLE
        assert space.illegal({**space.default, **INVARIANT, "stages": 2, "k_order": "invariant"}) is None
        attend = attend_of(one, space.default)
        # 96 heads: no column of a block is padding
        assert attend.groups * attend.queries == attend.q_len * 96


def test_refusals_say_why():
    assert "TP 1" in ENGINE.refuses(problem(1, "bf16_dcp", 1), "sm_90a")
    assert "32 ranks" in ENGINE.refuses(problem(1, "bf16_dcp", 32), "sm_90a")
    assert "cute_mma's alone" in FAMILY.engine("triton").refuses(problem(1, "bf16_dcp"), "sm_90a")
    one = problem(1, "bf16_dcp")
    assert FAMILY.operators(one) is None
    with pytest.raises(InputError, match="there is peer alone"):
        ENGINE.compile(one, config(one, stores="multicast"), "sm_90a")
    assert "whole words" in ENGINE.space(problem(1, "bf16_dcp", rope=32), H200).illegal(config(one, cluster=16))


def test_tokens_held_are_those_of_the_twins_shards():
    for size in (2, 4, 16):
        ranks = ranks_of(small(1, "bf16_dcp", size), config(small(1, "bf16_dcp", size)))
        for rank in range(size):
            for tokens in range(70):
                assert ranks.held(tokens, rank) == Shard(rank, size).below(tokens)
                seen = [t for t in range(100) if t % size == rank and t <= tokens]
                assert ranks.held(tokens + 1, rank) - 1 == len(seen) - 1


@pytest.mark.parametrize(("kind", "rows", "tp"), [("bf16_dcp", 3, 4), ("fp8_verify2_dcp", 4, 2)])
def test_every_word_has_a_place_of_its_own_and_every_byte_of_a_slot_a_word(kind, rows, tp):
    one = small(rows, kind, tp, heads=2)
    ranks = ranks_of(one, config(one))
    for slot, places in (
        (ranks.query_slot, [(ranks.query_within(p, r, h) + 8 * w, 8) for p in (0, 1) for r in range(rows) for h in (0, 1) for w in range(ranks.query_words)]),
        (ranks.row_slot, [(ranks.row_within(p, r, h, q), 16) for p in (0, 1) for r in range(rows) for h in (0, 1) for q in range(ranks.quads)]),
    ):  # fmt: skip
        assert sorted(places) == [(at, places[0][1]) for at in range(0, slot, places[0][1])]
    at = [ranks.counters_at(name) // 4 for name in LAUNCHES]
    assert [b - a for a, b in zip(at, [*at[1:], ranks.counters], strict=True)] == list(ranks.blocks)


def test_every_row_is_sent_once_and_every_ranks_row_polled_once():
    for rows, tp, cluster in ((1, 16, 8), (8, 4, 4), (20, 2, 16)):
        one = problem(rows, "bf16_dcp", tp)
        chosen = config(one, cluster=cluster)
        send, value = send_of(one, chosen), value_of(one, chosen)
        sent = Counter(
            (block // send.cluster // send.heads * 16 + row, block // send.cluster % send.heads, block % send.cluster * send.lanes + quad)
            for block in range(send.head_blocks) for row in range(16) for quad in range(send.lanes)
        )  # fmt: skip
        assert set(sent.values()) == {1} and len(sent) == send.row_tiles * 16 * 96 * one.kv_lora // 4
        polled = Counter(
            (unit % value.tile_rows, unit // value.tile_rows * value.ranks_each + i, t % value.lanes)
            for turn in range(value.rank_turns) for t in range(256)
            for unit in [turn * (256 // value.lanes) + t // value.lanes] if unit // value.tile_rows < value.rank_groups
            for i in range(value.ranks_each)
        )  # fmt: skip
        wanted = {(row, rank, c) for row in range(value.tile_rows) for rank in range(tp) for c in range(value.lanes)}
        assert set(polled) == wanted and set(polled.values()) == {1}


def test_the_twin_over_loopback_is_the_own_shard_times_the_mean_of_the_factors():
    """And a factor of zero is a rank without tokens."""
    one = small(2, "bf16_dcp", 4, heads=2)
    inputs = FAMILY.inputs(one, 3)
    plain = FAMILY.over_loopback(one, inputs, (1.0,) * 4)["out"]
    torch.testing.assert_close(
        FAMILY.over_loopback(one, inputs, (1.0, 0.0, 0.0, 0.0))["out"], plain, rtol=1e-5, atol=1e-6
    )
    mean = FAMILY.over_loopback(one, inputs, (0.5, -2.0, 0.0, 4.0))["out"]
    torch.testing.assert_close(mean, plain * (2.5 / 3), rtol=1e-5, atol=1e-6)
    assert LoopbackGroup((1.0, 0.0)).size == 2
    logs = torch.tensor([[0.0], [-torch.inf]])
    torch.testing.assert_close(merged(torch.tensor([[[3.0]], [[0.0]]]), logs), torch.tensor([[3.0]]))


def test_buffers_are_what_the_transport_fills():
    one = small(1, "bf16_dcp", 2)
    chosen = config(one)
    compiled = Compiled("mla", ENGINE.name, one, chosen, "sm_90a", (), ENGINE._buffers(one, chosen))
    held, boxes = own_buffers(compiled, Loopback(2), "cpu")
    assert len(boxes) == 2 and not any(bool(held[name].any()) for name in ("queries", "latents", "epochs", "health"))
    assert held["latents_targets"][1, 0] - held["latents_targets"][0, 0] == held["latents"][0].nbytes


def test_the_cases_of_the_gpu_tests_are_legal_and_can_be_judged_without_one():
    for kind, rows, tp in test_mla_dcp_gpu.SHAPES:
        one = problem(rows, kind, tp)
        assert ENGINE.refuses(one, "sm_90a") is None and ENGINE.space(one, H200).illegal(config(one)) is None
        factors = test_mla_dcp_gpu.factors_of(tp)
        assert sum(factors) != 0 and len(set(factors)) > 1
    for kind, rows, tp in (setting.values[0] for setting in test_mla_dcp_ranks_gpu.SETTINGS):
        one = test_mla_dcp_ranks_gpu.setting_problem(kind, rows, tp)
        assert ENGINE.refuses(one, "sm_90a") is None
        assert ENGINE.space(one, H200).illegal(config(one, **test_mla_dcp_ranks_gpu.FEW)) is None
    for splits in (1, 2, 4):
        one = problem(4, "bf16_dcp", 4)
        assert ENGINE.space(one, H200).illegal(config(one, splits=splits, **test_mla_dcp_gpu.SHORT)) is None
    one = problem(4, "bf16_dcp", 4, heads=1, q_lora=256)
    inputs = exact_inputs(one, test_mla_dcp_gpu.EXACT)
    exact = FAMILY.over_loopback(one, inputs, (1.0,) * 4)["out"]
    assert bool(exact.any()) and torch.equal(exact, (exact * 2**12).round() / 2**12)
    one = problem(2, "bf16_dcp", 4, heads=1, q_lora=256)
    inputs, wanted = all_ranks(one, (5, 0))
    for rank, twin in enumerate(wanted):
        judge_rank(one, rank, inputs[rank], twin["out"].bfloat16(), twin["cache"].bfloat16(), twin, 2)


@pytest.mark.parametrize(
    ("arch", "kind", "rows"),
    [("sm_90a", "bf16_dcp", 8), ("sm_103a", "fp8_128k_verify8_dcp", 8)],
)
def test_machine_code_waits_in_order_and_spills_nothing(arch, kind, rows):
    one = problem(rows, kind)
    chosen = config(one)
    around = around_of(one, chosen)
    query, core, send, value = ENGINE.compile(one, chosen, arch).launches
    for launch, most, early, ahead in (
        (query, 240, WEIGHTS, 6 * around.n_tiles), (core, 255, KEYS, 2), (send, 64, "LDG.never", 0), (value, 64, WEIGHTS, 2 * around.v_tiles),
    ):  # fmt: skip
        found = kernel_resources(launch)
        assert found.spill_instructions == 0 and found.registers <= most, (found.kernel, found.registers)
        assert launch.pdl and not launch.needs_residency
        assert wait_fault(order(launch.cubin), early, ahead=ahead) is None, found.kernel
    # the attention reads keys early, the output projection behind it the residual
    assert ENGINE.releases_behind(chosen) and not any(behind_fault(order(one.cubin)) for one in (query, value))
    assert [launch.kernel.split("_dcp_")[1].split("_")[0] for launch in (query, core, send, value)] == list(LAUNCHES)
