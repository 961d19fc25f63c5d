"""Steps that the specialised path does not serve: every fallback computes the same step, and is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.dispatch import Dispatcher, StepWork, alike
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.scope import (
    Scope,
)  # fmt: skip
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import SingleRank

from .scope_case import scope

EXACT = 1e-9


@pytest.fixture(scope="module")
def weights(tiny: ModelCard, tiny_tensors: ModelTensors) -> RankWeights:
    return pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)


class Bench:
    """A dispatcher whose specialised operators are the twins and note the rows they are asked for."""

    def __init__(self, weights: RankWeights, own: Scope, requests: int, **more: Any) -> None:
        card = weights.card
        self.cache = DecodeCache(
            card, max_requests=requests, max_context=24, max_verify=8, block_size=4, dtype=weights.dtype
        )
        self.slots = [self.cache.add() for _ in range(requests)]
        self.asked: list[int] = []
        self.said: list[str] = []

        def specialized(rows: int) -> ReferenceOperators:
            self.asked.append(rows)
            return ReferenceOperators(card)

        self.dispatcher = Dispatcher(
            weights, self.cache, SingleRank(), auto=AutoOperators(card, dtype=weights.dtype, device="cpu"),
            specialized=specialized, scope=own, say=self.said.append, **{"backend": "latency_specialized", **more},
        )  # fmt: skip

    def __call__(self, work: StepWork, accept: int = 1) -> dict[int, torch.Tensor]:
        out = self.dispatcher.run(work)
        self.cache.accept(list(work.tokens), [accept] * len(work.tokens))
        return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


CASES: dict[str, tuple[dict[str, Any], StepWork, bool]] = {
    "served": ({}, StepWork({0: [1, 2], 1: [3, 4], 2: [5, 6]}), True),
    "prefill": ({}, StepWork(prompts={0: [1, 2, 3], 2: [4, 5]}), False),
    "mixed": ({}, StepWork({1: [5, 6]}, {0: [1, 2, 3]}), False),
    "ragged": ({}, StepWork({0: [1, 2, 3], 1: [4], 2: [5, 6, 7]}), False),
    "no_graph": ({"graph_rows": 2}, StepWork({0: [1], 1: [2], 2: [3]}), False),
    "no_rows": ({"entry_rows": 1}, StepWork({0: [1], 1: [2]}), False),
    "no_tp": ({"entry_rows": 0}, StepWork({0: [1], 1: [2]}), False),
    "ssm_dtype": ({"ssm_dtype": "bfloat16"}, StepWork({0: [1]}), False),
    "kv_dtype": ({"kv_dtype": "float16"}, StepWork({0: [1]}), False),
    "sms": ({"sms": 100}, StepWork({0: [1]}), False),
}


@pytest.mark.parametrize("case", CASES)
def test_every_fallback_computes_its_step_and_is_told(case: str, weights: RankWeights) -> None:
    changes, work, served = CASES[case]
    bench = Bench(weights, scope(**changes), 3)
    got = bench(work)
    assert bench.asked == ([6] if served else [])
    if served:
        assert not bench.said
    else:
        assert len(bench.said) == 1
        assert bench.dispatcher.tally.to_json()["fallbacks"][0]["code"] == case
    assert list(got) == [*work.prompts, *work.tokens]
    for slot, ids in {**work.tokens, **work.prompts}.items():  # each request alone, by the twins, a token a step
        cache = DecodeCache(weights.card, max_requests=1, max_context=24, dtype=weights.dtype)
        alone, rows = cache.add(), []
        for token in ids:
            rows.append(
                step(weights, cache, torch.tensor([[token]]), [alone], ReferenceOperators(weights.card), SingleRank())[
                    0, 0
                ]
            )
            cache.accept([alone], [1])
        want = torch.stack(rows if slot in work.tokens else rows[-1:])
        assert error(got[slot], want) < EXACT, slot
        assert bench.cache.length(slot) == (1 if slot in work.tokens else len(ids))


def test_more_than_64_rows_are_run_in_parts(weights: RankWeights) -> None:
    bench = Bench(weights, scope(), 9)
    got = bench(StepWork({slot: [slot + 1] * 8 for slot in bench.slots}), accept=8)
    assert bench.dispatcher.tally.to_json()["fallbacks"][0]["code"] == "rows"
    few = Bench(weights, scope(), 1)
    assert error(got[8], few(StepWork({0: [9] * 8}), accept=8)[0]) < EXACT
    assert few.asked == [8]
    assert [len(part) for part in alike({slot: [0] * 8 for slot in range(20)})] == [8, 8, 4]
    assert list(alike({5: [1, 2], 3: [1], 4: [1, 2]})) == [[5, 4], [3]]


def test_a_backend_that_was_not_asked_for_is_not_used_and_not_counted(weights: RankWeights) -> None:
    bench = Bench(weights, scope(), 2, backend="auto")
    bench(StepWork({0: [1], 1: [2]}))
    assert (bench.asked, bench.said, bench.dispatcher.tally.steps) == ([], [], 0)
    auto = AutoOperators(weights.card, dtype=weights.dtype, device="cpu")
    assert Dispatcher(weights, bench.cache, SingleRank(), auto=auto).backend == "auto"
    with pytest.raises(InputError, match="needs its operators and the scope"):
        Dispatcher(weights, bench.cache, SingleRank(), auto=auto, backend="latency_specialized")
    with pytest.raises(InputError, match="unknown backend"):
        Dispatcher(weights, bench.cache, SingleRank(), auto=auto, backend="fast")


def test_a_draft_that_fills_up_makes_a_ragged_step_served(weights: RankWeights) -> None:
    bench, ragged = Bench(weights, scope(), 2), Bench(weights, scope(), 2)
    full = bench(StepWork({0: [1, 2, 3], 1: [4, 5, -1]}), accept=2)
    parts = ragged(StepWork({0: [1, 2, 3], 1: [4, 5]}), accept=2)
    assert (bench.asked, ragged.asked) == ([6], [])
    assert error(full[0], parts[0]) < EXACT
    assert error(full[1][:2], parts[1]) < EXACT
    after = [one(StepWork({0: [7], 1: [8]})) for one in (bench, ragged)]
    assert error(after[0][1], after[1][1]) < EXACT


def test_taps_see_their_own_request(weights: RankWeights) -> None:
    seen: dict[int, list[tuple[int, tuple[int, ...]]]] = {0: [], 1: [], 2: []}
    bench = Bench(weights, scope(), 3)

    def tap(slot: int) -> Callable[[int, torch.Tensor], None]:
        return lambda layer, rows: seen[slot].append((layer, tuple(rows.shape)))

    bench.dispatcher.run(StepWork({0: [1, 2], 1: [3, 4]}, {2: [1, 2, 3]}), tap)
    layers = range(weights.card.num_hidden_layers)
    assert seen[0] == seen[1] == [(layer, (2, 256)) for layer in layers]
    assert seen[2] == [(layer, (3, 256)) for layer in layers]


def test_a_request_twice_in_a_step_is_refused(weights: RankWeights) -> None:
    bench = Bench(weights, scope(), 2)
    with pytest.raises(InputError, match="request 1 has a prompt and tokens to decode"):
        bench.dispatcher.run(StepWork({0: [1], 1: [2]}, {1: [3]}))
    with pytest.raises(InputError, match="is none"):
        bench.dispatcher.run(StepWork())
