"""On GPUs: ranks of a group compute what one does, with contexts whole and over all ranks; late or dead ones too.

Four ranks (two on two GPUs) run anywhere, time-sliced where they share a GPU; groups of 2, 4 and 8 where each has its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.random_weights import random_weights
from k3lab.decode.step import step
from k3lab.kernels import SMALL_K3
from k3lab.kernels.collectives import SingleRank
from k3lab.kernels.device import gpu_count

from .engines_case import far

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
RANKS = 2 if gpu_count() == 2 else 4
PROMPT, STEPS = (17, 400, 3, 256, 8, 9, 44, 12, 300), ([[1], [2]], [[3], [4]], [[7], [8]])
SIZES = [
    pytest.param(
        size,
        marks=pytest.mark.skipif(
            size not in (RANKS, *range(gpu_count() + 1)), reason=f"{size} ranks have a GPU each; here are {gpu_count()}"
        ),
    )
    for size in (2, 4, 8)
]


def forked(scenario: str, folder: Path, *, ranks: int = RANKS) -> list[dict]:
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gpu_ranks.py")), str(ranks), scenario, str(folder)],
        env=environment, timeout=400, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
    assert found, done.stderr[-4000:]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_group_is_one_rank(size: int, tmp_path: Path) -> None:
    found = forked("auto", tmp_path, ranks=size)
    assert len(found) == size
    weights = random_weights(SMALL_K3, seed=5, dtype=torch.float64, device="cuda")
    cache = DecodeCache(SMALL_K3, max_requests=2, max_context=80, dtype=torch.float64, device="cuda")
    slots = [cache.add(), cache.add()]
    many = PrefillOperators(SMALL_K3, dtype=torch.float64, device="cuda")
    want = [prefill(weights, cache, slots[1], torch.tensor(PROMPT), many, SingleRank())]
    for ids in STEPS:
        operators = AutoOperators(SMALL_K3, dtype=torch.float64, device="cuda")
        want.append(step(weights, cache, torch.tensor(ids), slots, operators, SingleRank()).flatten())
        cache.accept(slots, [1, 1])
    for one in found:
        assert "error" not in one, one["error"]
        for contexts, captured in (("eager", "captured"), ("shared", "shared captured")):
            assert torch.equal(one[contexts], found[0][contexts])
            assert torch.equal(one[captured], one[contexts])
            assert far(one[contexts], torch.cat(want).cpu()) < 1e-9


@pytest.mark.parametrize("size", SIZES)
def test_kernels_of_a_group_publish_to_each_other(size: int, tmp_path: Path) -> None:
    found = forked("tuned", tmp_path, ranks=size)
    assert len(found) == size
    for one in found:
        assert "error" not in one, one["error"]
        for contexts, captured in (("eager", "captured"), ("shared", "shared captured")):
            assert torch.equal(one[contexts], found[0][contexts])
            assert torch.equal(one[captured], one[contexts])
        assert torch.equal(one["one_shot"], one["two_shot"])
        assert max(far(one[how], one["auto"]) for how in ("eager", "shared", "one_shot", "two_shot")) < 0.1


@pytest.mark.parametrize("dcp", [1, RANKS])
def test_a_full_width_layer_pair_runs_as_planned_on_all_ranks(dcp: int, tmp_path: Path) -> None:
    sliced = ["--time-sliced"] if gpu_count() < RANKS else []
    out = tmp_path / "pair.json"
    asked = [
        "--pairs",
        "2",
        "--samples",
        "8",
        "--default-engines",
        "--dcp",
        str(dcp),
        "--traces",
        str(tmp_path),
        *sliced,
    ]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
            "-m", "k3lab.cli.main", "decode", "pair", *asked, "--out", str(out), "--json",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "4"}, timeout=580, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    record = json.loads(out.read_text())
    assert (record["tp"], record["dcp"], record["faults"]) == (RANKS, dcp, [])
    assert record["evidence"] == (None if sliced else "measured")
    for place, one in enumerate(record["each"]):
        assert one["gpu"]["card"] and not one["trace"]["differences"] and one["trace"]["planned"]
        assert (tmp_path / f"rank{place}.json.gz").exists()
    if sliced:  # times of ranks that took turns are nobody's
        assert "trace" not in record
    else:
        assert {one["kind"] for one in record["trace"]["classes"]} == {"kda", "mla"}, record["trace"]
    for row in record["rows"]:
        own = row["backends"]["latency_specialized"]
        assert own["launches"]["planned"] == own["launches"]["tuned"] > 0
        for layer in own["layers"].values():
            assert sliced or (layer["us"] > 0 and layer["over_ranks_us"] >= 0)


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
