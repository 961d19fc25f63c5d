"""Acceptance of drafts and speculative decoding: standard, synthetic, on both backends, on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.main import run as command
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.checkpoint.write import write_shards
from k3lab.decode.demo import demo_card
from k3lab.decode.dispatch import Dispatcher
from k3lab.decode.dspark.acceptance import Standard, Synthetic, likeliest, rates_of_length
from k3lab.decode.dspark.card import K3_DSPARK, SMALL_DSPARK, draft_tensors
from k3lab.decode.dspark.decoder import SpeculativeDecoder
from k3lab.decode.dspark.drafter import Drafter
from k3lab.decode.dspark.reference import Drafts
from k3lab.decode.dspark.weights import draft_weights, random_draft_tensors
from k3lab.decode.operators import Operators, ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.run import RunOptions, run
from k3lab.decode.scope import RankSituation, Scope, group_scope
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.speculate_run import fitted_card
from k3lab.decode.step import step
from k3lab.decode.weights import RankWeights
from k3lab.kernels import K3, InputError, ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks

EXACT = 1e-9
PROMPTS = [[17, 400, 3, 17, 99], [256, 8, 8], [511, 0, 44, 301, 12, 77, 5]]
SEEDS = [11, 22, 33]


# -- acceptance --------------------------------------------------------------------------------------
def logits_for(tokens: list[list[int]], vocabulary: int = 8) -> torch.Tensor:
    """Rows whose likeliest tokens are the given ones."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary).double() * 5


def at(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count) + 100, torch.arange(width).expand(count, width) + 1000 * torch.arange(count)[:, None]


@pytest.mark.parametrize(("drafts", "best", "out"), [
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    ([1, 2, 3], [1, 2, 7, 4], [1, 2, 7]),
    ([1, 2, 3], [5, 2, 3, 4], [5]),
    ([1, 2, 3], [1, 5, 3, 4], [1, 5]),  # what follows a rejected draft is not looked at
    ([1, -1, 3], [1, 0, 3, 4], [1, 0]),
    ([-1, -1, -1], [0, 0, 0, 0], [0]),
])  # fmt: skip
def test_greedy_acceptance_stops_at_the_first_other_token(drafts: list[int], best: list[int], out: list[int]) -> None:
    seeds, positions = at(2, 4)
    both = torch.tensor([drafts, [6, 6, 6]])
    got = Standard().verify(Drafts(both), logits_for([best, [6, 6, 6, 1]]), seeds, positions)
    assert got.lists() == [out, [6, 6, 6, 1]]
    assert got.counts.tolist() == [len(out), 4]


def test_the_lower_of_equally_likely_tokens_is_accepted() -> None:
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, [1, 3]] = 2
    seeds, positions = at(1, 2)
    assert Standard().verify(Drafts(torch.tensor([[1]])), logits, seeds, positions).lists() == [[1, 0]]
    assert Standard().verify(Drafts(torch.tensor([[3]])), logits, seeds, positions).lists() == [[1]]
    assert likeliest(logits).tolist() == [[1, 0]]


@pytest.mark.parametrize("how", ["likeliest", "sampled", "placeholder"])
def test_sampling_with_drafts_is_sampling_without(how: str) -> None:
    """Of 30,000 requests, the first token is distributed as the target says, and the second given the first."""
    count, temperature = 30_000, 0.7
    generator = torch.Generator().manual_seed(3)
    target, draft = (torch.randn(3, 5, generator=generator, dtype=torch.float64) * 1.5 for _ in range(2))
    p, q = torch.softmax(target / temperature, -1), torch.softmax(draft[:2] / temperature, -1)
    seeds = torch.arange(count) * 7 + 1
    positions = torch.arange(3).expand(count, 3) + 40
    if how == "sampled":
        tokens = torch.stack([torch.multinomial(row, count, replacement=True, generator=generator) for row in q], 1)
        drafts = Drafts(tokens, draft[:2].expand(count, 2, 5))
    else:
        best = draft[:2].argmax(-1) if how == "likeliest" else torch.tensor([-1, -1])
        drafts = Drafts(best.expand(count, 2))
    got = Standard(temperature).verify(drafts, target.expand(count, 3, 5), seeds, positions)
    for row, mask in ((0, torch.ones(count, dtype=torch.bool)), (1, got.counts > 1), (2, got.counts > 2)):
        tokens = got.tokens[mask, row]
        if how == "placeholder" and row:
            assert not len(tokens)
            continue
        expected = p[row] * len(tokens)
        counts = torch.bincount(tokens, minlength=5)
        assert ((counts - expected).square() / expected).sum() < 20, (row, counts, expected)  # 4 degrees: 0.0005
    if how == "sampled":
        rate = torch.minimum(p[0], q[0]).sum()
        assert (got.counts > 1).double().mean().item() == pytest.approx(rate.item(), abs=0.01)
    repeat = Standard(temperature).verify(drafts, target.expand(count, 3, 5), seeds, positions)
    assert torch.equal(repeat.tokens, got.tokens)


