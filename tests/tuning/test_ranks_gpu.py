"""On GPUs: as many ranks as there are GPUs, or two that share one; a rank that is killed or late is named by the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from k3lab.kernels.device import gpu_count
from k3lab.tuning.policy import QUICK
from k3lab.tuning.ranks.report import merge, reduces, table
from k3lab.tuning.ranks.request import RanksError, RanksRequest
from k3lab.tuning.ranks.start import start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("device")]


def request(**more: object) -> RanksRequest:
    size = next((size for size in (8, 4, 2) if size <= gpu_count()), 2)
    shared = size > gpu_count()
    steps = 100 if shared else 2000
    return RanksRequest(size, steps=steps, time_sliced=shared, policy=QUICK, rows=(1, 8), **more)  # type: ignore[arg-type]


def test_outputs_are_the_twins_and_times_are_kept_where_each_rank_has_a_gpu() -> None:
    asked = request()
    data = merge(asked, start(asked, wall_s=500))
    assert {case["family"] for case in data["cases"]} == set(asked.families)
    for case in data["cases"]:
        assert case["check"]["steps"] == asked.steps and case["source_digest"]
        assert ("real" in case) == ("loopback" in case) == (not asked.time_sliced)
    if asked.time_sliced:
        assert not data["beside"]
        return
    for line in table(data):
        assert line["nccl_chain"] > 0 and line["wins"]
    assert all({"nccl", "symm_mem_one_shot", "symm_mem_two_shot"} <= set(line) for line in reduces(data))
    for case in data["cases"]:
        assert 1 < case["loopback"]["us"] < 200 and 1 < case["real"]["us"] < 500


@pytest.mark.parametrize(("player", "said"), [("Killed", "rank 1 was killed by SIGKILL"), ("Late", "rank 1")])
def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, player: str, said: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    asked = request(player=f"gpu_faults:{player}", families=("output_projection",), limit_s=6.0)
    with pytest.raises(RanksError) as caught:
        start(asked, wall_s=300)
    assert said in str(caught.value).split("; ")[0] and "\n" not in str(caught.value)
