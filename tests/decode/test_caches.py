"""Slots, blocks, acceptance: what the cache refuses and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from k3lab.decode.caches import DecodeCache
from k3lab.kernels import InputError, ModelCard


@pytest.fixture
def cache(tiny: ModelCard) -> DecodeCache:
    return DecodeCache(
        tiny, tp=4, max_requests=3, max_context=10, max_verify=4, block_size=4, blocks=5, dtype=torch.bfloat16
    )


def test_shapes_on_one_rank(cache: DecodeCache) -> None:
    assert set(cache.kda_states) == {0, 1, 3}
    assert set(cache.mla) == {2, 4, 5}
    assert cache.kda_states[0].shape == (3, 4, 4, 16, 16)
    assert cache.kda_states[0].dtype == torch.float32
    assert cache.kda_convs[0].shape == (3, 4, 3, 192)
    assert cache.kda_convs[0].dtype == torch.bfloat16
    assert cache.mla[2].shape == (5, 4, 40)
    assert cache.block_table.shape == (3, 3)


def test_blocks_are_given_as_needed_and_come_back(cache: DecodeCache) -> None:
    first, second = cache.add(), cache.add()
    cache.begin([first, second], 4)
    assert cache.free_blocks == 3
    cache.accept([first, second], [4, 1])
    cache.begin([second], 3)  # 1 + 3 tokens still fit in its block
    assert cache.free_blocks == 3
    cache.accept([second], [3])
    cache.begin([first, second], 1)
    assert cache.free_blocks == 1
    cache.accept([first, second], [1, 1])
    owned = [cache.block_table[slot, :2].tolist() for slot in (first, second)]
    assert len({block for blocks in owned for block in blocks}) == 4
    cache.release(first)
    assert cache.free_blocks == 3
    assert cache.slots == (second,)


def test_a_full_cache_says_so_and_takes_nothing(cache: DecodeCache) -> None:
    slots = [cache.add() for _ in range(3)]
    with pytest.raises(InputError, match="the cache is full: it holds 3 requests"):
        cache.add()
    cache.begin(slots, 4)
    cache.accept(slots, [4, 4, 4])
    with pytest.raises(
        InputError, match="the cache is full: the step needs 3 more blocks of 4 tokens, 2 of 5 are free"
    ):
        cache.begin(slots, 1)
    assert cache.free_blocks == 2
    cache.begin(slots[:2], 4)  # the refused step left nothing pending
    cache.accept(slots[:2], [4, 4])
    cache.release(slots[2])
    with pytest.raises(InputError, match="request 0 needs a context of 12 tokens, max_context is 10"):
        cache.begin([slots[0]], 4)


def test_acceptance_is_checked(cache: DecodeCache) -> None:
    slot = cache.add()
    with pytest.raises(InputError, match="request 0 has no step to accept"):
        cache.accept([slot], [1])
    cache.begin([slot], 2)
    for count in (0, 3):
        with pytest.raises(InputError, match=f"{count} accepted tokens, its step had 2"):
            cache.accept([slot], [count])
    with pytest.raises(InputError, match="unaccepted step of 2 tokens"):
        cache.begin([slot], 1)
    with pytest.raises(InputError, match="1 requests and 2 counts"):
        cache.accept([slot], [1, 1])
    cache.accept([slot], [2])
    assert cache.length(slot) == 2
    assert cache.context.tolist() == [2, 0, 0]
    assert cache.snapshot.tolist() == [1, 0, 0]


def test_the_next_step_reads_the_accepted_snapshot(cache: DecodeCache) -> None:
    slots = [cache.add(), cache.add()]
    where = torch.tensor(slots)
    cache.begin(slots, 3)
    states = torch.arange(6.0).view(2, 3, 1, 1, 1).expand(2, 3, 4, 16, 16)
    convs = torch.arange(6.0).view(2, 3, 1, 1).expand(2, 3, 3, 192).bfloat16()
    cache.kda_write(1, where, convs, states)
    cache.accept(slots, [3, 1])
    conv, state = cache.kda_read(1, where)
    assert state[:, 0, 0, 0].tolist() == [2, 3]
    assert conv[:, 0, 0].tolist() == [2, 3]


def test_a_new_request_in_an_old_slot_starts_empty(cache: DecodeCache) -> None:
    slot = cache.add()
    cache.begin([slot], 2)
    cache.kda_write(0, torch.tensor([slot]), torch.ones(1, 2, 3, 192).bfloat16(), torch.ones(1, 2, 4, 16, 16))
    cache.accept([slot], [2])
    cache.release(slot)
    assert cache.add() == slot
    conv, state = cache.kda_read(0, torch.tensor([slot]))
    assert not conv.any()
    assert not state.any()
    assert cache.context[slot] == 0
    assert not cache.block_table[slot].any()


def test_a_forgotten_request_keeps_its_blocks(cache: DecodeCache) -> None:
    slot = cache.add()
    cache.reserve([slot], 9)
    assert cache.free_blocks == 2
    cache.begin([slot], 1)
    cache.accept([slot], [1])
    cache.forget(slot)
    assert (cache.length(slot), cache.free_blocks, cache.context[slot].item()) == (0, 2, 0)


@pytest.mark.parametrize("name", ["max_requests", "max_context", "max_verify", "block_size"])
def test_sizes_below_one_are_refused(tiny: ModelCard, name: str) -> None:
    sizes = {"max_requests": 1, "max_context": 4, "max_verify": 1, "block_size": 2, name: 0}
    with pytest.raises(InputError, match=f"{name} is 0, must be at least 1"):
        DecodeCache(tiny, dtype=torch.bfloat16, **sizes)


def test_unknown_slots_are_refused(cache: DecodeCache) -> None:
    with pytest.raises(InputError, match="slot 1 holds no request; slots in use: none"):
        cache.release(1)
