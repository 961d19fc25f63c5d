"""Prefill against decode steps, synthetic contexts, saved requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from k3lab.cli.main import run as command
from k3lab.decode import memory, prefill_operators
from k3lab.decode import prefill as prefilling
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.chunked_kda import delta_rule_of_many
from k3lab.decode.memory import cache_bytes
from k3lab.decode.operators import Operators, ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill import fill_context, prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.random_weights import random_tensors, random_weights
from k3lab.decode.run import RunOptions, run
from k3lab.decode.saved import restore, save
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import SMALL_K3, InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks
from k3lab.kernels.kda.twin import delta_rule

EXACT = 1e-9
PROMPT = [17, 400, 3, 17, 99, 256, 8, 8, 8, 511, 0, 44, 301, 12, 77, 5, 60, 61, 62, 63, 500, 499, 2]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def cache_for(weights: RankWeights, **sizes: Any) -> DecodeCache:
    defaults: dict[str, Any] = {"max_requests": 3, "max_context": 40, "max_verify": 4, "block_size": 4}
    return DecodeCache(weights.card, tp=weights.tp, dtype=weights.dtype, **{**defaults, **sizes})


def rank_of(whole: ModelTensors, tp: int, rank: int) -> RankWeights:
    return pack(shard(whole, SMALL_K3, tp=tp, rank=rank), SMALL_K3, tp=tp, rank=rank)


@pytest.fixture(scope="module")
def whole() -> ModelTensors:
    return random_tensors(SMALL_K3, seed=9, dtype=torch.float64)


@pytest.fixture(scope="module")
def exact(whole: ModelTensors) -> RankWeights:
    return rank_of(whole, 1, 0)


def decoded(
    weights: RankWeights, cache: DecodeCache, slot: int, tokens: list[int], operators: Operators, comm: Collectives | None = None
) -> torch.Tensor:  # fmt: skip
    for token in tokens:
        logits = step(weights, cache, torch.tensor([[token]]), [slot], operators, comm or SingleRank())
        cache.accept([slot], [1])
    return logits[0, 0]


def prefilled(weights: RankWeights, cache: DecodeCache, slot: int, tokens: list[int], **more: Any) -> torch.Tensor:
    operators = PrefillOperators(weights.card, dtype=weights.dtype, device="cpu")
    comm = more.pop("comm", None) or SingleRank()
    return prefill(weights, cache, slot, torch.tensor(tokens), operators, comm, **more)


def same_state(one: DecodeCache, slot: int, other: DecodeCache, other_slot: int, limit: float) -> None:
    a, b = save(one, slot), save(other, other_slot)
    assert a.length == b.length
    assert a.rows and b.rows
    for layer in a.kda:
        for mine, theirs in zip(a.kda[layer], b.kda[layer], strict=True):
            assert error(mine, theirs) < limit, layer
    for layer in a.rows:
        assert a.rows[layer].shape[0] == a.length
        assert error(a.rows[layer].double(), b.rows[layer].double()) < limit, layer


@pytest.fixture(scope="module")
def stepped(exact: RankWeights) -> tuple[DecodeCache, int, torch.Tensor]:
    """The prompt as decode steps of the twins, in a slot that is not the first."""
    cache = cache_for(exact)
    cache.add()
    slot = cache.add()
    return cache, slot, decoded(exact, cache, slot, PROMPT, ReferenceOperators(SMALL_K3))


@pytest.mark.parametrize("chunk", [1, 3, 8, 23, 512])
def test_prefill_of_n_tokens_is_n_decode_steps(
    exact: RankWeights, stepped: tuple[DecodeCache, int, torch.Tensor], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk == 8:  # the context in stretches of one block
        monkeypatch.setattr(prefill_operators, "SCORES", 1)
    cache, seen = cache_for(exact, block_size=5), []
    slot = cache.add()
    logits = prefilled(exact, cache, slot, PROMPT, chunk=chunk, progress=lambda *at: seen.append(at))
    assert error(logits, stepped[2]) < EXACT
    same_state(cache, slot, stepped[0], stepped[1], EXACT)
    assert seen == [(min(done, 23), 23) for done in range(chunk, 23 + chunk, chunk)]


def test_decode_goes_on_from_a_prefill_and_prefill_from_a_verify_step(exact: RankWeights) -> None:
    reference = ReferenceOperators(SMALL_K3)
    cache, want = cache_for(exact), cache_for(exact)
    slot, other, whole = cache.add(), cache.add(), want.add()
    prefilled(exact, cache, slot, PROMPT[:9], chunk=4)
    # a verify step that is accepted in part: the next chunk starts from a snapshot that is not the first
    step(exact, cache, torch.tensor([[1, 2, 3, 4], [9, 9, 9, 9]]), [slot, other], reference, SingleRank())
    cache.accept([slot, other], [3, 1])
    got = prefilled(exact, cache, slot, PROMPT[9:], chunk=6)
    sequence = [*PROMPT[:9], 1, 2, 3, *PROMPT[9:]]
    assert error(got, decoded(exact, want, whole, sequence, reference)) < EXACT
    got, expected = (decoded(exact, *at, [6, 7], reference) for at in ((cache, slot), (want, whole)))
    assert error(got, expected) < EXACT
    same_state(cache, slot, want, whole, EXACT)
    assert cache.length(other) == 1


@pytest.mark.parametrize("tp", [4, 16])
def test_sharded_prefill_is_unsharded_prefill(
    whole: ModelTensors, stepped: tuple[DecodeCache, int, torch.Tensor], tp: int
) -> None:
    def rank(comm: Collectives) -> torch.Tensor:
        own = rank_of(whole, comm.size, comm.rank)
        cache = cache_for(own)
        return prefilled(own, cache, cache.add(), PROMPT, comm=comm, chunk=10)

    ranks = run_virtual_ranks(tp, rank, timeout_s=120)
    assert all(torch.equal(one, ranks[0]) for one in ranks)
    assert error(ranks[0], stepped[2]) < EXACT


def test_an_fp8_cache_gains_the_rows_of_decode(exact: RankWeights) -> None:
    caches = [cache_for(exact, cache_dtype=torch.float8_e4m3fn) for _ in range(2)]
    slots = [cache.add() for cache in caches]
    want = decoded(exact, caches[0], slots[0], PROMPT, ReferenceOperators(SMALL_K3))
    # up to rows that lie between two FP8 values, where the order of a sum decides
    assert error(prefilled(exact, caches[1], slots[1], PROMPT, chunk=7), want) < 1e-6
    same_state(caches[0], slots[0], caches[1], slots[1], 1e-6)


def test_bf16_prefill_errs_no_more_than_decode_and_repeats(whole: ModelTensors, exact: RankWeights) -> None:
    cast = lambda tensors: {  # noqa: E731
        name: tensor if tensor.dtype == torch.uint8 else tensor.bfloat16() for name, tensor in tensors.items()
    }
    rounded = ModelTensors(cast(whole.outside), [cast(layer) for layer in whole.layers])
    wide = lambda tensors: {  # noqa: E731
        name: tensor if tensor.dtype == torch.uint8 else tensor.double() for name, tensor in tensors.items()
    }
    judge = rank_of(ModelTensors(wide(rounded.outside), [wide(layer) for layer in rounded.layers]), 1, 0)
    own = rank_of(rounded, 1, 0)
    caches = [cache_for(weights) for weights in (judge, own, own, own)]
    slots = [cache.add() for cache in caches]
    want = decoded(judge, caches[0], slots[0], PROMPT, ReferenceOperators(SMALL_K3))
    auto = AutoOperators(SMALL_K3, dtype=torch.bfloat16, device="cpu")
    stepwise = error(decoded(own, caches[1], slots[1], PROMPT, auto), want)
    got, again = (prefilled(own, caches[at], slots[at], PROMPT, chunk=9) for at in (2, 3))
    assert torch.equal(got, again)
    assert got.dtype == torch.bfloat16
    assert error(got, want) < 1.5 * stepwise


@pytest.mark.parametrize(("tokens", "piece"), [(1, 8), (8, 8), (21, 8), (40, 64)])
def test_pieces_of_the_delta_rule_are_its_steps_however_strong_the_decay(tokens: int, piece: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    heads, keys, values = 3, 6, 5
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k = (torch.nn.functional.normalize(draw(tokens, heads, keys), dim=-1) for _ in range(2))
    v, beta, first = draw(tokens, heads, values), draw(tokens, heads, 1).sigmoid(), draw(heads, values, keys)
    decay = -5 * draw(tokens, heads, keys).mul(6).sigmoid()  # from none to e^-5 a token
    state, outs = first[None], []
    for t in range(tokens):
        state, out = delta_rule(state, q[None, t], k[None, t], v[None, t], decay[None, t], beta[None, t, :, 0])
        outs.append(out[0])
    got, after = delta_rule_of_many(first, q, k, v, decay, beta, piece)
    assert error(got, torch.stack(outs)) < EXACT
    assert error(after, state[0]) < EXACT
    # 40 tokens at the bound: e^-200 and its inverse would leave FP32
    got, after = delta_rule_of_many(
        *(x.float() for x in (first, q, k, v, torch.full_like(decay, -5.0), beta)), piece=piece
    )
    assert got.isfinite().all()
    assert after.isfinite().all()


def test_nan_in_rows_of_others_stays_theirs(exact: RankWeights, stepped: tuple[DecodeCache, int, torch.Tensor]) -> None:
    cache = cache_for(exact)
    slot = cache.add()
    for buffer in cache.mla.values():
        buffer.fill_(float("nan"))
    assert error(prefilled(exact, cache, slot, PROMPT, chunk=6), stepped[2]) < EXACT


def test_the_residual_is_tapped_after_every_layer(exact: RankWeights) -> None:
    seen: dict[str, list[tuple[int, torch.Tensor]]] = {"prefill": [], "steps": []}
    cache = cache_for(exact)
    slots = cache.add(), cache.add()
    prefilled(exact, cache, slots[0], PROMPT[:5], tap=lambda layer, x: seen["prefill"].append((layer, x.clone())))
    for token in PROMPT[:5]:
        step(
            exact, cache, torch.tensor([[token]]), [slots[1]], ReferenceOperators(SMALL_K3), SingleRank(),
            tap=lambda layer, x: seen["steps"].append((layer, x.clone())),
        )  # fmt: skip
        cache.accept([slots[1]], [1])
    assert [layer for layer, _ in seen["prefill"]] == list(range(9))
    for layer, rows in seen["prefill"]:
        want = torch.cat([x for at, x in seen["steps"] if at == layer])
        assert error(rows, want) < EXACT, layer


def test_what_cannot_be_prefilled_is_refused_and_changes_nothing(exact: RankWeights) -> None:
    cache = cache_for(exact, max_context=8)
    slot = cache.add()
    free = cache.free_blocks
    for tokens, more, words in (
        ([], {}, "one or more whole numbers"),
        ([[1]], {}, "one or more whole numbers"),
        ([512], {}, r"token ids must lie in 0\.\.511"),
        ([1], {"chunk": 0}, "chunk is 0"),
        ([1] * 9, {}, "needs a context of 9 tokens, max_context is 8"),
    ):
        with pytest.raises(InputError, match=words):
            prefilled(exact, cache, slot, tokens, **more)
    assert (cache.length(slot), cache.free_blocks) == (0, free)
    with pytest.raises(InputError, match="slot 2 holds no request"):
        prefilled(exact, cache, 2, [1])
    step(exact, cache, torch.tensor([[1]]), [slot], ReferenceOperators(SMALL_K3), SingleRank())
    with pytest.raises(InputError, match="unaccepted step of 1 tokens"):
        prefilled(exact, cache, slot, [1])


def test_a_prefill_that_fails_spoils_its_request(exact: RankWeights) -> None:
    cache = cache_for(exact)
    slot = cache.add()

    class Failing(PrefillOperators):
        def dense(self, *arguments: Any) -> Any:
            if cache.length(slot):
                raise RuntimeError("lost")
            return super().dense(*arguments)

    operators = Failing(SMALL_K3, dtype=torch.float64, device="cpu")
    with pytest.raises(RuntimeError, match="lost"):
        prefill(exact, cache, slot, torch.tensor(PROMPT), operators, SingleRank(), chunk=4)
    with pytest.raises(InputError, match="failed half-way"):
        prefilled(exact, cache, slot, [1])
    cache.forget(slot)
    prefilled(exact, cache, slot, [1])


# -- saved requests ----------------------------------------------------------------------------------
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_a_request_resumed_from_its_saved_state_is_exact(exact: RankWeights, cache_dtype: torch.dtype | None) -> None:
    reference = ReferenceOperators(SMALL_K3)
    cache = cache_for(exact, cache_dtype=cache_dtype)
    slot = cache.add()
    prefilled(exact, cache, slot, PROMPT[:7])
    step(exact, cache, torch.tensor([[1, 2, 3]]), [slot], reference, SingleRank())
    cache.accept([slot], [2])
    saved, near = save(cache, slot), save(cache, slot, rows=False)
    want = decoded(exact, cache, slot, [5, 6, 7], reference)
    restore(cache, slot, near)
    assert torch.equal(decoded(exact, cache, slot, [5, 6, 7], reference), want)
    other = cache_for(exact, cache_dtype=cache_dtype, block_size=3)
    other.add()
    place = other.add()
    decoded(exact, other, place, [8, 8], reference)  # what it had is gone
    restore(other, place, saved)
    assert other.length(place) == 9
    assert torch.equal(decoded(exact, other, place, [5, 6, 7], reference), want)
    with pytest.raises(InputError, match="lacks 9 rows that were not saved"):
        restore(other, other.add(), near)
    empty = save(cache, cache.add())
    restore(cache, slot, empty)
    assert cache.length(slot) == 0


# -- synthetic contexts ------------------------------------------------------------------------------
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_a_filled_context_is_random_of_real_size_and_is_decoded_from(
    exact: RankWeights, cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefilling, "FILLED_BLOCKS", 2)
    runs = []
    for seed in (1, 1, 2):
        cache = cache_for(exact, cache_dtype=cache_dtype)
        slots = [cache.add(), cache.add()]
        fill_context(cache, slots, 21, seed=seed)
        assert [cache.length(slot) for slot in slots] == [21, 21]
        rows = save(cache, slots[1]).rows
        assert rows
        values = rows[3].view(cache.mla[3].dtype).double() if cache_dtype else rows[3]
        assert values.std().item() == pytest.approx(1, rel=0.1)
        runs.append(decoded(exact, cache, slots[1], [4], ReferenceOperators(SMALL_K3)))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert runs[0].isfinite().all()
    with pytest.raises(InputError, match="has a context of 22 tokens; only an empty one is filled"):
        fill_context(cache, slots[1:], 5)
    with pytest.raises(InputError, match="a context of 0 tokens"):
        fill_context(cache, [cache.add()], 0)


# -- runs --------------------------------------------------------------------------------------------
@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def test_a_run_prefills_its_prompt(no_gpu: None, tiny: ModelCard) -> None:
    told: list[tuple[str, int, int]] = []
    options = RunOptions(rows=2, tokens=3, prompt=9, chunk=4, tp=2, seed=3)
    report = run(tiny, options, progress=lambda *at: told.append(at))
    assert [at for at in told if at[0] == "prefilled token"] == [
        ("prefilled token", done, 16) for done in (4, 8, 12, 16)
    ]
    assert report.tokens == run(tiny, replace(options, chunk=8)).tokens
    # all but the last token of each prompt are prefilled, the last ones are the first step's
    alone = run(tiny, replace(options, tp=1))
    weights = random_weights(tiny, seed=3, dtype=torch.bfloat16)
    prompts = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(3))
    cache = cache_for(weights)
    slots = [cache.add(), cache.add()]
    for slot, ids in zip(slots, prompts.tolist(), strict=True):
        prefilled(weights, cache, slot, ids[:-1], chunk=4)
    logits = step(weights, cache, prompts[:, -1:], slots, ReferenceOperators(tiny), SingleRank())
    assert [tokens[0] for tokens in alone.tokens] == logits[:, 0].argmax(-1).tolist()
    assert (report.prompt_tokens, report.filled_context) == (9, 0)
    assert not any("made up" in line for line in report.head)
    assert "--prompt 9 --chunk 4" in " ".join(options.again)


def test_a_made_up_context_is_told(no_gpu: None, tiny: ModelCard, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tiny, RunOptions(tokens=2, fill=50))
    line = "a context of 50 tokens is made up (--fill-context): caches hold random numbers, the tokens mean nothing"
    assert line in report.head
    assert report.tokens != run(tiny, RunOptions(tokens=2)).tokens
    assert report.to_json()["filled_context"] == 50
    assert command(["decode", "run", "--tokens", "2", "--rows", "1", "--fill-context", "50", "--prompt", "3"]) == 0
    assert f"note: {line}" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "words"), [
    ({"prompt": 0}, "prompt 0, fill-context 0, chunk 512: a prompt and a chunk have 1 token or more"),
    ({"fill": -1}, "fill-context -1"),
    ({"prompt": 2, "chunk": 0}, "chunk 0"),
    ({"fill": 4090}, "a context of 4098 tokens is asked for; tiny-k3 has at most 4096"),
])  # fmt: skip
def test_contexts_that_cannot_be(options: dict[str, int], words: str, tiny: ModelCard) -> None:
    with pytest.raises(InputError, match=words):
        run(tiny, RunOptions(**options))  # type: ignore[arg-type]


def test_long_contexts_count_as_memory(no_gpu: None, tiny: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DecodeCache(tiny, tp=2, max_requests=3, max_context=160, max_verify=4, dtype=torch.bfloat16)
    held = [*cache.mla.values(), *cache.kda_states.values(), *cache.kda_convs.values()]
    assert cache_bytes(tiny, 2, 3, 160, 4) == sum(one.numel() * one.element_size() for one in held)
    need = memory.memory_needed(tiny, 1, on_gpu=False)
    monkeypatch.setattr(memory, "free_memory", lambda _device: need + cache_bytes(tiny, 1, 2, 100))
    run(tiny, RunOptions(rows=2, tokens=1, fill=99))
    with pytest.raises(InputError, match="tiny-k3 at TP 1 needs"):
        run(tiny, RunOptions(rows=2, tokens=2, fill=99))
