"""The exchange among several ranks in one process, a stream each: thousands of launches, delays, late and missing ranks."""

from __future__ import annotations

import time

import pytest
import torch
from k3lab.kernels.health import check_health

from .gpu_acts import burst_often, delay_bursts, leave_out
from .test_output_projection_engines import APART, FUSED, SPLIT, config, problem
from .virtual_ranks import BURST, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SEEDS = 1000
SETTINGS = [
    pytest.param((FUSED, 2, 1, {"warps_k": 4, "depth": 1, "packet": form}), id=f"fused-{form}")
    for form in ("bf16x7e16", "b32e32")
] + [
    pytest.param((SPLIT, 4, 4, {"mixers": 8, "packet": form, "exchange": exchange, "consumer_wait": wait}), id=f"{exchange}-{form}-{wait}")
    for form, exchange, wait in (
        ("bf16x7e16", "one_shot", "exit"), ("b32e32", "one_shot", "start"), ("bf16x7e16", "two_shot", "start"),
        ("b32e32", "two_shot", "exit"),
    )
] + [
    pytest.param((SPLIT, 2, 1, {"mixers": 8, "row_sums": "cluster", "consumer_wait": "exit"}), id="clusters"),
] + [
    # two ranks' blocks are three an SM: few warps, and few tiles
    pytest.param((APART, 2, 1, {"warps_k": 4, "depth": 1, "rehearse": 0, "packet": form}), id=f"apart-{form}") for form in ("bf16x7e16", "b32e32")
]  # fmt: skip


@pytest.fixture
def setting_of(device, setting):
    engine, tp, rows, change = setting
    one = problem(rows, tp)
    return lambda **more: Ranks(device, one, engine, config(one, engine, **change), **more)


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ranks_have_the_twins_bits_in_a_thousand_launches(setting_of):
    burst_often(setting_of(), 1000 // BURST)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_thousand_seeds_of_delays_change_no_bit(setting_of):
    """A launch's epoch seeds its delays, beside the rank: another one at every publish, poll, release and exit."""
    delayed = setting_of(jitter=1)
    delay_bursts(setting_of(), delayed, SEEDS // BURST)
    epochs = [int(runner.buffers["epochs"][0]) for runner in delayed.runners]
    assert set(epochs) == {SEEDS}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_that_is_seconds_late_delays_and_changes_nothing(setting_of):
    ranks = setting_of()
    ranks.burst()
    wanted, late = ranks.same_everywhere(), ranks.one.tp - 1
    ranks.poison()
    started = time.perf_counter()
    for turn in range(BURST):
        ranks.launch(turn, [rank for rank in range(ranks.one.tp) if rank != late])
    time.sleep(3.0)
    assert not ranks.streams[0].query(), "rank 0 did not wait"
    for turn in range(BURST):
        ranks.launch(turn, [late])
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 9.0
    for rank, runner in enumerate(ranks.runners):
        check_health(runner.buffers, rank)
    ranks.same_everywhere(wanted)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_that_never_comes_is_named_by_all_and_they_go_on_after_re_arming(setting_of):
    leave_out(setting_of())
