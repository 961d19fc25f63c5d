"""Each context over all ranks (DCP = TP): the same steps, with a part of the rows on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.saved import save
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks


def decode(tensors: ModelTensors, card: ModelCard, comm: Collectives, dcp: int) -> tuple[torch.Tensor, DecodeCache]:
    """Plain and verify steps of two requests, a part of the tokens accepted."""
    weights = pack(shard(tensors, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
    cache = DecodeCache(
        card, tp=comm.size, max_requests=2, max_context=30, max_verify=3, dtype=torch.float64, block_size=2, dcp=dcp
    )
    operators = ReferenceOperators(card, context_group=comm if dcp > 1 else None)
    slots, found = [cache.add(), cache.add()], []
    generator = torch.Generator().manual_seed(4)
    for width in (1, 3, 1, 2, 3, 1):
        ids = torch.randint(0, card.vocab_size, (2, width), generator=generator)
        found.append(step(weights, cache, ids, slots, operators, comm).flatten())
        cache.accept(slots, [width, 1 + width // 2])
    return torch.cat(found), cache


@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_contexts_give_the_steps_of_whole_ones(tiny: ModelCard, tiny_tensors: ModelTensors, ranks: int) -> None:
    want, whole = decode(tiny_tensors, tiny, SingleRank(), 1)
    made = run_virtual_ranks(ranks, lambda comm: decode(tiny_tensors, tiny, comm, ranks))
    for got, cache in made:
        assert torch.equal(got, made[0][0])
        assert ((got - want).norm() / want.norm()).item() < 1e-10
        # a rank's pages hold its part of the tokens: fewer blocks of the same size
        assert len(cache.blocks_of(0)) == -(-11 // (2 * ranks))
        assert cache.blocks < whole.blocks


def test_what_knows_no_context_parallelism_refuses_such_a_cache(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    weights = pack(shard(tiny_tensors, tiny, tp=2, rank=0), tiny, tp=2, rank=0)

    sizes: dict[str, Any] = {"max_requests": 1, "max_context": 8, "dtype": torch.float64}
    cache = DecodeCache(tiny, tp=2, dcp=2, **sizes)
    slot = cache.add()
    auto = AutoOperators(tiny, dtype=torch.float64, device="cpu")
    group: Any = type("Group", (), {"rank": 0, "size": 2})()
    with pytest.raises(InputError, match="contexts over 2 ranks, operators auto for 1"):
        step(weights, cache, torch.tensor([[1]]), [slot], auto, group)
    with pytest.raises(InputError, match="prefill knows no context parallelism"):
        prefill(
            weights, cache, slot, torch.tensor([1]), PrefillOperators(tiny, dtype=torch.float64, device="cpu"), group
        )
    with pytest.raises(InputError, match="cannot be saved by one of them"):
        save(cache, slot)
    odd = DecodeCache(tiny, tp=2, dcp=3, **sizes)
    with pytest.raises(InputError, match="it is 1 or TP, 2"):
        step(weights, odd, torch.tensor([[1]]), [odd.add()], auto, group)
    with pytest.raises(InputError, match="dcp is 0"):
        DecodeCache(tiny, dcp=0, **sizes)
