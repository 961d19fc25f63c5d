"""Speculative decoding: greedy and sampled, standard and synthetic acceptance, on both backends, on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.dispatch import Dispatcher
from k3lab.decode.dspark.acceptance import Standard, Synthetic
from k3lab.decode.dspark.card import SMALL_DSPARK
from k3lab.decode.dspark.decoder import SpeculativeDecoder
from k3lab.decode.dspark.drafter import Drafter
from k3lab.decode.dspark.reference import Drafts
from k3lab.decode.dspark.weights import draft_weights, random_draft_tensors
from k3lab.decode.operators import Operators, ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.scope import RankSituation, Scope, group_scope
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks

EXACT = 1e-9
PROMPTS = [[17, 400, 3, 17, 99], [256, 8, 8], [511, 0, 44, 301, 12, 77, 5]]
SEEDS = [11, 22, 33]


@pytest.fixture(scope="module")
def draft_of() -> dict[str, torch.Tensor]:
    return random_draft_tensors(SMALL_DSPARK, seed=2, dtype=torch.float64)


ALONE = RankSituation(tp=1, gpu="H200", sms=132, tuned_sms=132, entry_rows=64, bundle="x")


class Session:
    """A decoder and its parts."""

    def __init__(
        self, tiny: ModelCard, whole: ModelTensors, draft: dict[str, torch.Tensor], acceptance: Any, *,
        drafts: int = 3, comm: Collectives | None = None, backend: str = "auto", specialized: Operators | None = None,
        scope: Scope | None = None, drafter: type[Drafter] = Drafter, draft_temperature: float = 0.0, auto: Operators | None = None,
    ) -> None:  # fmt: skip
        group = comm or SingleRank()
        own = {"tp": group.size, "rank": group.rank}
        self.weights: RankWeights = pack(shard(whole, tiny, **own), tiny, **own)
        self.cache = DecodeCache(
            tiny,
            tp=group.size,
            max_requests=3,
            max_context=60,
            max_verify=drafts + 1,
            block_size=4,
            dtype=self.weights.dtype,
        )
        self.said: list[str] = []
        dispatcher = Dispatcher(
            self.weights, self.cache, group, auto=auto or AutoOperators(tiny, dtype=self.weights.dtype, device="cpu"),
            specialized=(lambda _rows: specialized) if specialized else None, scope=scope, backend=backend, chunk=4,
        )  # fmt: skip
        self.drafter = drafter(draft_weights(draft, SMALL_DSPARK, tiny, **own), self.weights, self.cache, group)
        self.decoder = SpeculativeDecoder(
            dispatcher,
            self.drafter,
            acceptance,
            drafts=drafts,
            draft_temperature=draft_temperature,
            say=self.said.append,
        )
        self.tally = dispatcher.tally

    def run(self, steps: int) -> list[list[int]]:
        self.decoder.admit(PROMPTS, SEEDS)
        for _ in range(steps):
            self.decoder.step()
        return [one.tokens for one in self.decoder.requests]


@pytest.fixture(scope="module")
def answers(tiny: ModelCard, tiny_tensors: ModelTensors) -> list[list[int]]:
    """Of the prompts, by greedy decoding without drafts: a token a step, by the twins."""
    weights = pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0)
    cache = DecodeCache(tiny, max_requests=3, max_context=60, dtype=weights.dtype)
    slots = [cache.add() for _ in PROMPTS]
    own = PrefillOperators(tiny, dtype=weights.dtype, device="cpu")
    logits = [
        prefill(weights, cache, slot, torch.tensor(ids), own, SingleRank())
        for slot, ids in zip(slots, PROMPTS, strict=True)
    ]
    out = [torch.stack(logits).argmax(-1)]
    for _ in range(27):
        rows = step(weights, cache, out[-1][:, None], slots, ReferenceOperators(tiny), SingleRank())
        cache.accept(slots, [1] * 3)
        out.append(rows[:, 0].argmax(-1))
    return torch.stack(out, dim=1).tolist()


class Knowing(Drafter):
    """Drafts what the target will say, and something else after ``right`` tokens, which changes from step to step."""

    answers: dict[int, list[int]]
    steps = 0

    def draft(self, slots: Sequence[int], last: torch.Tensor, count: int, **more: Any) -> Drafts:
        mine = super().draft(slots, last, count, **more)
        rows = []
        for index, slot in enumerate(slots):
            done = self.cache.length(slot) - len(PROMPTS[index]) + 1
            right = (self.steps + index) % (count + 1)
            answer = self.answers[slot][done : done + count]
            rows.append([token if at < right else (token + 1) % 512 for at, token in enumerate(answer)])
        self.steps += 1
        assert mine.tokens.shape == (len(slots), count)
        return Drafts(torch.tensor(rows))


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_greedy_speculation_is_greedy_decoding_however_many_drafts_are_accepted(
    tiny: ModelCard,
    tiny_tensors: ModelTensors,
    draft_of: dict[str, torch.Tensor],
    answers: list[list[int]],
    drafts: int,
) -> None:
    session = Session(tiny, tiny_tensors, draft_of, Standard(), drafts=drafts, drafter=Knowing)
    Knowing.answers, Knowing.steps = dict(enumerate(answers)), 0
    steps = 4
    got = session.run(steps)
    for tokens, answer in zip(got, answers, strict=True):
        assert tokens == answer[: len(tokens)]
    accepted = [one.accepted for one in session.decoder.requests]
    assert accepted == [[(at + index) % (drafts + 1) for at in range(steps)] for index in range(3)]
    assert session.decoder.to_json()["mean_tokens_a_step"] == pytest.approx(1 + sum(map(sum, accepted)) / (3 * steps))
    # the drafter's rows are those of the accepted text alone, whatever was drafted and rejected on the way
    fresh = Session(tiny, tiny_tensors, draft_of, Standard(), drafts=drafts)
    fresh.decoder.admit([[*prompt, *tokens[:-1]] for prompt, tokens in zip(PROMPTS, got, strict=True)], SEEDS)
    for slot in range(3):
        length = session.cache.length(slot)
        assert length == fresh.cache.length(slot)
        mine, theirs = (one.drafter._places(slot, 0, length) for one in (session, fresh))
        for pages, others in zip(session.drafter.pages, fresh.drafter.pages, strict=True):
            a, b = pages.flatten(0, 1)[mine], others.flatten(0, 1)[theirs]
            assert ((a - b).norm() / b.norm()).item() < EXACT


def test_a_drafter_that_is_wrong_costs_nothing_but_steps(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor], answers: list[list[int]]
) -> None:
    session = Session(tiny, tiny_tensors, draft_of, Standard())
    got = session.run(3)
    assert session.said == ["standard acceptance, greedy"]
    for answer, tokens in zip(answers, got, strict=True):
        assert tokens == answer[: len(tokens)]
        assert len(tokens) >= 4


def test_synthetic_acceptance_puts_out_what_was_drafted_and_is_labelled(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor]
) -> None:
    session = Session(tiny, tiny_tensors, draft_of, Synthetic((1.0, 1.0, 0.0)))
    session.decoder.admit(PROMPTS, SEEDS)
    drafted: list[Drafts] = []
    real = session.drafter.draft
    session.drafter.draft = lambda *args, **more: drafted.append(real(*args, **more)) or drafted[-1]  # type: ignore[method-assign]
    out = session.decoder.step()
    assert [row[:2] for row in out] == drafted[0].tokens[:, :2].tolist()
    assert [len(row) for row in out] == [3, 3, 3]
    data = session.decoder.to_json()
    assert data["mean_tokens_a_step"] == 3
    assert data["acceptance"].startswith("SYNTHETIC")
    assert session.said[0].startswith("SYNTHETIC")


def test_numbers_belong_to_the_tokens_they_decide_on(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor]
) -> None:
    seen: list[tuple[list[int], list[list[int]]]] = []

    class Watched(Standard):
        def first(self, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            seen.append((seeds.tolist(), positions[:, None].tolist()))
            return super().first(logits, seeds, positions)

        def verify_tokens(
            self, drafts: Drafts, best: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
        ) -> Any:
            seen.append((seeds.tolist(), positions.tolist()))
            return super().verify_tokens(drafts, best, seeds, positions)

    session = Session(tiny, tiny_tensors, draft_of, Watched())
    session.run(2)
    # the token after a prompt of n has position n; a step decides on the next ones
    done = [len(prompt) for prompt in PROMPTS]
    assert seen[0] == (SEEDS, [[length] for length in done])
    for step_of, (seeds, positions) in enumerate(seen[1:]):
        ends = [
            n + sum(one.accepted[:step_of]) + step_of for n, one in zip(done, session.decoder.requests, strict=True)
        ]
        assert (seeds, positions) == (SEEDS, [list(range(end + 1, end + 5)) for end in ends])


@pytest.mark.parametrize("draft_temperature", [0.0, 0.8])
def test_sampled_speculation_repeats_and_depends_on_the_seed_alone(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor], draft_temperature: float
) -> None:
    def tokens() -> list[list[int]]:
        return Session(tiny, tiny_tensors, draft_of, Standard(0.8), draft_temperature=draft_temperature).run(2)

    one = tokens()
    assert one == tokens()
    alone = Session(tiny, tiny_tensors, draft_of, Standard(0.8), draft_temperature=draft_temperature)
    alone.decoder.admit(PROMPTS[1:2], SEEDS[1:2])
    for _ in range(2):
        alone.decoder.step()
    assert alone.decoder.requests[0].tokens == one[1]  # whoever shares the batch
    other = Session(tiny, tiny_tensors, draft_of, Standard(0.8), draft_temperature=draft_temperature)
    other.decoder.admit(PROMPTS[1:2], [23])
    for _ in range(2):
        other.decoder.step()
    assert other.decoder.requests[0].tokens != one[1]


@pytest.mark.parametrize(
    "acceptance", [Standard(), Standard(0.8), Synthetic((0.9, 0.6, 0.3))], ids=lambda one: one.label[:9]
)
def test_both_backends_decide_bit_for_bit_alike_from_the_same_hidden_states(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor], acceptance: Any
) -> None:
    """The specialised operators are the fallback's here, so that both see the same bits."""
    bf16 = ModelTensors(
        *(
            {name: tensor if tensor.dtype == torch.uint8 else tensor.bfloat16() for name, tensor in part.items()}
            if isinstance(part, dict)
            else [
                {name: tensor if tensor.dtype == torch.uint8 else tensor.bfloat16() for name, tensor in layer.items()}
                for layer in part
            ]
            for part in (tiny_tensors.outside, tiny_tensors.layers)
        )
    )
    drafter = {name: tensor.bfloat16() for name, tensor in draft_of.items()}
    operators = AutoOperators(tiny, dtype=torch.bfloat16, device="cpu")
    sessions = [
        Session(tiny, bf16, drafter, acceptance),
        Session(
            tiny,
            bf16,
            drafter,
            acceptance,
            backend="latency_specialized",
            specialized=operators,
            scope=group_scope([ALONE]),
        ),
    ]
    logs: list[list[torch.Tensor]] = [[], []]
    for session, log in zip(sessions, logs, strict=True):
        run = session.decoder.dispatcher.run

        def noted(work: Any, tap: Any = None, run: Any = run, log: Any = log, **more: Any) -> Any:
            def both(slot: int) -> Any:
                own = tap(slot)
                return lambda layer, rows: (log.append(rows.clone()), own(layer, rows))

            return run(work, both, **more)

        session.decoder.dispatcher.run = noted  # type: ignore[method-assign]
    outs = [session.run(3) for session in sessions]
    assert len(logs[0]) == len(logs[1]) == 84
    assert all(torch.equal(one, other) for one, other in zip(*logs, strict=True))  # the same hidden states
    assert outs[0] == outs[1]
    assert [one.accepted for one in sessions[0].decoder.requests] == [
        one.accepted for one in sessions[1].decoder.requests
    ]
    for pages, others in zip(sessions[0].drafter.pages, sessions[1].drafter.pages, strict=True):
        assert torch.equal(pages, others)
    assert torch.equal(sessions[0].cache.context, sessions[1].cache.context)
    assert (sessions[0].tally.steps, sessions[1].tally.served) == (0, 3)
    assert sessions[1].tally.to_json()["fallbacks"][0]["code"] == "prefill"


