"""What was launched against what was planned, from a graph's names and from a trace; a captured loop in a run's report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from k3lab.cli.decode_trace import traced_differences
from k3lab.decode.launches import counted, differences
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.random_weights import random_weights
from k3lab.decode.run_options import RunOptions
from k3lab.decode.speculate_run import speculate
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import SingleRank, StandIn

PLANNED = {"k3_router_cute_step": 3, "k3_kda_cute_core": 2}


def test_tuned_kernels_are_counted_by_symbol() -> None:
    names = ["k3_router_cute_step"] * 3 + ["k3_kda_cute_core"] * 2 + ["void at::copy"] * 5
    assert differences(PLANNED, names) == []
    assert differences(PLANNED, names * 4, steps=4) == []
    made = counted(PLANNED, names)
    assert (made["planned"], made["tuned"], made["kernels"], made["differences"]) == (5, 5, 10, [])
    assert differences(PLANNED, [*names[1:], "k3_new_cute_x"]) == [
        "k3_new_cute_x: 1 launches in 1 step, 0 planned", "k3_router_cute_step: 2 launches in 1 step, 3 planned",
    ]  # fmt: skip
    assert differences(PLANNED, names, steps=2)[0] == "k3_kda_cute_core: 2 launches in 2 steps, 4 planned"
    assert len(differences({}, names)) == 2  # a step that was left to auto launches none


def test_a_trace_is_counted_the_same_way(tmp_path: Path) -> None:
    def kernel(name: str, at: int) -> dict:
        return {
            "ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": 2, "pid": 0, "tid": 7,
            "args": {"device": 0, "stream": 7, "correlation": at, "grid": [1, 1, 1], "block": [32, 1, 1]},
        }  # fmt: skip

    names = ["k3_router_cute_step"] * 3 + ["k3_kda_cute_core"] * 2 + ["other"]
    path = tmp_path / "steps.json"
    events = [kernel(name, 10 * place) for place, name in enumerate(names * 2)]
    path.write_text(json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}))
    assert traced_differences(path, PLANNED, 2) == []
    assert traced_differences(path, PLANNED, 1) == [
        "k3_kda_cute_core: 4 launches in 1 step, 2 planned", "k3_router_cute_step: 6 launches in 1 step, 3 planned",
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
def test_a_run_with_drafts_decodes_the_same_from_its_captured_loop(tiny: ModelCard, rows: int) -> None:
    weights = random_weights(tiny, seed=3, dtype=torch.float64)
    options = RunOptions(rows=rows, tokens=7, drafts=2, prompt=3, fill=5)
    prompts = torch.randint(0, tiny.vocab_size, (rows, 3), generator=torch.Generator().manual_seed(1))
    made = speculate(weights, options, prompts, SingleRank(), ReferenceOperators(tiny), lambda *_: None, captured=True)
    assert made.graph_tokens == made.tokens
    assert len(made.graph_step_ns) >= 3
    assert made.told["drafter_ns"] > 0
    assert made.kernels == []  # nothing is captured here


def test_a_rank_alone_drafts_under_synthetic_acceptance_alone(tiny: ModelCard) -> None:
    weights = random_weights(tiny, seed=3, dtype=torch.float64, tp=2)
    prompts = torch.tensor([[3]])

    def go(rank: int, length: float | None) -> list[list[int]]:
        options = RunOptions(tp=2, rows=1, tokens=4, drafts=3, acceptance_length=length)
        return speculate(weights, options, prompts, StandIn(rank, 2), ReferenceOperators(tiny), lambda *_: None).tokens

    assert all(0 <= token < tiny.vocab_size // 2 for token in go(0, 3.0)[0])
    for rank, length in ((0, None), (1, 3.0)):
        with pytest.raises(InputError, match="rank 0 can time them with --acceptance-length"):
            go(rank, length)