def test_rates_of_a_length() -> None:
    assert rates_of_length(3.78, 7) == pytest.approx((1, 1, 0.78, 0, 0, 0, 0))
    assert rates_of_length(1, 3) == (0, 0, 0)
    assert rates_of_length(4, 3) == (1, 1, 1)
    assert rates_of_length(6, 7) == (1, 1, 1, 1, 1, 0, 0)
    assert Synthetic.of_length(3.78, 7).length == pytest.approx(3.78)
    assert Synthetic((0.9, 0.6, 0.6, 0.0, 0.0)).conditional == pytest.approx((0.9, 0.6 / 0.9, 1.0, 0.0, 0.0))
    for length, drafts in ((0.9, 7), (8.1, 7), (float("nan"), 7)):
        with pytest.raises(InputError, match=r"lies in 1\.\.8"):
            rates_of_length(length, drafts)
    for rates in ((), (0.5, 0.6), (1.2,), (0.5, -0.1)):
        with pytest.raises(InputError, match=r"lie in 0\.\.1 and do not rise"):
            Synthetic(rates)
    with pytest.raises(InputError, match="temperature is -1"):
        Standard(-1)


@pytest.mark.parametrize(
    "rates", [(1.0, 1.0, 0.78, 0.0), (0.9, 0.5, 0.25, 0.1), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
)
def test_synthetic_acceptance_follows_its_rates_whatever_the_target_says(rates: tuple[float, ...]) -> None:
    count = 20_000
    acceptance = Synthetic(rates)
    tokens = torch.tensor([1, 2, 3, 4]).expand(count, 4)
    logits = logits_for([[7, 6, 5, 0, 6]]).expand(count, 5, 8)  # the target wants none of the drafts
    got = acceptance.verify(Drafts(tokens), logits, torch.arange(count), torch.arange(5).expand(count, 5))
    for index, rate in enumerate(rates):
        assert (got.counts > index + 1).double().mean().item() == pytest.approx(rate, abs=0.012)
    assert got.counts.double().mean().item() == pytest.approx(acceptance.length, abs=0.03)
    emitted = {tuple(row) for row in got.lists()}
    drafted, wanted = (1, 2, 3, 4), (7, 6, 5, 0, 6)
    assert emitted <= {(*drafted[:n], wanted[n]) for n in range(5)}  # drafts as they are, then the target's token
    filled = tokens.clone()
    filled[:, 1] = -1
    assert (
        acceptance.verify(Drafts(filled), logits, torch.arange(count), torch.arange(5).expand(count, 5)).counts.max()
        <= 2
    )
    with pytest.raises(InputError, match="3 drafts a request, but 4 synthetic"):
        acceptance.verify(Drafts(tokens[:, :3]), logits[:, :4], torch.arange(count), torch.arange(4).expand(count, 4))


def test_every_acceptance_says_what_it_is() -> None:
    assert Standard().label == "standard acceptance, greedy"
    assert Standard(0.7).label == "standard acceptance, sampled at temperature 0.7"
    label = Synthetic.of_length(3.78, 7).label
    assert label.startswith("SYNTHETIC acceptance of mean length 3.78")
    assert "does not follow the target" in label


# -- decoding ----------------------------------------------------------------------------------------
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

        def verify(self, drafts: Drafts, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> Any:
            seen.append((seeds.tolist(), positions.tolist()))
            return super().verify(drafts, logits, seeds, positions)

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

        def noted(work: Any, tap: Any = None, run: Any = run, log: Any = log) -> Any:
            def both(slot: int) -> Any:
                own = tap(slot)
                return lambda layer, rows: (log.append(rows.clone()), own(layer, rows))

            return run(work, both)

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
@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def test_a_run_with_drafts_tells_who_accepts_them(
    no_gpu: None, tiny: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tiny, RunOptions(tp=2, rows=2, tokens=5, drafts=3, acceptance_length=2.5, prompt=3))
    assert any(line.startswith("SYNTHETIC acceptance of mean length 2.5") for line in report.head)
    assert report.speculation
    assert report.speculation["acceptance"].startswith("SYNTHETIC")
    assert [len(tokens) for tokens in report.tokens] == [5, 5]
    assert len(report.step_ns) == len(report.speculation["accepted"][0])
    assert report.speculation["drafter"] == "small-dspark"
    assert report.graph_step_ns is None
    assert report.to_json()["speculation"] == report.speculation
    wanted = [
        "decode",
        "run",
        "--rows",
        "1",
        "--tokens",
        "3",
        "--drafts",
        "2",
        "--fill-context",
        "9",
        "--temperature",
        "0.5",
    ]
    assert command(wanted) == 0
    text = capsys.readouterr().out
    assert (
        "standard acceptance, sampled at temperature 0.5; 2 drafts a step by drafter small-dspark (random weights)"
        in text
    )
    assert "note: a context of 9 tokens is made up" in text
    assert run(tiny, RunOptions(tokens=1, drafts=2)).step_ns == []  # the prompt's own token is all


def test_a_run_loads_its_drafter(no_gpu: None, tiny: ModelCard, tmp_path: Path) -> None:
    whole = random_draft_tensors(SMALL_DSPARK, seed=0, dtype=torch.bfloat16)
    write_shards(tmp_path, [(one.name, whole[one.spec]) for one in draft_tensors(SMALL_DSPARK)])
    options = RunOptions(rows=2, tokens=6, drafts=3, acceptance_length=4)
    loaded = run(tiny, replace(options, draft_checkpoint=tmp_path))
    assert loaded.tokens == run(tiny, options).tokens  # the random drafter of seed 0 is the one that was written
    assert loaded.speculation
    assert loaded.speculation["drafter_weights"] == str(tmp_path)


@pytest.mark.parametrize(("options", "words"), [
    ({"drafts": 8}, "drafts is 8; a step verifies 1 to 7"),
    ({"drafts": -1}, "drafts is -1"),
    ({"drafts": 7, "rows": 9}, "9 requests with 7 drafts are 72 rows"),
    ({"acceptance_length": 3.0}, "speak of drafts; give --drafts"),
    ({"temperature": 0.5}, "speak of drafts"),
    ({"drafts": 3, "acceptance_length": 5.0}, "a synthetic acceptance length of 5 with 3 drafts"),
    ({"drafts": 3, "temperature": -0.5}, "temperature is -0.5"),
])  # fmt: skip
def test_runs_with_drafts_that_cannot_be(options: dict[str, Any], words: str, no_gpu: None, tiny: ModelCard) -> None:
    with pytest.raises(InputError, match=words):
        run(tiny, RunOptions(**options))


def test_models_without_a_published_drafter_get_one_that_fits(tiny: ModelCard) -> None:
    assert fitted_card(K3) is K3_DSPARK
    assert fitted_card(tiny) is SMALL_DSPARK
    demo = demo_card()
    card = fitted_card(demo)
    card.check(demo, 16)
    assert card.target_layer_ids == (0, 1, 2, 3, 4)
    assert card.mask_token_id < demo.vocab_size
    with pytest.raises(InputError, match="no drafter for hidden size 512"):
        fitted_card(replace(tiny, hidden_size=512))
