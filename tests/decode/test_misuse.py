"""What a step refuses, what a failed step leaves behind, and that requests do not touch each other."""

from __future__ import annotations

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import SMALL_K3, InputError, ModelCard
from k3lab.kernels.collectives import SingleRank, StandIn


@pytest.fixture(scope="module")
def weights(tiny: ModelCard, tiny_tensors: ModelTensors) -> RankWeights:
    return pack(tiny_tensors, tiny, tp=1, rank=0)


def fresh(card: ModelCard, tp: int = 1) -> DecodeCache:
    return DecodeCache(card, tp=tp, max_requests=3, max_context=16, max_verify=4, block_size=4, dtype=torch.float64)


def test_accepting_a_request_twice_is_refused_and_changes_nothing(tiny: ModelCard) -> None:
    cache = fresh(tiny)
    slot = cache.add()
    cache.begin([slot], 2)
    with pytest.raises(InputError, match="different requests"):
        cache.accept([slot, slot], [1, 1])
    assert cache.context[slot] == 0
    cache.accept([slot], [1])
    assert cache.length(slot) == cache.context[slot] == 1


@pytest.mark.parametrize("blocks", [0, -1])
def test_no_blocks_are_refused(tiny: ModelCard, blocks: int) -> None:
    with pytest.raises(InputError, match=f"blocks is {blocks}"):
        DecodeCache(tiny, max_requests=1, max_context=4, dtype=torch.bfloat16, blocks=blocks)


def test_parts_of_different_ranks_or_models_are_refused(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    second = pack(shard(tiny_tensors, tiny, tp=2, rank=1), tiny, tp=2, rank=1)
    operators, ids = ReferenceOperators(tiny), torch.tensor([[1]])
    wrong = [
        (fresh(tiny, 2), SingleRank(), "rank 1 of 2, the group has this as rank 0 of 1"),
        (fresh(tiny, 2), StandIn(0, 2), "rank 0 of 2"),
        (fresh(tiny, 1), StandIn(1, 2), "cache is for tiny-k3 at TP 1"),
        (fresh(SMALL_K3, 2), StandIn(1, 2), "cache is for small-k3"),
    ]
    for cache, comm, says in wrong:
        slot = cache.add()
        with pytest.raises(InputError, match=says):
            step(second, cache, ids, [slot], operators, comm)
        cache.begin([slot], 1)  # nothing was begun


class FailsInLayer(ReferenceOperators):
    """Raises at its third MLP: by then some layers hold the step's state."""

    def __init__(self, card: ModelCard) -> None:
        super().__init__(card)
        self.left = 3

    def experts(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.left -= 1
        if not self.left:
            raise RuntimeError("lost")
        return super().experts(*args)


def test_a_request_whose_step_failed_cannot_go_on_but_the_others_can(tiny: ModelCard, weights: RankWeights) -> None:
    cache, good = fresh(tiny), ReferenceOperators(tiny)
    slots = [cache.add(), cache.add()]
    ids = torch.tensor([[3], [4]])
    step(weights, cache, ids, slots, good, SingleRank())
    cache.accept(slots, [1, 1])
    with pytest.raises(RuntimeError, match="lost"):
        step(weights, cache, ids[:1], slots[:1], FailsInLayer(tiny), SingleRank())
    with pytest.raises(InputError, match="failed half-way; forget or release"):
        step(weights, cache, ids[:1], slots[:1], good, SingleRank())
    with pytest.raises(InputError, match="no step to accept"):
        cache.accept(slots[:1], [1])
    step(weights, cache, ids[1:], slots[1:], good, SingleRank())
    cache.accept(slots[1:], [1])
    cache.forget(slots[0])
    again = step(weights, cache, ids[:1], slots[:1], good, SingleRank())
    clean = fresh(tiny)
    first = step(weights, clean, ids[:1], [clean.add()], good, SingleRank())
    assert torch.equal(again, first)


@pytest.mark.parametrize("operators", [ReferenceOperators, AutoOperators])
def test_a_request_that_became_nan_does_not_reach_the_others(
    tiny: ModelCard, weights: RankWeights, operators: type
) -> None:
    made = operators(tiny) if operators is ReferenceOperators else operators(tiny, dtype=torch.float64, device="cpu")
    cache = fresh(tiny)
    slots = [cache.add(), cache.add()]
    ids = torch.tensor([[3], [4]])
    want = step(weights, cache, ids, slots, made, SingleRank())[1]
    for slot in slots:
        cache.forget(slot)
    for rows in cache.mla.values():
        rows[0] = torch.nan  # the first request's block, which unused table entries name too
        rows[cache.block_table[slots[1], 0]] = torch.nan  # left over from an earlier owner
    assert torch.equal(step(weights, cache, ids, slots, made, SingleRank())[1], want)
