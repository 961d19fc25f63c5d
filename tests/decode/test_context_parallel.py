"""Each context over all ranks (DCP = TP): the same steps, with a part of the rows on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from k3lab.decode import library, prefill_operators, tuned
from k3lab.decode.auto import AutoOperators
from k3lab.decode.backends import backend_of
from k3lab.decode.bindings import step_kind
from k3lab.decode.caches import DecodeCache
from k3lab.decode.context_parallel import context_group
from k3lab.decode.greedy import GreedyGraph
from k3lab.decode.group import Group
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.run_options import RunOptions
from k3lab.decode.saved import restore, save
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import K3, Compiled, InputError, ModelCard, family
from k3lab.kernels.collectives import Collectives, SingleRank, StandIn, run_virtual_ranks
from k3lab.kernels.health import BUFFER
from k3lab.kernels.mla.family import WEIGHTS
from k3lab.kernels.mla.twin import MlaWeights
from k3lab.kernels.mla.twin_context import mla_context_parallel

from .twin_runner import entry

Made = Callable[[ModelCard, Collectives | None], Any]
"""Operators of a model for contexts that a group shares."""
FP8 = torch.float8_e4m3fn
SIZES: dict[str, Any] = {"max_requests": 2, "max_context": 30, "max_verify": 3, "block_size": 2, "dtype": torch.float64}


def reference(card: ModelCard, group: Collectives | None) -> ReferenceOperators:
    return ReferenceOperators(card, context_group=group)


def auto(card: ModelCard, group: Collectives | None) -> AutoOperators:
    return AutoOperators(card, dtype=torch.float64, device="cpu", context_group=group)


def rank_of(tensors: ModelTensors, card: ModelCard, comm: Collectives) -> RankWeights:
    return pack(shard(tensors, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)


def decode(
    tensors: ModelTensors, card: ModelCard, comm: Collectives, dcp: int, made: Made = reference, cache_dtype: Any = None
) -> tuple[torch.Tensor, DecodeCache]:
    """Plain and verify steps of two requests, a part of the tokens accepted."""
    weights = rank_of(tensors, card, comm)
    cache = DecodeCache(card, tp=comm.size, dcp=dcp, cache_dtype=cache_dtype, **SIZES)
    operators = made(card, context_group(comm, dcp))
    slots, found = [cache.add(), cache.add()], []
    generator = torch.Generator().manual_seed(4)
    for width in (1, 3, 1, 2, 3, 1):
        ids = torch.randint(0, card.vocab_size, (2, width), generator=generator)
        found.append(step(weights, cache, ids, slots, operators, comm).flatten())
        cache.accept(slots, [width, 1 + width // 2])
    return torch.cat(found), cache


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize(
    ("ranks", "made", "cache_dtype"), [(2, reference, None), (4, reference, None), (2, auto, FP8), (4, auto, None)]
)
def test_shared_contexts_give_the_steps_of_whole_ones(
    tiny: ModelCard, tiny_tensors: ModelTensors, ranks: int, made: Made, cache_dtype: Any
) -> None:
    want, whole = decode(tiny_tensors, tiny, SingleRank(), 1, made, cache_dtype)
    found = run_virtual_ranks(ranks, lambda comm: decode(tiny_tensors, tiny, comm, ranks, made, cache_dtype))
    for got, cache in found:
        assert torch.equal(got, found[0][0])
        assert error(got, want) < 1e-10
        # a rank's pages hold its part of the tokens: fewer blocks of the same size
        assert len(cache.blocks_of(0)) == -(-11 // (2 * ranks))
        assert cache.blocks < whole.blocks


def prefilled(tensors: ModelTensors, card: ModelCard, comm: Collectives, cache_dtype: Any) -> dict[str, Any]:
    """A prompt as steps of the twins and as a prefill behind a verify step, what both go on with, and what was saved of it."""
    weights, dcp = rank_of(tensors, card, comm), comm.size
    sizes: dict[str, Any] = {"tp": dcp, "dcp": dcp, "cache_dtype": cache_dtype, **SIZES}
    one, other = DecodeCache(card, **sizes), DecodeCache(card, **{**sizes, "block_size": 3})
    twins, operators = reference(card, comm), auto(card, comm)
    other.release((gone := other.add(), other.reserve([gone], 5))[0])  # an uneven free list
    prompt, after = [17, 400, 3, 17, 99, 256, 8, 8, 8, 511, 0], torch.tensor([[5, 6, 7]])
    here, there = one.add(), other.add()
    for token in prompt:
        logits = step(weights, one, torch.tensor([[token]]), [here], twins, comm)
        one.accept([here], [1])
    step(weights, other, torch.tensor([[17, 400, 3]]), [there], operators, comm)
    other.accept([there], [2])
    many = PrefillOperators(card, dtype=torch.float64, device="cpu", context_group=comm)
    found = {"want": logits[0, 0], "got": prefill(weights, other, there, torch.tensor(prompt[2:]), many, comm, chunk=4)}
    saved = {"want": save(one, here), "got": save(other, there)}
    back = DecodeCache(card, **{**sizes, "block_size": 4})
    place = (back.add(), back.add())[1]
    step(weights, back, torch.tensor([[8]]), [place], operators, comm)  # what it had is gone
    restore(back, place, saved["got"])
    near = save(other, there, rows=False)
    found["want after"] = step(weights, one, after, [here], twins, comm)
    found["got after"] = step(weights, other, after, [there], operators, comm)
    found["restored after"] = step(weights, back, after, [place], operators, comm)
    other.accept([there], [3])
    restore(other, there, near)
    found["rolled back after"] = step(weights, other, after, [there], operators, comm)
    return {**found, **{f"saved {name}": kept for name, kept in saved.items()}}


@pytest.mark.parametrize(("ranks", "cache_dtype"), [(2, None), (4, FP8)])
def test_a_prefill_of_shared_contexts_is_as_many_steps_and_its_ranks_save_their_parts(
    tiny: ModelCard, tiny_tensors: ModelTensors, ranks: int, cache_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_operators, "GATHERED", 1)  # stretches of one block
    made = run_virtual_ranks(ranks, lambda comm: prefilled(tiny_tensors, tiny, comm, cache_dtype))
    for rank, found in enumerate(made):
        assert error(found["got"], found["want"]) < 1e-9
        assert error(found["got after"], found["want after"]) < 1e-9
        assert torch.equal(found["restored after"], found["got after"])
        assert torch.equal(found["rolled back after"], found["got after"])
        held = len(range(rank, 11, ranks))
        for layer, rows in found["saved got"].rows.items():
            assert rows.shape[0] == -(-11 // ranks)
            wide = [
                own.rows[layer][:held].view(cache_dtype or rows.dtype).double()
                for own in (found["saved got"], found["saved want"])
            ]
            assert error(*wide) < (0.02 if cache_dtype else 1e-9), layer  # a value may round to its neighbour in FP8
    whole = DecodeCache(tiny, tp=1, **SIZES)
    with pytest.raises(InputError, match=f"over {ranks} ranks, the cache is for contexts over 1"):
        restore(whole, whole.add(), made[0]["saved got"])


def test_what_knows_no_context_parallelism_refuses_such_a_cache(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    weights = pack(shard(tiny_tensors, tiny, tp=2, rank=0), tiny, tp=2, rank=0)
    sizes: dict[str, Any] = {"max_requests": 1, "max_context": 8, "dtype": torch.float64}
    cache = DecodeCache(tiny, tp=2, dcp=2, **sizes)
    slot = cache.add()
    alone = auto(tiny, None)
    group: Any = type("Group", (), {"rank": 0, "size": 2})()
    with pytest.raises(InputError, match="contexts over 2 ranks, operators auto for 1"):
        step(weights, cache, torch.tensor([[1]]), [slot], alone, group)
    with pytest.raises(InputError, match="contexts over 2 ranks, operators prefill for 1"):
        prefill(
            weights, cache, slot, torch.tensor([1]), PrefillOperators(tiny, dtype=torch.float64, device="cpu"), group
        )
    odd = DecodeCache(tiny, tp=2, dcp=3, **sizes)
    with pytest.raises(InputError, match="it is 1 or TP, 2"):
        step(weights, odd, torch.tensor([[1]]), [odd.add()], alone, group)
    with pytest.raises(InputError, match="dcp is 0"):
        DecodeCache(tiny, dcp=0, **sizes)


def test_a_rank_alone_with_none_of_a_context_attends_to_nothing(tiny: ModelCard) -> None:
    weights = random_rank_weights(tiny, seed=1, dtype=torch.float64, tp=4, rank=3)
    comm = StandIn(3, 4)
    cache = DecodeCache(tiny, tp=4, dcp=4, **SIZES)
    slot = cache.add()
    made = step(weights, cache, torch.tensor([[400]]), [slot], auto(tiny, comm), comm)
    assert made.isfinite().all()


class ContextRunner:
    """The twin in place of kernels: its transport is the group."""

    def __init__(self, compiled: Compiled, device: str, transport: Any) -> None:
        self.problem, self.transport = compiled.problem, transport
        self.buffers = {BUFFER.name: torch.zeros(BUFFER.shape, dtype=torch.int32)}

    def bind(self, given: dict[str, torch.Tensor], *, rows: int) -> Any:
        one: Any = self.problem
        assert given["block_table"].shape[1] == one.blocks_each
        weights = MlaWeights(**{name: given[name] for name in WEIGHTS})

        def call() -> None:
            given["out"].copy_(mla_context_parallel(
                given["proj"], weights, given["cache"], given["block_table"], given["context"], q_len=one.q_len, eps=one.eps,
                nope=one.nope, rope=one.rope, comm=self.transport,
            ))  # fmt: skip

        return call


def mla_entry(card: ModelCard, kind: str, tp: int) -> Any:
    """Of pages of two tokens, as the cache has them."""
    made = entry(card, "mla", problem_kind=kind, tp=tp)
    problem: Any = replace(made.compiled.problem, block_size=2, context=29)  # type: ignore[call-arg]
    return replace(made, compiled=replace(made.compiled, problem=problem))


def tuned_steps(tensors: ModelTensors, card: ModelCard, comm: Collectives, dcp: int) -> torch.Tensor:
    weights = pack(shard(tensors, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
    cache = DecodeCache(card, tp=comm.size, max_requests=2, max_context=30, dtype=torch.float64, block_size=2, dcp=dcp)
    where: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    operators: Any = AutoOperators(card, **where)
    if dcp > 1:
        own: Any = comm
        some = [mla_entry(card, "bf16_dcp", comm.size)]
        operators = tuned.TunedOperators(card, some, transport=own, context_group=comm, **where)
    slots, found = [cache.add(), cache.add()], []
    for turn in range(5):
        found.append(step(weights, cache, torch.tensor([[turn], [7 * turn]]), slots, operators, comm).flatten())
        cache.accept(slots, [1, 1])
    return torch.cat(found)


def test_a_bundles_kernels_of_shared_contexts_stand_in_for_those_of_whole_ones(
    tiny: ModelCard, tiny_tensors: ModelTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "Runner", ContextRunner)
    library.operator("mla", "twin")  # registered once, before the ranks' threads ask for it
    want = tuned_steps(tiny_tensors, tiny, SingleRank(), 1)
    for got in run_virtual_ranks(2, lambda comm: tuned_steps(tiny_tensors, tiny, comm, 2)):
        assert ((got - want).norm() / want.norm()).item() < 1e-9


def test_kernels_and_context_group_are_of_as_many_ranks(tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Runner", ContextRunner)
    where: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    group: Any = type("Group", (), {"rank": 0, "size": 2})()
    with pytest.raises(InputError, match="for contexts over 1 ranks, the context group has 2"):
        tuned.TunedOperators(tiny, [mla_entry(tiny, "bf16", 2)], transport=group, context_group=group, **where)
    with pytest.raises(InputError, match="for contexts over 2 ranks, the context group has 1"):
        tuned.TunedOperators(tiny, [mla_entry(tiny, "bf16_dcp", 2)], **where)
    found, sizes = family("mla"), {"tp": 2, "rows": 8, "cache_dtype": "float8_e4m3fn"}
    assert step_kind(found, K3, dcp=2, **sizes) == "fp8_dcp" and step_kind(found, K3, **sizes) == "fp8"
    assert step_kind(found, K3, tp=2, rows=8, q_len=4, dcp=2) == "bf16_verify4_dcp"
    assert step_kind(family("kda"), K3, tp=2, rows=8, dcp=2) == step_kind(family("kda"), K3, tp=2, rows=8)


def test_ranks_that_share_contexts_otherwise_end_before_anything_waits(tiny: ModelCard) -> None:
    class Host(SingleRank):
        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            other = torch.frombuffer(bytearray(b"1".ljust(x.shape[1])), dtype=torch.uint8)
            return torch.cat([x, other[None]])

    group = Group(0, 2, StandIn(0, 2), "two", None, host=Host())
    weights: Any = None
    with pytest.raises(InputError, match="ranks have dcp 2, 1; start every rank with the same options"):
        backend_of(tiny, RunOptions(tp=2, dcp=2), (), weights, group, None)


def test_a_captured_loop_filled_up_with_the_padding_slot_decodes_shared_contexts(
    tiny: ModelCard, tiny_tensors: ModelTensors
) -> None:
    def tokens(comm: Collectives, dcp: int) -> list[list[list[int]]]:
        weights = rank_of(tiny_tensors, tiny, comm)
        cache = DecodeCache(tiny, tp=comm.size, dcp=dcp, padding=True, **SIZES)
        graph = GreedyGraph(weights, cache, 2, reference(tiny, context_group(comm, dcp)), comm)
        first, second = cache.add(), cache.add()
        graph.begin([second], torch.tensor([17]))  # one row is nobody's
        found = [graph.step() for _ in range(2)]
        graph.begin([second, first], torch.tensor([found[-1][0][0], 400]))
        return found + [graph.step() for _ in range(2)]

    want = tokens(SingleRank(), 1)
    assert run_virtual_ranks(2, lambda comm: tokens(comm, 2)) == [want, want]
