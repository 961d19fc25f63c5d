"""One copy of the experts serves every operator, whichever layout it is in; and a step of a padded batch."""

from __future__ import annotations

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.expert_memory import hold, release, routed_of, shared_of
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.weights import MoeMlp
from k3lab.kernels import ModelCard


@pytest.fixture
def mlp(tiny: ModelCard, tiny_tensors: ModelTensors) -> MoeMlp:
    made = pack(shard(tiny_tensors, tiny, tp=2, rank=1), tiny, tp=2, rank=1).layers[1].mlp
    assert isinstance(made, MoeMlp)
    return made


def test_every_operator_reads_held_experts_as_the_checkpoints(tiny: ModelCard, mlp: MoeMlp) -> None:
    generator = torch.Generator().manual_seed(1)
    latent, x = (torch.randn(5, width, generator=generator).double() for width in (128, 256))
    ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(5)])
    weights = torch.rand(5, 4, generator=generator).double()
    latent = latent[:, : tiny.routed_expert_hidden_size]
    everyone = (
        ReferenceOperators(tiny),
        AutoOperators(tiny, dtype=torch.float64, device="cpu"),
        PrefillOperators(tiny, dtype=torch.float64, device="cpu"),
    )
    before = [one.experts(latent, ids, weights, x, mlp) for one in everyone]
    copy = mlp.experts.w1.clone()
    hold(mlp)
    assert not torch.equal(mlp.experts.w1, copy)
    hold(mlp)  # a second time changes nothing
    after = [one.experts(latent, ids, weights, x, mlp) for one in everyone]
    for want, got in zip(before, after, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    assert torch.equal(routed_of(mlp).w1, copy)
    assert torch.equal(routed_of(mlp, torch.tensor([3, 1])).w1, copy[[3, 1]])
    release(mlp)
    release(mlp)
    assert torch.equal(mlp.experts.w1, copy)
    assert shared_of(mlp)[0] is mlp.shared_gate


def test_places_name_the_snapshot_and_a_place_for_every_token(tiny: ModelCard) -> None:
    cache = DecodeCache(tiny, max_requests=3, max_context=9, max_verify=4, dtype=torch.float64)
    slots = [cache.add() for _ in range(3)]
    cache.begin(slots, 3)
    cache.accept(slots, [1, 3, 2])
    places = cache.kda_places(torch.tensor([2, 0, 1]), 2)
    assert places.dtype == torch.int32
    # entry 0 is nobody's; a slot has four entries; the second column is token 0
    assert places.tolist() == [[1 + 8 + 1, 9, 10], [1 + 0 + 0, 1, 2], [1 + 4 + 2, 5, 6]]
    for pools, views in ((cache.kda_pools[0][0], cache.kda_convs[0]), (cache.kda_pools[0][1], cache.kda_states[0])):
        pools[places[0, 0]].fill_(7.0)
        assert bool((views[2, 1] == 7.0).all())
        assert int((views != 0).sum()) == views[2, 1].numel()
        pools[places[0, 0]].zero_()


def test_the_padding_slot_has_memory_of_its_own(tiny: ModelCard) -> None:
    plain = DecodeCache(tiny, max_requests=2, max_context=20, max_verify=8, block_size=4, dtype=torch.float64)
    cache = DecodeCache(
        tiny, max_requests=2, max_context=20, max_verify=8, block_size=4, dtype=torch.float64, padding=True
    )
    assert (plain.padding, cache.padding) == (None, 2)
    assert cache.free_blocks == plain.free_blocks == 10
    assert cache.mla[2].shape[0] == 12
    assert cache.block_table[2, :3].tolist() == [10, 11, 0]
    assert cache.kda_states[0].shape[0] == 3
    slots = [cache.add(), cache.add()]
    cache.begin(slots, 8)
    owned = {block for slot in slots for block in cache.blocks_of(slot)}
    assert not owned & {10, 11}
    where = torch.tensor([0, 2, 2])
    cache.advance(where, torch.tensor([5, 0, 0], dtype=torch.int32))
    assert cache.context.tolist() == [5, 0, 0]
    assert cache.snapshot.tolist() == [4, 0, 0]
