"""Both ends of a step: tokens by the head's argmax where a bundle has it, else by all logits; rows of the embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from k3lab.decode import choices as choosing
from k3lab.decode import tuned
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.choices import Choice, Fallback, StepForm, Tuned, choose
from k3lab.decode.dispatch import Dispatcher, StepWork
from k3lab.decode.dspark.acceptance import PLACEHOLDER, Standard, Synthetic
from k3lab.decode.dspark.reference import Drafts
from k3lab.decode.greedy import GreedyGraph
from k3lab.decode.likeliest import likeliest
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.plan import Plan, plan
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.run_options import RunOptions
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import K3, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, StandIn, run_virtual_ranks
from k3lab.kernels.lm_head.twin import best_token

from .twin_runner import AnyTwinRunner, entry, every_entry

TOKENS = StepForm(head="tokens")


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Runner", AnyTwinRunner)
    AnyTwinRunner.calls = []


@pytest.fixture(scope="module")
def weights(tiny: ModelCard) -> RankWeights:
    return random_rank_weights(tiny, seed=3, dtype=torch.bfloat16, tp=1, rank=0)


def operators(card: ModelCard, *kinds: str | None, tp: int = 1) -> tuned.TunedOperators:
    made = [entry(card, "lm_head", kind=kind, tp=tp) for kind in kinds]
    return tuned.TunedOperators(card, made, dtype=torch.bfloat16, device="cpu")


def tied(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers whose products tie often, at the top as well."""
    generator = torch.Generator().manual_seed(rows)
    h = torch.randint(-2, 3, (rows, 256), generator=generator)
    w = torch.randint(-1, 2, (vocabulary, 256), generator=generator)
    w[vocabulary // 2 :] = w[: vocabulary // 2]  # every token has a twin with the same logit
    return h.bfloat16(), w.bfloat16()


def test_every_way_to_choose_takes_the_lowest_of_equals(tiny: ModelCard) -> None:
    h, w = tied(5, 512)
    want = [row.index(max(row)) for row in (h.float() @ w.float().T).tolist()]
    assert max(want) < 256
    ways = [
        operators(tiny, "argmax"), operators(tiny, None), operators(tiny), AutoOperators(tiny, dtype=torch.bfloat16, device="cpu"),
        ReferenceOperators(tiny),
    ]  # fmt: skip
    for one in ways:
        assert one.next_token(h, w, SingleRank()).tolist() == want
    assert AnyTwinRunner.calls == [("lm_head", "argmax", 5), ("lm_head", "shard", 5)]
    odd = torch.tensor([[1.0, float("nan"), 3.0], [2.0, 2.0, float("-inf")]])
    assert likeliest(odd).tolist() == best_token(odd, 0, 3)[1].tolist() == [2, 0]


def test_a_rank_alone_has_its_own_part_alone_and_a_group_all(tiny: ModelCard) -> None:
    h, w = tied(3, 512)
    for rank, part in ((0, w[128:256]), (1, w[128:256]), (3, w[:128].abs() + 1)):
        h = h if rank != 3 else -h.abs() - 1  # not one logit above zero
        comm = StandIn(rank, 4)
        got = operators(tiny, "argmax", tp=4).next_token(h, part, comm)
        auto = AutoOperators(tiny, dtype=torch.bfloat16, device="cpu").next_token(h, part, comm)
        assert got.tolist() == auto.tolist() == ReferenceOperators(tiny).next_token(h, part, comm).tolist()
        assert all(rank * 128 <= one < (rank + 1) * 128 for one in got.tolist())

    def shared(comm: Collectives) -> list[list[int]]:
        own = w[comm.rank * 128 : comm.rank * 128 + 128]
        made = (ReferenceOperators(tiny), AutoOperators(tiny, dtype=torch.bfloat16, device="cpu"))
        return [one.next_token(h, own, comm).tolist() for one in made]

    whole = ReferenceOperators(tiny).next_token(h, w, SingleRank()).tolist()
    assert run_virtual_ranks(4, shared, timeout_s=30) == [[whole, whole]] * 4


def test_rows_of_the_embedding_are_the_same_by_kernel_and_by_operators(tiny: ModelCard) -> None:
    table = torch.randn(512, 256).bfloat16()
    ids = torch.tensor([511, 0, 130, 128, 127])
    auto, reference = AutoOperators(tiny, dtype=torch.bfloat16, device="cpu"), ReferenceOperators(tiny)
    whole = operators(tiny, "embed").embed(ids, table, SingleRank())
    assert torch.equal(whole, table[ids]) and AnyTwinRunner.calls == [("lm_head", "embed", 5)]
    assert torch.equal(operators(tiny, "argmax").embed(ids, table, SingleRank()), whole)  # a bundle without it
    for rank in (0, 1, 3):  # alone: what others hold counts as zero, whoever holds it
        comm, part = StandIn(rank, 4), table[rank * 128 : rank * 128 + 128]
        got = operators(tiny, "embed", tp=4).embed(ids, part, comm)
        assert torch.equal(got, auto.embed(ids, part, comm)) and torch.equal(got, reference.embed(ids, part, comm))
        assert [bool(row.any()) for row in got] == [rank * 128 <= one < rank * 128 + 128 for one in ids.tolist()]


def test_greedy_steps_put_out_the_tokens_of_the_logits(tiny: ModelCard, weights: RankWeights) -> None:
    def cache() -> DecodeCache:
        return DecodeCache(tiny, max_requests=3, max_context=20, max_verify=4, dtype=torch.bfloat16, padding=True)

    def graph(used: tuned.TunedOperators) -> list[list[list[int]]]:
        own = cache()
        slots = [own.add() for _ in range(3)]
        made = GreedyGraph(weights, own, 3, used, SingleRank())
        made.begin(slots, torch.tensor([5, 6, 7]))
        return [made.step() for _ in range(2)]

    def eager(tokens: bool, used: tuned.TunedOperators) -> dict[int, list[int]]:
        own = cache()
        slots = [own.add() for _ in range(2)]
        dispatcher = Dispatcher(weights, own, SingleRank(), auto=used)
        work = StepWork({slot: [slot + 1, 9] for slot in slots}, {own.add(): [3]})
        told = dispatcher.run(work, tokens=tokens)
        return {slot: (one if tokens else likeliest(one)).tolist() for slot, one in told.items()}

    assert graph(operators(tiny, "argmax")) == graph(operators(tiny, None))
    assert {kind for _, kind, _ in AnyTwinRunner.calls} == {"argmax", "shard"}
    want = eager(False, operators(tiny, None))
    assert eager(True, operators(tiny, "argmax")) == want
    assert [len(one) for one in want.values()] == [1, 2, 2]
    one = cache()
    out = step(weights, one, torch.tensor([[3, 4]]), [one.add()], operators(tiny, "argmax"), SingleRank(), tokens=True)
    assert (out.shape, out.dtype) == ((1, 2), torch.int64)


def test_verifying_by_tokens_is_verifying_by_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 4, (6, 4, 9), generator=generator).double()
    drafts = Drafts(torch.randint(0, 3, (6, 3), generator=generator))
    drafts.tokens[2, 1] = PLACEHOLDER
    seeds, positions = torch.arange(6), torch.arange(4).expand(6, 4)
    for one in (Standard(), Synthetic((0.9, 0.5, 0.2))):
        assert one.greedy
        told = one.verify_tokens(drafts, likeliest(logits).int(), seeds, positions)
        assert told.lists() == one.verify(drafts, logits, seeds, positions).lists()
    assert not Standard(0.5).greedy and not Synthetic((0.5,), Standard(1.0)).greedy