def test_all_ranks_decide_alike_and_as_one(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor]
) -> None:
    def rank(comm: Collectives) -> list[list[int]]:
        return Session(tiny, tiny_tensors, draft_of, Standard(0.8), comm=comm, draft_temperature=0.5).run(2)

    want = rank(SingleRank())
    assert all(tokens == want for tokens in run_virtual_ranks(4, rank, timeout_s=120))


def test_what_does_not_belong_together_is_refused(
    tiny: ModelCard, tiny_tensors: ModelTensors, draft_of: dict[str, torch.Tensor]
) -> None:
    session = Session(tiny, tiny_tensors, draft_of, Standard())
    dispatcher, drafter = session.decoder.dispatcher, session.drafter
    with pytest.raises(InputError, match="5 drafts make steps of 6 tokens a request; this cache keeps snapshots for 4"):
        SpeculativeDecoder(dispatcher, drafter, Standard(), drafts=5)
    with pytest.raises(InputError, match="8 drafts a step"):
        SpeculativeDecoder(dispatcher, drafter, Standard(), drafts=8)
    other = Session(tiny, tiny_tensors, draft_of, Standard())
    with pytest.raises(InputError, match="beside the cache that the target's steps use"):
        SpeculativeDecoder(dispatcher, other.drafter, Standard(), drafts=3)
    with pytest.raises(InputError, match="3 prompts and 1 seeds"):
        session.decoder.admit(PROMPTS, [1])


# -- runs --------------------------------------------------------------------------------------------
