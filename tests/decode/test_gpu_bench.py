"""On a GPU: a bench counts launches, times layers, and both backends put out the same greedy tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.default_engines import DefaultEngines
from k3lab.decode.bench.run import run_bench
from k3lab.decode.bench.traffic import run_traffic
from k3lab.decode.demo import DEMO_TP, demo_card
from k3lab.decode.evaluation.evaluate import EvalOptions, Record, evaluate
from k3lab.decode.evaluation.places import places
from k3lab.decode.evaluation.problems import read_problems
from k3lab.decode.group import Group
from k3lab.decode.run_options import RunOptions
from k3lab.decode.traffic.sessions import Session, Turn, traffic_of
from k3lab.kernels import SMALL_K3
from k3lab.kernels.collectives import SingleRank
from k3lab.kernels.device import Device

from .engines_case import five_layers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_bench_measures_what_a_cpu_cannot(drafts: int, tmp_path: Path) -> None:
    options = RunOptions(rows=2, prompt=20, tokens=12, drafts=drafts, seed=1)
    data = run_bench(SMALL_K3, options, rounds=2, samples=4, out=tmp_path / "out")
    assert data["between"]["comparable"] and data["between"]["ratios"]["step time, median"]["times_better"] > 0
    for report in data["reports"].values():
        assert report["evidence"] == "measured" and not report["launches"]["differences"]
        assert report["measures"]["kda MoE layer, launches"]["value"] > 5
        assert 0 < report["measures"]["step alone, share of the byte floor"]["value"] < 1
        assert ("drafter time" in report["measures"]) == bool(drafts)
        assert "launches a layer" not in report["absent"] and len(report["seen"]["each"]) == 4
    # without a bundle both run PyTorch's operators, from graphs of their own
    auto, own = data["reports"].values()
    assert auto["seen"]["tokens_digest"] == own["seen"]["tokens_digest"]


def test_a_rank_of_a_preset_is_timed_alone() -> None:
    options = RunOptions(tp=DEMO_TP, rows=1, tokens=40, drafts=7, acceptance_length=6.0)
    data = run_bench(demo_card(), options, names=("auto",), samples=4)
    report = data["reports"]["auto"]
    assert report["conditions"]["transport"] == "loopback" and 5 < report["seen"]["mean_tokens_a_step"] < 7
    assert any("no link cost" in line for line in report["notes"])


@pytest.mark.parametrize("drafts", [0, 2])
def test_sessions_are_replayed(drafts: int) -> None:
    talk = traffic_of(
        [
            Session("a", 0.0, "s", 30, (Turn(0.0, 20, 6), Turn(1.0, 5, 9))),
            Session("b", 0.1, "s", 30, (Turn(0.0, 3, 4),)),
        ]
    )
    data = run_traffic(SMALL_K3, RunOptions(rows=2, drafts=drafts), talk)
    for report in data["reports"].values():
        assert report["seen"]["output_tokens"] == 19 and report["seen"]["reused_tokens"] >= 85
        assert report["measures"]["user rate, median"]["value"] > 0


def test_an_evaluation_runs_kernels_on_contexts_of_their_kind(device: Device, tmp_path: Path) -> None:
    """Longer ones than the shortest kind of MLA kernels holds, in the cache's pages."""
    card, group = (
        replace(five_layers(64, 2048), max_position_embeddings=8192),
        Group(0, 1, SingleRank(), "one rank", device),
    )
    made = torch.Generator().manual_seed(1)
    lines = [
        {"prompt_ids": torch.randint(0, 2048, (1100 + n,), generator=made).tolist(), "answer_ids": [1]}
        for n in range(3)
    ]  # fmt: skip
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options, record = EvalOptions(tokens=6, rows=2), Record(None, {})
    bundle: Any = DefaultEngines()
    here = places(card, group, checkpoint=None, bundle=bundle, gpu="H200", rows=2, seed=0, context=1108)
    assert here.bundle
    used = {one["family"]: one["kind"] for one in here.bundle["used"]}
    assert {"mla", "kda", "experts", "output_projection"} <= set(used), here.bundle
    report = evaluate(read_problems(path), options, here.backends, record=record)
    told = report["steps"]["latency_specialized"]
    assert told["served"] == 2 * (options.tokens - 1), told  # two, then the third alone; prompts are auto's
    for problem in "123":
        own, other = (record.outputs[backend, problem, 0] for backend in ("auto", "latency_specialized"))
        assert own.tokens[0] == other.tokens[0] and len(other.tokens) == options.tokens
        assert all(-20 < one <= 0 for one in other.logprobs)