def planned(monkeypatch: pytest.MonkeyPatch, made: list[Choice], form: StepForm) -> Plan:
    monkeypatch.setattr("k3lab.decode.plan.choose", lambda *_args, **_more: tuple(made))
    return plan(K3, tp=1, rows=8, backend="latency_specialized", form=form)


def test_the_plan_shows_one_launch_or_what_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[Choice] = [one for one in every_entry(K3) if one.family != "lm_head"]
    own, shard = entry(K3, "lm_head", kind="argmax"), entry(K3, "lm_head")
    none = Fallback("lm_head", "argmax", "no entry", "k3lab tune lm_head")
    lost = Fallback("lm_head", "embed", "no entry", "k3lab tune lm_head")

    def after(*made: Choice) -> list[tuple[str, str, bool]]:
        found = planned(monkeypatch, [*others, *made, lost], TOKENS)
        assert [(one.kernel, one.engine, one.fallback is lost) for one in found.before] == [
            ("embedding", "torch", True), ("embedding_all_reduce", "torch", True),
        ]  # fmt: skip
        return [(one.kernel, one.engine, one.fallback is none) for one in found.after[1:]]

    assert after(own) == [("k3_lm_head_twin_argmax", "twin", False)]
    behind = [("logits_all_gather", "torch", True), ("next_token", "torch", True)]
    assert after(none, shard) == [("k3_lm_head_twin_all", "twin", False), *behind]
    assert after(none) == [("lm_head_gemm", "torch", True), *behind]
    stock = plan(K3, tp=1, rows=8, form=TOKENS)
    assert [one.kernel for one in stock.after[1:]] == ["lm_head_gemm", "logits_all_gather", "next_token"]
    assert stock.total == plan(K3, tp=1, rows=8).total + 1


@pytest.mark.parametrize(("has", "found"), [
    ({"argmax", "shard"}, ["argmax"]), ({"shard"}, ["no argmax", None]), (set(), ["no argmax"]), ({"argmax"}, ["argmax"]),
])  # fmt: skip
def test_an_argmax_is_chosen_where_a_bundle_has_it(
    has: set[str], found: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(_cures: Any, _tp: int, _rows: int, _bundle: Any, name: str, kind: str | None, form: StepForm) -> Choice:
        assert form == TOKENS
        if kind == "embed":
            return Fallback(name, kind, "none", "")
        if name == "lm_head" and (kind or "shard") in has:
            return entry(K3, name, kind=kind)
        return Fallback(name, kind, "none", "")

    monkeypatch.setattr(choosing, "_choose", pick)
    made = [one for one in choose(K3, tp=16, rows=8, gpu="H200", form=TOKENS) if one.family == "lm_head"]
    assert made.pop().kind == "embed"
    assert [one.kind if isinstance(one, Tuned) else f"no {one.kind}" for one in made] == found


def test_what_is_sampled_needs_logits() -> None:
    head: Callable[..., str] = lambda **options: RunOptions(**options).form.head  # noqa: E731
    assert head() == head(drafts=3) == head(drafts=3, acceptance_length=2.0) == "tokens"
    assert head(drafts=3, temperature=0.7) == "logits"
