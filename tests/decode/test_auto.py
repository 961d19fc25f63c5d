"""The ``auto`` operators against the twins: exactly in FP64, operator by operator in BF16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.kda_slots import KdaSlots
from k3lab.decode.operators import Operators, ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.random_weights import random_tensors
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.tensors import EXPERT_ROWS
from k3lab.decode.weights import RankWeights
from k3lab.kernels import ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, StandIn, run_virtual_ranks

BF16 = 2**-7
"""A few roundings of 2^-9 each."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def decode(
    weights: RankWeights, operators: Operators, comm: Collectives, cache_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Plain and verify steps of three requests, more rows than one expert chunk."""
    cache = DecodeCache(
        weights.card, tp=weights.tp, max_requests=3, max_context=20, max_verify=4, block_size=4, dtype=weights.dtype,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    slots, rows = [cache.add() for _ in range(3)], []
    for tokens, accept in (
        ([[1], [2], [3]], [1, 1, 1]),
        ([[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], [4, 2, 1]),
        ([[20, 21], [22, 23], [24, 25]], [1, 2, 2]),
        ([[30], [31], [32]], [1, 1, 1]),
    ):
        rows.append(step(weights, cache, torch.tensor(tokens), slots, operators, comm).flatten(0, 1))
        cache.accept(slots, accept)
    assert max(len(one) for one in rows) > EXPERT_ROWS
    return torch.cat(rows)


@pytest.fixture(scope="module")
def exact(tiny: ModelCard, tiny_tensors: ModelTensors) -> RankWeights:
    return pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_fp64_steps_are_the_twins(exact: RankWeights, cache_dtype: torch.dtype | None) -> None:
    card = exact.card
    want = decode(exact, ReferenceOperators(card), SingleRank(), cache_dtype)
    got = decode(exact, AutoOperators(card, dtype=torch.float64, device="cpu"), SingleRank(), cache_dtype)
    assert error(got, want) < 1e-11


def test_fp64_steps_sharded_are_the_twins(tiny: ModelCard, tiny_tensors: ModelTensors, exact: RankWeights) -> None:
    want = decode(exact, ReferenceOperators(tiny), SingleRank())

    def rank(comm: Collectives) -> torch.Tensor:
        own = pack(shard(tiny_tensors, tiny, tp=comm.size, rank=comm.rank), tiny, tp=comm.size, rank=comm.rank)
        return decode(own, AutoOperators(tiny, dtype=torch.float64, device="cpu"), comm)

    for got in run_virtual_ranks(4, rank):
        assert error(got, want) < 1e-11


def test_an_fp8_scale_reaches_the_cache(exact: RankWeights) -> None:
    card = exact.card
    pair = [
        decode(exact, kind, SingleRank(), torch.float8_e4m3fn)
        for kind in (
            ReferenceOperators(card, k_scale=0.25),
            AutoOperators(card, dtype=torch.float64, device="cpu", k_scale=0.25),
            AutoOperators(card, dtype=torch.float64, device="cpu"),
        )
    ]
    assert error(pair[1], pair[0]) < 1e-11
    # powers of two only move the exponent: nothing but subnormals may differ
    assert error(pair[2], pair[0]) < 0.05


class Noted:
    """A KDA layer's slots for one operator alone: what it reads is a copy, what it writes is kept."""

    def __init__(self, slots: KdaSlots) -> None:
        self.found, self.written = [one.clone() for one in slots.read()], ()

    def read(self) -> list[torch.Tensor]:
        return self.found

    def write(self, *after: torch.Tensor) -> None:
        self.written = after


class Compare:
    """Runs both operators on the same inputs, asserts, and goes on with the twin's result."""

    name = "compare"
    context_group = None

    def __init__(self, reference: ReferenceOperators, other: AutoOperators) -> None:
        self.reference, self.other = reference, other
        self.seen: dict[str, float] = {}

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            # the second operator gets its own copy of what the first one changes
            copies = [arg.clone() if method == "mla" and index == 2 else arg for index, arg in enumerate(args)]
            if method == "kda":
                copies[2] = Noted(args[2])
            want = getattr(self.reference, method)(*args, **options)
            got = getattr(self.other, method)(*copies, **options)
            pairs = list(zip(want, got, strict=True)) if isinstance(want, tuple) else [(want, got)]
            if method == "mla":
                pairs.append((args[2], copies[2]))
            if method == "kda":
                own, count = args[2], args[3]
                pairs.append((own.cache.kda_convs[own.layer][own.slots, :count], copies[2].written[0]))
                pairs.append((own.cache.kda_states[own.layer][own.slots, :count], copies[2].written[1]))
            for expected, found in pairs:
                assert found.dtype == expected.dtype or not expected.dtype.is_floating_point, method
                assert found.shape == expected.shape, method
                worst = error(found, expected)
                self.seen[method] = max(worst, self.seen.get(method, 0.0))
                assert worst < BF16, (method, worst)
            return want

        return call


def test_bf16_operators_are_close_to_the_twins(tiny: ModelCard) -> None:
    whole = random_tensors(tiny, seed=5, dtype=torch.bfloat16)
    weights = pack(shard(whole, tiny, tp=1, rank=0), tiny, tp=1, rank=0)
    operators = Compare(ReferenceOperators(tiny), AutoOperators(tiny, dtype=torch.bfloat16, device="cpu"))
    decode(weights, operators, SingleRank())
    assert set(operators.seen) == {
        "embed", "attn_res", "attention_projection", "kda", "mla", "output_projection", "router", "experts", "moe_tail", "dense",
        "lm_head",
    }  # fmt: skip
    assert operators.seen["embed"] == 0
    assert operators.seen["experts"] > 0  # BF16 was really compared


def test_mxfp8_activations_are_passed_on(exact: RankWeights) -> None:
    card = exact.card
    plain, floor, ceil = (
        decode(exact, ReferenceOperators(card, activations=mode), SingleRank())
        for mode in ("bf16", "mxfp8_floor", "mxfp8_ceil")
    )
    assert error(floor, plain) > 0
    assert error(ceil, floor) > 0


def test_ties_go_to_the_lower_expert(tiny: ModelCard, exact: RankWeights) -> None:
    mlp = exact.layers[1].mlp
    same = type(mlp)(**{**mlp.__dict__, "router": torch.zeros_like(mlp.router), "correction_bias": torch.zeros(16)})  # type: ignore[attr-defined]
    x = torch.randn(3, tiny.hidden_size, dtype=torch.float64)
    ids, weights, _ = AutoOperators(tiny, dtype=torch.float64, device="cpu").router(x, same, SingleRank())
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.sum(-1).tolist() == pytest.approx([1.0] * 3)


def test_one_rank_alone_steps(tiny: ModelCard) -> None:
    whole = random_tensors(tiny, seed=5, dtype=torch.bfloat16)
    own = pack(shard(whole, tiny, tp=8, rank=0), tiny, tp=8, rank=0)
    logits = decode(own, AutoOperators(tiny, dtype=torch.bfloat16, device="cpu"), StandIn(0, 8))
    assert logits.shape == (24, tiny.vocab_size)
    assert logits.isfinite().all()
