"""The drafter: dimensions, angles, against itself written straight down, sharded, from a checkpoint."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.decode.caches import DecodeCache
from k3lab.decode.checkpoint.write import write_shards
from k3lab.decode.dspark.card import K3_DSPARK, SMALL_DSPARK, draft_specs, draft_tensors
from k3lab.decode.dspark.counter import ACCEPT, DRAFT, gumbel, uniforms
from k3lab.decode.dspark.drafter import Drafter
from k3lab.decode.dspark.reference import best_of_ranks, confidence, draft_tokens
from k3lab.decode.dspark.rope import inverse_frequencies, rotate
from k3lab.decode.dspark.weights import draft_weights, load_draft, random_draft_tensors
from k3lab.decode.packing import pack
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.kernels import K3, InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks

EXACT = 1e-9


def load_oracle() -> Any:
    spec = importlib.util.spec_from_file_location("draft_oracle", Path(__file__).with_name("draft_oracle.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.fixture(scope="module")
def draft_of() -> dict[str, torch.Tensor]:
    return random_draft_tensors(SMALL_DSPARK, seed=2, dtype=torch.float64)


def drafter_for(
    tiny: ModelCard, whole: ModelTensors, draft: dict[str, torch.Tensor], comm: Collectives | None = None, **sizes: int
) -> Drafter:
    group = comm or SingleRank()
    at = {"tp": group.size, "rank": group.rank}
    target = pack(shard(whole, tiny, **at), tiny, **at)
    cache = DecodeCache(
        tiny, tp=group.size, max_requests=3, max_context=40, dtype=target.dtype, **{"block_size": 4, **sizes}
    )
    return Drafter(draft_weights(draft, SMALL_DSPARK, tiny, **at), target, cache, group)


def residuals(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, 256, generator=generator, dtype=torch.float64) * 3 for _ in SMALL_DSPARK.target_layer_ids
    ]


def test_the_published_drafter_has_its_tensors_and_parameters() -> None:
    specs, stored = draft_specs(K3_DSPARK), draft_tensors(K3_DSPARK)
    assert sum(math.prod(spec.shape) for spec in specs) == 2_387_907_841
    assert len(stored) == 68 - 1  # the embedding is the target's
    assert K3_DSPARK.softmax_scale * 192**0.5 == pytest.approx(1.8133, abs=5e-5)
    K3_DSPARK.check(K3, 16)
    shards = {spec.name: spec.local_shape(16) for spec in specs}
    assert shards["markov_head.markov_w2"] == (10240, 256)
    assert math.prod(shards["markov_head.markov_w2"]) * 2 == 5_242_880  # in place of 84 MB
    assert shards["markov_head.markov_w1"] == (163840, 256)
    names = {one.name for one in stored}
    assert {
        "layers.4.self_attn.kv_a_proj_with_mqa.weight",
        "markov_head.markov_w1.weight",
        "confidence_head.proj.bias",
    } <= names


@pytest.mark.parametrize("card", [K3_DSPARK, SMALL_DSPARK], ids=lambda card: card.name)
def test_angles_are_those_of_transformers(card: Any) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=card.qk_rope_head_dim, hidden_size=card.hidden_size, num_attention_heads=card.num_heads,
        max_position_embeddings=int(card.yarn_original * card.yarn_factor),
        rope_parameters={
            "rope_type": "yarn", "rope_theta": card.rope_theta, "factor": card.yarn_factor, "mscale": 1.0,
            "mscale_all_dim": card.yarn_mscale_all_dim, "beta_fast": card.yarn_beta_fast, "beta_slow": card.yarn_beta_slow,
            "original_max_position_embeddings": card.yarn_original,
        },
    )  # fmt: skip
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert factor == 1.0
    assert torch.allclose(inverse_frequencies(card).float(), want, rtol=1e-5)
    plain = inverse_frequencies(replace(card, yarn_factor=1.0))
    assert plain[0] == 1.0
    assert inverse_frequencies(card)[-1] == pytest.approx(plain[-1].item() / card.yarn_factor)


def test_rotation_keeps_lengths_and_depends_on_distances_alone() -> None:
    x, y = (torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(at), dtype=torch.float64) for at in (1, 2))
    at = lambda value, position: rotate(value, torch.tensor([position]), SMALL_DSPARK)  # noqa: E731
    assert torch.equal(at(x, 0), x)
    assert torch.allclose(at(x, 1000).norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose((at(x, 7) * at(y, 4)).sum(-1), (at(x, 1_000_007) * at(y, 1_000_004)).sum(-1), atol=1e-8)
    # neighbours are a pair: a rotated first pair leaves the others alone
    one = torch.zeros(1, 1, 8, dtype=torch.float64)
    one[..., 0] = 1
    assert at(one, 3)[0, 0, 2:].abs().max() == 0
    assert at(one, 3)[0, 0, 1] == pytest.approx(math.sin(3))


@pytest.mark.parametrize("dcp", [1, 3])  # where ranks share contexts, each has the drafter's rows of all tokens
def test_drafts_are_those_of_the_drafter_written_straight_down(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor], dcp: int
) -> None:
    drafter = drafter_for(tiny, tiny_tensors, draft_of, dcp=dcp)
    cache, oracle = drafter.cache, load_oracle().DraftOracle
    gone, slots = cache.add(), [cache.add(), cache.add()]
    cache.reserve([gone, slots[0]], 3)  # an uneven free list
    cache.release(gone)
    outside = tiny_tensors.outside
    judges = [oracle(SMALL_DSPARK, draft_of, outside["embed_tokens"], outside["lm_head"]) for _ in slots]
    for slot, judge, counts in zip(slots, judges, ([5, 3], [9]), strict=True):
        start = 0
        for count in counts:
            cache.begin_prefill(slot, count)
            cache.prefilled(slot, count)
            rows = residuals(count, 10 * slot + start)
            drafter.inject(slot, start, rows)
            for at in range(count):
                judge.accept([row[at] for row in rows])
            start += count
    for pages in drafter.pages:  # what nobody injected is not read
        used = {block for slot in slots for block in cache.blocks_of(slot)}
        for block in set(range(cache.blocks)) - used:
            pages[block] = float("nan")
    last = torch.tensor([7, 300])
    for count in (1, 3, 7):
        got = drafter.draft(slots, last, count)
        assert got.logits is None
        for request, judge in enumerate(judges):
            tokens, logits = judge.draft(int(last[request]), count)
            top = logits.topk(2).values
            assert (top[:, 0] - top[:, 1]).min() > 1e-6  # no draw that rounding decides
            assert got.tokens[request].tolist() == tokens, (count, request)
    sampled = drafter.draft(slots, last, 7, temperature=0.8, seeds=torch.tensor([1, 2]))
    assert sampled.logits is not None
    for request, judge in enumerate(judges):
        # the first position's logits need no earlier choice
        assert error(sampled.logits[request, 0], judge.draft(int(last[request]), 7)[1][0]) < EXACT


class Counting:
    """A group that notes how many values a rank sends."""

    def __init__(self, comm: Collectives) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.gathered: list[int] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.gathered.append(x.numel())
        return self.comm.all_gather(x, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.comm.reduce_scatter(x, dim)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sharded_drafts_are_unsharded_drafts_and_ranks_exchange_one_value_a_row(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor], temperature: float
) -> None:
    def rank(comm: Collectives) -> tuple[torch.Tensor, list[int]]:
        group = Counting(comm)
        drafter = drafter_for(tiny, tiny_tensors, draft_of, group)
        slots = [drafter.cache.add(), drafter.cache.add()]
        for slot in slots:
            drafter.cache.begin_prefill(slot, 6)
            drafter.cache.prefilled(slot, 6)
            drafter.inject(slot, 0, residuals(6, slot))
        drafts = drafter.draft(slots, torch.tensor([7, 300]), 7, temperature=temperature, seeds=torch.tensor([5, 6]))
        return drafts.tokens, group.gathered

    want, _ = rank(SingleRank())
    for tp in (2, 4, 16):
        ranks = run_virtual_ranks(tp, rank, timeout_s=120)
        assert all(torch.equal(tokens, want) for tokens, _ in ranks), tp
        if not temperature:
            assert ranks[0][1] == [2] * (2 * 7)  # a value and an id for each of two requests, seven times


def test_the_lower_id_wins_among_equals_of_all_ranks() -> None:
    scores = torch.zeros(3, 16)
    scores[0, [5, 9]] = 2.0
    scores[1, [12, 13]] = 3.0
    rank = lambda comm: best_of_ranks(scores[:, comm.rank * 4 : comm.rank * 4 + 4], comm)  # noqa: E731
    for got in run_virtual_ranks(4, rank, timeout_s=30):
        assert got.tolist() == [5, 12, 0]


def test_the_markov_bias_follows_the_token_before(draft_of: dict[str, torch.Tensor], tiny: ModelCard) -> None:
    tensors = {
        **draft_of,
        "markov_head.markov_w1": torch.zeros(512, 16).double(),
        "markov_head.markov_w2": torch.zeros(512, 16).double(),
    }
    chain = [3, 77, 200, 5]
    for index, (before, after) in enumerate(pairwise(chain)):
        tensors["markov_head.markov_w1"][before, index] = 1
        tensors["markov_head.markov_w2"][after, index] = 100
    weights = draft_weights(tensors, SMALL_DSPARK, tiny, tp=1, rank=0)
    hidden, head = residuals(3, 1)[0][None], residuals(512, 2)[0] / 50
    assert draft_tokens(weights, hidden, head, torch.tensor([3]), SingleRank()).tokens.tolist() == [chain[1:]]


def test_confidence_is_a_probability_of_hidden_value_and_token(
    draft_of: dict[str, torch.Tensor], tiny: ModelCard
) -> None:
    weights = draft_weights(draft_of, SMALL_DSPARK, tiny, tp=1, rank=0)
    hidden, before = residuals(6, 1)[0].view(2, 3, 256), torch.tensor([[1, 2, 3], [4, 5, 6]])
    got = confidence(weights, hidden, before)
    want = (
        hidden[1, 2] @ weights.confidence[0, :256]
        + weights.markov_w1[6] @ weights.confidence[0, 256:]
        + weights.confidence_bias
    )
    assert got[1, 2].item() == pytest.approx(want.sigmoid().item())
    assert ((got > 0) & (got < 1)).all()


# -- random numbers ----------------------------------------------------------------------------------
def mixed(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_numbers_are_those_of_whole_number_arithmetic_and_are_even() -> None:
    assert mixed(0) == 0xE220A8397B1DCDAF  # splitmix64's first number of seed 0
    seeds, positions = torch.tensor([0, 1, -5, 2**62]), torch.tensor([0, 9, 2**20, 3])
    got = uniforms(seeds, positions, ACCEPT)
    for seed, position, number in zip(seeds.tolist(), positions.tolist(), got.tolist(), strict=True):
        bits = mixed(mixed(mixed(seed & 2**64 - 1) ^ position) ^ ACCEPT)
        assert number == ((bits >> 11) + 0.5) * 2.0**-53
    many = uniforms(torch.tensor(3), torch.arange(40_000), ACCEPT)
    counts = torch.histc(many, bins=20, min=0, max=1)
    assert ((counts - 2000).square() / 2000).sum() < 45  # chi-square, 19 degrees: one in a thousand
    other = uniforms(torch.tensor(3), torch.arange(40_000), DRAFT)
    assert abs(torch.corrcoef(torch.stack([many, other]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([many[1:], many[:-1]]))[0, 1]) < 0.02


def test_gumbel_noise_samples_the_distribution() -> None:
    p = torch.tensor([0.5, 0.25, 0.2, 0.05], dtype=torch.float64)
    noise = gumbel(torch.tensor(1).expand(20_000), torch.arange(20_000), DRAFT, torch.arange(4))
    counts = torch.bincount((p.log() + noise).argmax(-1), minlength=4)
    assert ((counts - 20_000 * p).square() / (20_000 * p)).sum() < 16.3  # 3 degrees, one in a thousand


# -- checkpoints and misuse --------------------------------------------------------------------------
def test_a_drafter_is_loaded_from_its_checkpoint(tmp_path: Path, tiny: ModelCard) -> None:
    whole = random_draft_tensors(SMALL_DSPARK, seed=4, dtype=torch.bfloat16)
    values = {one.name: whole[one.spec] for one in draft_tensors(SMALL_DSPARK)}
    write_shards(
        tmp_path, {**values, "embed_tokens.weight": torch.zeros(512, 256).bfloat16()}.items(), shard_bytes=10**6
    )
    want = draft_weights(whole, SMALL_DSPARK, tiny, tp=4, rank=2)
    got = load_draft(tmp_path, SMALL_DSPARK, tiny, tp=4, rank=2)
    for name in ("context_proj", "final_norm", "markov_w1", "markov_w2", "confidence", "confidence_bias"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for one, other in zip(got.layers, want.layers, strict=True):
        assert torch.equal(one.o_proj, other.o_proj) and torch.equal(one.core.w_uv, other.core.w_uv)
        assert torch.equal(one.down, other.down)
    assert got.markov_w2.shape == (128, 16)
    del values["markov_head.markov_w2.weight"]
    again = tmp_path / "again"
    again.mkdir()
    write_shards(again, values.items())
    with pytest.raises(InputError, match=r"markov_head\.markov_w2\.weight is missing"):
        load_draft(again, SMALL_DSPARK, tiny, tp=4, rank=2)


WRONG: list[tuple[Callable[[ModelCard], Any], str]] = [
    (lambda tiny: K3_DSPARK.check(tiny, 1), "kimi-k3-dspark has hidden_size 7168, tiny-k3 has 256"),
    (lambda tiny: replace(SMALL_DSPARK, target_layer_ids=(1, 6)).check(tiny, 1), r"reads after layers \[1, 6\], tiny-k3 has 0\.\.5"),
    (lambda tiny: SMALL_DSPARK.check(tiny, 3), "TP 3 does not divide num_heads 16"),
    (lambda tiny: SMALL_DSPARK.check_drafts(8), "8 drafts a step; small-dspark drafts 1 to 7"),
    (lambda tiny: SMALL_DSPARK.check_drafts(0), "0 drafts"),
    (lambda tiny: draft_weights({}, SMALL_DSPARK, tiny, tp=2, rank=2), r"rank 2 lies outside 0\.\.1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_does_not_fit_is_refused(call: Callable[[ModelCard], Any], words: str, tiny: ModelCard) -> None:
    with pytest.raises(InputError, match=words):
        call(tiny)


def test_a_drafter_of_another_rank_is_refused(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor]
) -> None:
    drafter = drafter_for(tiny, tiny_tensors, draft_of)
    other = draft_weights(draft_of, SMALL_DSPARK, tiny, tp=2, rank=1)
    with pytest.raises(InputError, match="the drafter's weights are those of rank 1 of 2, the target's of rank 0 of 1"):
        Drafter(other, drafter.target, drafter.cache, SingleRank())
