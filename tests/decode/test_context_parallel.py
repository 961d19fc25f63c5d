"""Each context over all ranks (DCP = TP): the same steps, with a part of the rows on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from k3lab.decode import library, tuned
from k3lab.decode.auto import AutoOperators
from k3lab.decode.bindings import step_kind
from k3lab.decode.caches import DecodeCache
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.saved import save
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.kernels import K3, Compiled, InputError, ModelCard, family
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks
from k3lab.kernels.health import BUFFER
from k3lab.kernels.mla.family import WEIGHTS
from k3lab.kernels.mla.twin import MlaWeights
from k3lab.kernels.mla.twin_context import mla_context_parallel

from .twin_runner import entry


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
    with pytest.raises(InputError, match="contexts over 2 ranks need tuned kernels of mla"):
        tuned.TunedOperators(tiny, [], context_group=group, **where)
    with pytest.raises(InputError, match="for contexts over 1 ranks, the context group has 2"):
        tuned.TunedOperators(tiny, [mla_entry(tiny, "bf16", 2)], transport=group, context_group=group, **where)
    with pytest.raises(InputError, match="for contexts over 2 ranks, the context group has 1"):
        tuned.TunedOperators(tiny, [mla_entry(tiny, "bf16_dcp", 2)], **where)
    found, sizes = family("mla"), {"tp": 2, "rows": 8, "cache_dtype": "float8_e4m3fn"}
    assert step_kind(found, K3, dcp=2, **sizes) == "fp8_dcp" and step_kind(found, K3, **sizes) == "fp8"
    assert step_kind(found, K3, tp=2, rows=8, q_len=4, dcp=2) == "bf16_verify4_dcp"
    assert step_kind(family("kda"), K3, tp=2, rows=8, dcp=2) == step_kind(family("kda"), K3, tp=2, rows=8)
