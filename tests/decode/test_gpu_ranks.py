"""On GPUs: four ranks of a group (two on two GPUs), time-sliced where they share one, compute what one does; late or dead ones too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.random_weights import random_weights
from k3lab.decode.step import step
from k3lab.kernels import SMALL_K3
from k3lab.kernels.collectives import SingleRank
from k3lab.kernels.device import gpu_count

from .engines_case import far

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
RANKS = 2 if gpu_count() == 2 else 4
STEPS = ([[1], [2]], [[3], [4]], [[7], [8]])


def forked(scenario: str, folder: Path, *, ranks: int = RANKS) -> list[dict]:
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gpu_ranks.py")), str(ranks), scenario, str(folder)],
        env=environment, timeout=400, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
    assert found, done.stderr[-4000:]
    return found


def test_a_group_on_one_gpu_is_one_rank(tmp_path: Path) -> None:
    found = forked("auto", tmp_path)
    assert len(found) == RANKS
    weights = random_weights(SMALL_K3, seed=5, dtype=torch.float64, device="cuda")
    cache = DecodeCache(SMALL_K3, max_requests=2, max_context=80, dtype=torch.float64, device="cuda")
    slots, want = [cache.add(), cache.add()], []
    for ids in STEPS:
        operators = AutoOperators(SMALL_K3, dtype=torch.float64, device="cuda")
        want.append(step(weights, cache, torch.tensor(ids), slots, operators, SingleRank()).flatten())
        cache.accept(slots, [1, 1])
    for one in found:
        assert "error" not in one, one["error"]
        assert torch.equal(one["eager"], found[0]["eager"])
        assert torch.equal(one["captured"], one["eager"])
        assert far(one["eager"], torch.cat(want).cpu()) < 1e-9


def test_kernels_of_a_group_publish_to_each_other(tmp_path: Path) -> None:
    found = forked("tuned", tmp_path)
    assert len(found) == RANKS
    for one in found:
        assert "error" not in one, one["error"]
        assert torch.equal(one["eager"], found[0]["eager"])
        assert torch.equal(one["captured"], one["eager"])
        assert torch.equal(one["one_shot"], one["two_shot"])
        assert max(far(one[how], one["auto"]) for how in ("eager", "one_shot", "two_shot")) < 0.1


def test_no_delay_changes_a_bit(tmp_path: Path) -> None:
    found = forked("late", tmp_path, ranks=2)
    assert len(found) == 2
    for one in found:
        assert "error" not in one, one["error"]
        assert all(one["same"])
        assert torch.equal(one["eager"], found[0]["eager"])


def test_a_dead_rank_is_named_by_all_others(tmp_path: Path) -> None:
    found = forked("killed", tmp_path)
    assert len(found) == RANKS - 1
    for one in found:
        assert "rank 1" in one["error"]
