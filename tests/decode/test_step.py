"""The reference step: against an independent model, sharded, verified, batched, paged."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.decode.caches import DecodeCache
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.random_weights import random_tensors
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import SMALL_K3, InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks

EXACT = 1e-9
"""FP64: only the order of sums differs."""


def load_oracle() -> Any:
    spec = importlib.util.spec_from_file_location("decode_oracle", Path(__file__).with_name("oracle.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Oracle


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


class Model:
    """Weights and a cache of one rank, stepped with token lists."""

    def __init__(self, weights: RankWeights, comm: Collectives | None = None, **sizes: Any) -> None:
        self.weights, self.comm = weights, comm or SingleRank()
        defaults: dict[str, Any] = {"max_requests": 3, "max_context": 24, "max_verify": 8, "block_size": 4}
        self.cache = DecodeCache(weights.card, tp=weights.tp, dtype=weights.dtype, **{**defaults, **sizes})
        self.operators = ReferenceOperators(weights.card)

    def __call__(self, slots: list[int], tokens: list[list[int]], accept: list[int] | None = None) -> torch.Tensor:
        logits = step(self.weights, self.cache, torch.tensor(tokens), slots, self.operators, self.comm)
        if accept is not None:
            self.cache.accept(slots, accept)
        return logits

    def copy(self) -> Model:
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        return twin


@pytest.fixture(scope="module")
def weights(tiny: ModelCard, tiny_tensors: ModelTensors) -> RankWeights:
    return pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)


def test_the_step_is_the_model_written_straight_down(
    tiny: ModelCard, tiny_tensors: ModelTensors, weights: RankWeights
) -> None:
    oracle, model = load_oracle()(tiny, tiny_tensors), Model(weights)
    slot = model.cache.add()
    for token in (17, 400, 3, 17, 99, 256):  # longer than the convolution
        want = oracle.step(token)
        assert error(model([slot], [[token]], [1])[0, 0], want) < EXACT


def test_the_small_model_sharded_equals_unsharded() -> None:
    card = SMALL_K3
    whole = random_tensors(card, seed=9, dtype=torch.float64)
    steps = [
        ([[5], [77]], [1, 1]),
        ([[8, 9, 10], [300, 2, 510]], [2, 3]),
        ([[11], [400]], [1, 1]),
        ([[1], [2]], [1, 1]),
    ]

    def decode(comm: Collectives) -> list[torch.Tensor]:
        own = pack(shard(whole, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
        model = Model(own, comm)
        slots = [model.cache.add(), model.cache.add()]
        return [model(slots, tokens, accept) for tokens, accept in steps]

    want = decode(SingleRank())
    for tp in (2, 4, 8, 16):
        ranks = run_virtual_ranks(tp, decode, timeout_s=120)
        for index, expected in enumerate(want):
            assert error(ranks[0][index], expected) < EXACT, (tp, index)
            assert all(torch.equal(rank[index], ranks[0][index]) for rank in ranks), (tp, index)


def test_verify_with_m_accepted_tokens_is_m_plain_steps(weights: RankWeights) -> None:
    drafts = [[31, 32, 33, 34, 35, 36, 37, 38], [101, 102, 103, 104, 105, 106, 107, 108]]
    start = Model(weights)
    slots = [start.cache.add(), start.cache.add()]
    start(slots, [[1], [2]], [1, 1])
    verified = start.copy()
    rows = verified(slots, drafts)
    plain, after = start.copy(), {}
    for m in range(1, 9):
        logits = plain(slots, [[draft[m - 1]] for draft in drafts], [1, 1])
        assert error(rows[:, m - 1], logits[:, 0]) < EXACT
        after[m] = plain.copy()
    for m in range(1, 9):
        other = 9 - m  # the second request accepts another number
        rolled = verified.copy()
        rolled.cache.accept(slots, [m, other])
        assert [rolled.cache.length(slot) for slot in slots] == [1 + m, 1 + other]
        got = rolled(slots, [[200, 201], [210, 211]], [2, 2])
        again = rolled(slots, [[7], [7]], [1, 1])
        for index, count in enumerate((m, other)):
            twin = after[count].copy()
            for position in range(2):
                want = twin(slots, [[200 + position], [210 + position]], [1, 1])[index, 0]
                assert error(got[index, position], want) < EXACT, (m, index, position)
            assert error(again[index, 0], twin(slots, [[7], [7]], [1, 1])[index, 0]) < EXACT, (m, index)


def test_a_request_does_not_feel_its_batch(weights: RankWeights) -> None:
    texts = {"a": [3, 1, 4, 1, 5, 9], "b": [2, 7, 1, 8], "c": [100, 200, 300, 400], "d": [6, 6, 6]}
    alone = {}
    for name, text in texts.items():
        model = Model(weights)
        slot = model.cache.add()
        alone[name] = [model([slot], [[token]], [1])[0, 0] for token in text]
    model, slots, done = Model(weights), {}, dict.fromkeys(texts, 0)
    # who is in each step, in row order; d takes b's slot after b has left
    for batch in ("a", "ab", "cab", "bca", "cab", "ac", "dac", "d", "d"):
        if "d" in batch and "b" in slots:
            freed = slots.pop("b")
            model.cache.release(freed)
            slots["d"] = model.cache.add()
            assert slots["d"] == freed
        for name in batch:
            slots.setdefault(name, -1)
            if slots[name] < 0:
                slots[name] = model.cache.add()
        here = [name for name in batch if done[name] < len(texts[name])]
        if not here:
            continue
        logits = model([slots[name] for name in here], [[texts[name][done[name]]] for name in here], [1] * len(here))
        for row, name in enumerate(here):
            assert error(logits[row, 0], alone[name][done[name]]) < EXACT, (batch, name)
            done[name] += 1
    assert done == {name: len(text) for name, text in texts.items()}


def test_scattered_pages_read_like_one_block(weights: RankWeights) -> None:
    paged, whole = Model(weights, block_size=2), Model(weights, block_size=24)
    for model in (paged, whole):  # a request that leaves makes the free list uneven
        gone, slots = model.cache.add(), [model.cache.add(), model.cache.add()]
        model([gone, slots[0]], [[9], [8]], [1, 1])
        model([slots[0]], [[7]], [1])
        model.cache.release(gone)
    for tokens, accept in (
        ([[1, 2, 3], [4, 5, 6]], [3, 1]),
        ([[7], [8]], [1, 1]),
        ([[7, 1], [8, 1]], [1, 2]),
        ([[9], [9]], [1, 1]),
    ):
        assert error(paged(slots, tokens, accept), whole(slots, tokens, accept)) < EXACT
    table = paged.cache.block_table[slots[0], :4].tolist()
    assert table != sorted(table) or table[0] + 3 != table[3]


def test_an_fp8_cache_changes_little_and_holds_fp8(weights: RankWeights) -> None:
    exact, small = Model(weights), Model(weights, cache_dtype=torch.float8_e4m3fn)
    slots = [model.cache.add() for model in (exact, small)][:1]
    for token in (5, 6, 7):
        want, got = exact(slots, [[token]], [1]), small(slots, [[token]], [1])
    assert small.cache.mla[2].dtype == torch.float8_e4m3fn
    assert 0 < error(got, want) < 0.3


def test_bf16_logits_are_bf16_and_repeat(tiny: ModelCard) -> None:
    whole = random_tensors(tiny, seed=5, dtype=torch.bfloat16)
    own = pack(shard(whole, tiny, tp=1, rank=0), tiny, tp=1, rank=0)
    runs = []
    for _ in range(2):
        model = Model(own)
        slot = model.cache.add()
        runs.append(torch.stack([model([slot], [[token, 1]], [2]) for token in (5, 6)]))
    assert runs[0].dtype == torch.bfloat16
    assert torch.equal(runs[0], runs[1])


@pytest.mark.parametrize(("ids", "slots", "words"), [
    (torch.tensor([[1, 2]]), [0, 1], "ids must be whole numbers"),
    (torch.tensor([1, 2]), [0, 1], "ids must be whole numbers"),
    (torch.tensor([[1.0], [2.0]]), [0, 1], "ids must be whole numbers"),
    (torch.ones(2, 9, dtype=torch.int64), [0, 1], "9 tokens a request"),
    (torch.tensor([[512], [1]]), [0, 1], r"token ids must lie in 0\.\.511, got 1\.\.512"),
    (torch.tensor([[-1], [1]]), [0, 1], r"token ids must lie in 0\.\.511"),
    (torch.tensor([[1], [1]]), [0, 0], "different requests"),
    (torch.tensor([[1]]), [7], "slot 7 holds no request; slots in use: 0, 1"),
    (torch.ones(2, 5, dtype=torch.int64), [0, 1], "keeps snapshots for 1 to 4"),
])  # fmt: skip
def test_a_wrong_step_is_refused_and_changes_nothing(
    weights: RankWeights, ids: torch.Tensor, slots: list[int], words: str
) -> None:
    model = Model(weights, max_verify=4)
    for _ in range(2):
        model.cache.add()
    free = model.cache.free_blocks
    with pytest.raises(InputError, match=words):
        step(weights, model.cache, ids, slots, model.operators, SingleRank())
    assert model.cache.free_blocks == free
    assert [model.cache.length(slot) for slot in (0, 1)] == [0, 0]
    model([0, 1], [[1], [2]], [1, 1])  # still usable


def test_more_than_64_rows_are_refused(weights: RankWeights) -> None:
    model = Model(weights, max_requests=9, max_context=8)
    slots = [model.cache.add() for _ in range(9)]
    with pytest.raises(InputError, match="9 requests of 8 tokens are 72 rows; a step takes 1 to 64"):
        model(slots, [[1] * 8] * 9)


def test_only_the_last_mix_is_rounded_before_its_norm(tiny: ModelCard) -> None:
    whole = random_tensors(tiny, seed=5, dtype=torch.bfloat16)
    own = pack(shard(whole, tiny, tp=1, rank=0), tiny, tp=1, rank=0)
    finals: list[tuple[bool, bool]] = []

    class Watched(ReferenceOperators):
        def moe_tail(self, *args: Any, final: bool = False) -> Any:
            prefix, following = super().moe_tail(*args, final=final)
            mix, blocks = args[5], args[4]
            plain = self.attn_res(blocks, prefix, mix)
            rounded = self.attn_res(blocks, prefix, mix, final=True)
            assert not torch.equal(plain, rounded)
            finals.append((final, torch.equal(following, rounded if final else plain)))
            return prefix, following

    model = Model(own)
    model.operators = Watched(tiny)
    model([model.cache.add()], [[4, 5, 6, 7]], [4])
    assert finals == [(False, True)] * 4 + [(True, True)]
