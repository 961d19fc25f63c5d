"""The output projection over torch.distributed, in real processes: the twin's numbers, and who was late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gloo_ranks as ranks
import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import SingleRank, run_virtual_ranks
from k3lab.kernels.distributed import TorchGroup
from k3lab.kernels.output_projection.twin import output_projection

SCRIPT = ranks.__file__

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
F64, BF16 = torch.float64, torch.bfloat16


def run(size: int, scenario: str, folder: Path) -> dict[int, dict]:
    """What each rank that lived left behind."""
    done = subprocess.run(
        [sys.executable, SCRIPT, str(size), scenario, str(folder)],
        capture_output=True, text=True, timeout=ranks.WALL_S + 60, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"ranks had to be killed: {done.stderr}"
    return {
        rank: torch.load(path, weights_only=True)
        for rank in range(size)
        if (path := folder / f"{rank}.pt").exists()
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_real_processes_compute_the_twin(size: int, tmp_path: Path) -> None:
    found = run(size, "twin", tmp_path)
    assert sorted(found) == list(range(size))
    whole = output_projection(**ranks.case(F64), eps=ranks.EPS, comm=SingleRank())
    bits = run_virtual_ranks(
        size, lambda comm: output_projection(**ranks.shard(ranks.case(BF16), comm.rank, size), eps=ranks.EPS, comm=comm)
    )[0]
    for rank, one in found.items():
        for how in ("ordered", "plain"):
            for got, wanted in zip(one[how, F64], whole, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
            for got, wanted in zip(one[how, BF16], bits, strict=True):
                torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-6)  # another order: a last bit or two
        for got, wanted in zip(one["ordered", BF16], bits, strict=True):
            assert torch.equal(got, wanted), f"rank {rank} has other bits than virtual ranks"
        gathered, scattered = one["shards"]
        line = torch.arange(2.0 * size).view(2, size)
        assert torch.equal(gathered, line)
        assert torch.equal(scattered, size * line[:, rank : rank + 1])


def test_a_late_rank_delays_and_is_waited_for(tmp_path: Path) -> None:
    found = run(4, "slow", tmp_path)
    assert [one["sum"].item() for one in found.values()] == [4.0] * 4
    assert all(one["seconds"] >= 0.4 for one in found.values())


@pytest.mark.parametrize(
    ("scenario", "lives", "says"),
    [
        ("late", 4, "rank 3 did not reach call 1, all_reduce of (1,) float32, within 1.5 s"),
        ("dead", 3, "rank 1 did not reach call 1, all_reduce of (1,) float32, within 1.5 s"),
        ("dead_inside", 3, "all_reduce of (1,) float32 failed, rank 1 did not come out"),
        ("other_shape", 4, "all_reduce of (2,) float32"),
    ],
)
def test_the_rank_at_fault_is_named_within_the_limit(scenario: str, lives: int, says: str, tmp_path: Path) -> None:
    found = run(4, scenario, tmp_path)
    assert len(found) == lives
    blamed = [rank for rank, one in found.items() if says in one.get("error", "")]
    innocent = [rank for rank in found if scenario != "late" or rank != 3]
    assert set(blamed) >= set(innocent) - ({1} if scenario == "other_shape" else set()), found
    assert all(found[rank]["seconds"] < 4 * ranks.LIMIT_S for rank in innocent)


def test_a_group_needs_torch_distributed_first() -> None:
    with pytest.raises(InputError, match="init_process_group comes first"):
        TorchGroup(torch.distributed.HashStore())
