"""The tail's exchanges among several ranks in one process, a stream each: hundreds of launches, delays, a missing rank."""

from __future__ import annotations

import pytest

from .gpu_acts import burst_often, delay_bursts, leave_out
from .moe_tail_case import FUSED, TailRanks, config, problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SETTINGS = [
    pytest.param((tp, rows, exchange), id=f"tp{tp}-{exchange}")
    for tp, rows, exchange in ((2, 1, "one_shot"), (2, 2, "two_shot"), (4, 4, "one_shot"), (4, 3, "two_shot"))
]


@pytest.fixture
def setting_of(device, setting):
    tp, rows, exchange = setting
    one = problem(rows, tp=tp, hidden=1024, latent=512)
    chosen = config(one, split_k=4, at_once=4, exchange=exchange)
    return lambda **more: TailRanks(device, one, FUSED, chosen, **more)


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ranks_have_the_twins_bits_in_hundreds_of_launches(setting_of):
    burst_often(setting_of(), 50)


@pytest.mark.parametrize("setting", SETTINGS)
def test_hundreds_of_seeds_of_delays_change_no_bit(setting_of):
    delay_bursts(setting_of(), setting_of(jitter=1), 50)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_that_never_comes_is_named_by_all_and_they_go_on_after_re_arming(setting_of):
    leave_out(setting_of())
