"""Backends of the tiny model for the tests of evaluations, one of them with a fault that can be put in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.dispatch import Dispatcher
from k3lab.decode.evaluation.generate import generate
from k3lab.decode.evaluation.outputs import Asked
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.weights import RankWeights
from k3lab.kernels import ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank

ROWS = 4
ANSWER = 6


def weights_of(tensors: ModelTensors, card: ModelCard) -> RankWeights:
    return pack(shard(tensors, card, tp=1, rank=0), card, tp=1, rank=0)


class Faulty(ReferenceOperators):
    """Half of the heads of every KDA layer put nothing out: what a block that reads the wrong place may do."""

    def kda(self, proj: torch.Tensor, *more: Any) -> torch.Tensor:
        out = super().kda(proj, *more)
        return torch.cat([out[:, : out.shape[1] // 2], torch.zeros_like(out[:, out.shape[1] // 2 :])], dim=1)


def dispatcher(
    weights: RankWeights, operators: Any, context: int, rows: int = ROWS, comm: Collectives | None = None
) -> Dispatcher:
    cache = DecodeCache(weights.card, tp=weights.tp, max_requests=rows, max_context=context, dtype=weights.dtype)
    return Dispatcher(weights, cache, comm or SingleRank(), auto=operators)


def backends(
    weights: RankWeights, second: type = ReferenceOperators, context: int = 16
) -> dict[str, Callable[[], Dispatcher]]:
    auto = AutoOperators(weights.card, dtype=weights.dtype, device=weights.device)
    return {
        "auto": lambda: dispatcher(weights, auto, context),
        "latency_specialized": lambda: dispatcher(weights, second(weights.card), context),
    }


def prompts(count: int, vocabulary: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def write_problems(path: Path, asked: Sequence[Sequence[int]], weights: RankWeights) -> Path:
    """What the twins answer, greedily, as a problem file."""
    made = dispatcher(weights, ReferenceOperators(weights.card), 64)
    answers = dict(generate(made, [Asked(tuple(ids), 0) for ids in asked], rows=ROWS, most=ANSWER))
    lines = [{"id": f"p{n}", "prompt_ids": list(ids), "answer_ids": answers[n].tokens} for n, ids in enumerate(asked)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
