"""Contexts over several ranks on one GPU: in one process, a stream each, hundreds of launches, delays, a missing rank; and in processes."""

from __future__ import annotations

import os
import subprocess
import sys

import mla_symmetric_ranks as processes
import pytest
import torch

from .gpu_acts import burst_often, delay_bursts, leave_out
from .mla_dcp_case import ENGINE, FAMILY, all_ranks, judge_rank, problem
from .virtual_ranks import BURST, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
CONTEXTS = (300, 3, 1, 0)
"""Of as many requests as there are: shards of one token, and of none."""
SETTINGS = [
    pytest.param(one, id="-".join(map(str, one)))
    for one in (("bf16_dcp", 2, 2), ("bf16_dcp", 4, 4), ("fp8_verify2_dcp", 4, 4), ("bf16_verify8_dcp", 16, 2))
]


def contexts_of(one):
    return CONTEXTS[: one.requests]


class MlaRanks(Ranks):
    """Each rank has heads, and so numbers, of its own."""

    family = FAMILY

    def inputs_of(self, one, rank):
        return all_ranks(one, contexts_of(one))[0][rank]

    def same_everywhere(self, wanted=None):
        """Every rank has its own bits in every launch of the burst, those wanted if any."""
        first = wanted or [self.bits(rank, 0).clone() for rank in range(self.one.tp)]
        for rank in range(self.one.tp):
            for turn in range(BURST):
                assert torch.equal(self.bits(rank, turn), first[rank]), f"rank {rank}, launch {turn} has other bits"
        return first

    def judge(self):
        inputs, wanted = all_ranks(self.one, contexts_of(self.one))
        for rank in range(self.one.tp):
            out, after = self.outputs[rank][0]["out"].cpu(), self.calls[rank][0].tensors["cache"].cpu()
            judge_rank(self.one, rank, inputs[rank], out, after, wanted[rank], self.one.rows)


FEW = {"splits": 2, "tile": 32, "stages": 2, "queries": 8}
"""Few blocks a launch: all that wait, of all ranks, must be on the GPU beside what they wait for."""


def setting_problem(kind, rows, tp):
    return problem(rows, kind, tp, heads=2, context=310)


@pytest.fixture
def setting_of(device, setting):
    one = setting_problem(*setting)
    chosen = {**ENGINE.space(one, device.need_card()).default, **FEW}
    return lambda **more: MlaRanks(device, one, ENGINE, chosen, **more)


@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ranks_have_their_twins_numbers_in_hundreds_of_launches(setting_of):
    burst_often(setting_of(), 50)


@pytest.mark.parametrize("setting", SETTINGS)
def test_seeds_of_delays_change_no_bit(setting_of):
    delay_bursts(setting_of(), setting_of(jitter=1), 50)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_that_never_comes_is_named_by_all_and_they_go_on_after_re_arming(setting_of):
    leave_out(setting_of())


@pytest.mark.parametrize(("size", "kind"), [(2, "bf16_dcp"), (4, "bf16_dcp"), (4, "fp8_verify4_dcp")])
def test_processes_have_their_twins_numbers_and_a_late_one_delays(device, size, kind, tmp_path):
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, processes.__file__, str(size), kind, str(tmp_path)],
        capture_output=True, text=True, timeout=processes.WALL_S + 60, env=environment,
    )  # fmt: skip
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(size)]
    failed = {rank: one["failed"] for rank, one in enumerate(found) if "failed" in one}
    assert done.returncode == 0 and not failed, f"{failed or 'ranks had to be killed'}: {done.stderr[-2000:]}"
    one = problem(processes.ROWS, kind, size)
    inputs, wanted = all_ranks(one, processes.CONTEXTS[: one.requests])
    for rank, left in enumerate(found):
        assert left["changed"] == 0, f"rank {rank}: the same inputs gave other bits"
        after = left["cache"].view(inputs[rank]["cache"].dtype)
        judge_rank(one, rank, inputs[rank], left["out"], after, wanted[rank], one.rows)
