"""Several processes on one GPU as ranks over PyTorch's symmetric memory: the same bits on all, late and dead ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import symmetric_ranks as ranks
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.output_projection.twin import output_projection
from k3lab.kernels.transports import Multicast, multicast_refusal
from k3lab.tuning.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("device")]
SCRIPT = ranks.__file__


def run(size: int, scenario: str, folder: Path, form: str = "fused") -> dict[int, dict]:
    """What each rank that lived left behind."""
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(size), scenario, form, str(folder)],
        capture_output=True, text=True, timeout=ranks.WALL_S + 120, env=environment,
    )  # fmt: skip
    files = {rank: folder / f"{rank}.pt" for rank in range(size)}
    found = {rank: torch.load(path, weights_only=True) for rank, path in files.items() if path.exists()}
    failed = {rank: one["failed"] for rank, one in found.items() if "failed" in one}
    assert done.returncode == 0 and not failed, f"{failed or 'ranks had to be killed'}: {done.stderr[-2000:]}"
    return found


def judge(found: dict[int, dict], size: int) -> None:
    """Every rank has the same bits, those of the twin up to its tolerance."""
    problem = ranks.FAMILY.problem(ranks.K3, tp=size, rows=ranks.ROWS)

    def twin(comm):
        t = {name: tensor.float() for name, tensor in ranks.inputs(size, comm.rank).items()}
        return output_projection(
            t["x"], t["w_o"], t["prefix"], list(t["blocks"]), t["res_norm"], t["res_proj"], t["norm_w"],
            eps=problem.eps, comm=comm,
        )  # fmt: skip

    wanted = dict(zip(ranks.FAMILY.outputs, run_virtual_ranks(size, twin)[0], strict=True))
    assert sorted(found) == list(range(size))
    for rank, one in found.items():
        assert one["changed"] == 0, f"rank {rank}: the same inputs gave other bits"
        for name, value in wanted.items():
            assert torch.equal(one[name], found[0][name]), f"rank {rank} has other bits than rank 0 in {name}"
            result = compare(name, one[name], value, ranks.FAMILY.tolerance(problem, name))
            assert result.ok, f"rank {rank}: {result.message}"


@pytest.mark.parametrize(("size", "form"), [(2, "fused"), (4, "fused"), (4, "apart"), (4, "split"), (4, "two_shot")])
def test_all_ranks_have_the_twins_sum_in_the_same_bits(size: int, form: str, tmp_path: Path) -> None:
    found = run(size, "steps", tmp_path, form)
    judge(found, size)
    print(f"{form}, {size} ranks: {max(one['exchange_ms'] for one in found.values()):.1f} ms an exchange, time-sliced")


def test_multicast_is_refused_where_it_is_off() -> None:
    """Nothing of it is ever run: a mailbox is not even asked for."""
    reason = multicast_refusal()
    if reason is None:
        pytest.skip("multicast is offered here")
    with pytest.raises(InputError) as refused:
        Multicast()
    assert str(refused.value) == f"transport multicast: {reason}"


@pytest.mark.parametrize("form", ranks.CONFIGS)
def test_a_late_rank_delays(form: str, tmp_path: Path) -> None:
    judge(run(4, "late", tmp_path, form), 4)


def names_rank_1(one: dict) -> None:
    """Within a few times the limit: the launch gave up after it, and the host's share of the GPU came round again."""
    assert f"within {one['limit']:g} s" in one["error"]
    assert "rank 1 did not publish its partial sums" in one["error"]
    assert one["seconds"] < 3 * one["limit"] + 3.0


@pytest.mark.parametrize("form", ranks.CONFIGS)
def test_a_stalled_rank_is_named_and_all_go_on_after_re_arming(form: str, tmp_path: Path) -> None:
    found = run(4, "stalled", tmp_path, form)
    judge(found, 4)
    for rank in (0, 2, 3):
        names_rank_1(found[rank])


@pytest.mark.parametrize("form", ranks.CONFIGS)
def test_a_killed_rank_is_named(form: str, tmp_path: Path) -> None:
    found = run(4, "killed", tmp_path, form)
    assert sorted(found) == [0, 2, 3]
    for one in found.values():
        names_rank_1(one)
