"""Steps for every row count, as they are captured on a GPU and run here: padding disturbs nobody, loops equal the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.dispatch import Dispatcher, StepWork
from k3lab.decode.dspark.acceptance import acceptance
from k3lab.decode.dspark.captured import SpeculationGraphs
from k3lab.decode.dspark.decoder import SpeculativeDecoder
from k3lab.decode.dspark.drafter import Drafter
from k3lab.decode.dspark.weights import random_rank_draft
from k3lab.decode.graphs import StepGraphs, sizes_of
from k3lab.decode.packing import pack
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.speculate_run import fitted_card
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import SingleRank

from .scope_case import scope

EXACT = 1e-12


@pytest.fixture(scope="module")
def weights(tiny: ModelCard, tiny_tensors: ModelTensors) -> RankWeights:
    return pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)


def cache_of(card: ModelCard, requests: int, **more: Any) -> DecodeCache:
    return DecodeCache(
        card, max_requests=requests, max_context=40, max_verify=8, block_size=4, dtype=torch.float64, **more
    )


def operators(weights: RankWeights) -> AutoOperators:
    return AutoOperators(weights.card, dtype=weights.dtype, device="cpu")


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return ((got - want).norm() / want.norm()).item() < EXACT


def test_row_counts_that_are_captured() -> None:
    assert sizes_of(1) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
    assert sizes_of(8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert sizes_of(4) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    assert sizes_of(6, 32) == (1, 2, 3, 4, 5)
    assert sizes_of(5)[-1] == 12


def test_steps_of_fewer_requests_than_captured_are_those_alone(tiny: ModelCard, weights: RankWeights) -> None:
    own, plain = cache_of(tiny, 5, padding=True), cache_of(tiny, 5)
    asked: list[int] = []

    def served(rows: int) -> AutoOperators:
        asked.append(rows)
        return operators(weights)

    graphs = StepGraphs(weights, own, SingleRank(), served, sizes=(2, 5), taps=(1, 4))
    assert asked == [5, 2]  # the largest first
    assert graphs.most_rows == 5
    slots = [own.add() for _ in range(5)]
    assert slots == [plain.add() for _ in range(5)]
    generator = torch.Generator().manual_seed(2)
    for chosen in ([3, 0, 1], [4], [2, 1], [0, 1, 2, 3, 4], [1]):
        ids = torch.randint(0, 512, (len(chosen), 1), generator=generator)
        seen: dict[int, torch.Tensor] = {}
        wanted: dict[int, torch.Tensor] = {}
        own.begin(chosen, 1)
        got = graphs.step(ids, chosen, lambda layer, rows, seen=seen: seen.update({layer: rows.clone()}))
        want = step(
            weights, plain, ids, chosen, operators(weights), SingleRank(),
            tap=lambda layer, rows, wanted=wanted: wanted.update({layer: rows.clone()}),
        )  # fmt: skip
        assert near(got, want)
        assert set(seen) == {1, 4}
        assert all(near(rows, wanted[layer]) for layer, rows in seen.items())
        for one in (own, plain):
            one.accept(chosen, [1] * len(chosen))
    assert int(own.context[5]) == 0  # the padding slot's context stays empty
    assert own.context[:5].tolist() == plain.context.tolist()
    for layer, states in plain.kda_states.items():
        assert near(own.kda_states[layer][:5, 0], states[:, 0])
    with pytest.raises(InputError, match="these graphs take 1 tokens each"):
        graphs.step(torch.zeros(2, 2, dtype=torch.int64), [0, 1])
    with pytest.raises(InputError, match="no captured step holds 6 requests"):
        graphs.size_for(6)


def test_graphs_need_a_padding_slot_and_few_rows(tiny: ModelCard, weights: RankWeights) -> None:
    with pytest.raises(InputError, match="need a cache with a padding slot"):
        StepGraphs(weights, cache_of(tiny, 1), SingleRank(), lambda _rows: operators(weights))
    with pytest.raises(InputError, match="1 to 64 rows can be captured"):
        StepGraphs(
            weights,
            cache_of(tiny, 1, padding=True),
            SingleRank(),
            lambda _rows: operators(weights),
            q_len=8,
            sizes=(9,),
        )


def test_the_dispatcher_replays_what_is_served(tiny: ModelCard, weights: RankWeights) -> None:
    caches = cache_of(tiny, 4, padding=True), cache_of(tiny, 4)
    graphs = {
        width: StepGraphs(
            weights, caches[0], SingleRank(), lambda _rows: operators(weights), q_len=width, sizes=(4 // width,), taps=(2,)
        )
        for width in (1, 2)
    }  # fmt: skip
    count = {"replays": 0}
    for one in graphs.values():
        inner = one.step

        def counted(*args: Any, inner: Any = inner) -> torch.Tensor:
            count["replays"] += 1
            return inner(*args)

        one.step = counted  # type: ignore[method-assign]
    makers = (graphs.get, None)
    both = [
        Dispatcher(
            weights, cache, SingleRank(), auto=operators(weights), specialized=lambda _rows: operators(weights),
            scope=scope(graph_rows=4), backend="latency_specialized", graphs=make,
        )
        for cache, make in zip(caches, makers, strict=True)
    ]  # fmt: skip
    for cache in caches:
        for _ in range(4):
            cache.add()
    works = [
        StepWork(prompts={0: [3, 4, 5], 2: [7]}),
        StepWork(tokens={0: [9], 2: [8], 1: [7]}),
        StepWork(tokens={0: [9, 10], 3: [8, -1]}),
        StepWork(tokens={0: [1], 1: [2, 3]}),  # ragged: auto's
    ]
    for work in works:
        seen: list[dict[int, torch.Tensor]] = [{}, {}]

        def tap_of(place: int) -> Any:
            def tap(slot: int) -> Any:
                return lambda layer, rows: seen[place].update({slot: rows.clone()}) if layer == 2 else None  # noqa: B023

            return tap

        outs = [one.run(work, tap_of(place)) for place, one in enumerate(both)]
        assert set(outs[0]) == set(outs[1]) == {*work.tokens, *work.prompts}
        assert all(near(outs[0][slot], outs[1][slot]) for slot in outs[0])
        if work.tokens:
            assert all(near(seen[0][slot], rows) for slot, rows in seen[1].items())
        for cache in caches:
            cache.accept(list(work.tokens), [1] * len(work.tokens))
    assert count["replays"] == 2
    assert both[0].tally.to_json() == both[1].tally.to_json()
    assert both[0].tally.served == 2
    # what was returned stays when the next step runs
    first = both[0].run(StepWork(tokens={0: [9]}))[0]
    kept = first.clone()
    caches[0].accept([0], [1])
    both[0].run(StepWork(tokens={0: [400]}))
    assert torch.equal(first, kept)


@pytest.mark.parametrize(("temperature", "length"), [(0.0, None), (0.8, None), (0.0, 2.5)])
def test_a_captured_loop_puts_out_what_the_host_does(
    tiny: ModelCard, weights: RankWeights, temperature: float, length: float | None
) -> None:
    drafts, tokens, comm = 3, 9, SingleRank()
    prompts, seeds = [[17, 400, 3], [256], [8, 9]], [11, 22, 33]
    how = acceptance(drafts, temperature, length)
    card = fitted_card(tiny)
    draft = random_rank_draft(card, tiny, seed=1, dtype=torch.float64, device="cpu", tp=1, rank=0)

    def decoder(cache: DecodeCache) -> SpeculativeDecoder:
        made = SpeculativeDecoder(
            Dispatcher(weights, cache, comm, auto=operators(weights)), Drafter(draft, weights, cache, comm), how, drafts=drafts,
            draft_temperature=temperature,
        )  # fmt: skip
        made.admit(prompts, seeds)
        return made

    eager = decoder(cache_of(tiny, 3))
    while min(len(one.tokens) for one in eager.requests) < tokens:
        eager.step()
    looped = decoder(own := cache_of(tiny, 3, padding=True))
    graphs = SpeculationGraphs(
        weights, own, comm, lambda _rows: operators(weights), looped.drafter, how, drafts=drafts, sizes=(1, 4),
        draft_temperature=temperature,
    )  # fmt: skip
    requests = looped.requests
    graphs.begin([one.slot for one in requests], [one.last for one in requests], seeds)
    accepted = []
    while min(len(one.tokens) for one in requests) < tokens:
        for one, out in zip(requests, graphs.step(), strict=True):
            one.tokens += out
            accepted.append(len(out))
    assert [one.tokens for one in requests] == [one.tokens for one in eager.requests]
    assert [own.length(one.slot) for one in requests] == own.context[:3].tolist()
    assert len(set(accepted)) > 1 or temperature == 0  # some drafts came through where chance has a say
    if length:
        assert max(accepted) > 1
    assert int(own.context[3]) == 0
    with pytest.raises(InputError, match="no captured step holds 5 requests"):
        graphs.begin([0] * 5, [0] * 5, [0] * 5)


def test_a_captured_loop_refuses_what_it_cannot_hold(tiny: ModelCard, weights: RankWeights) -> None:
    draft = random_rank_draft(fitted_card(tiny), tiny, seed=1, dtype=torch.float64, device="cpu", tp=1, rank=0)

    def make(drafts: int, sizes: tuple[int, ...], **more: Any) -> None:
        cache = cache_of(tiny, 2, **more)
        SpeculationGraphs(
            weights, cache, SingleRank(), lambda _rows: operators(weights), Drafter(draft, weights, cache, SingleRank()),
            acceptance(drafts), drafts=drafts, sizes=sizes,
        )  # fmt: skip

    with pytest.raises(InputError, match="needs a padding slot"):
        make(3, (1,))
    with pytest.raises(InputError, match="1 to 64 rows can be captured"):
        make(7, (9,), padding=True)
    with pytest.raises(InputError, match="drafts 1 to 7"):
        make(8, (1,), padding=True)
