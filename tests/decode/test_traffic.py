"""Agent traffic: files, made-up sessions, and replays whose times are known because the clock is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from k3lab.decode.caches import DecodeCache
from k3lab.decode.dispatch import Dispatcher, StepWork
from k3lab.decode.dspark.acceptance import acceptance
from k3lab.decode.dspark.drafter import Drafter
from k3lab.decode.dspark.weights import random_rank_draft
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.sharding import ModelTensors
from k3lab.decode.speculate_run import fitted_card
from k3lab.decode.traffic.both import MEASURES
from k3lab.decode.traffic.captured import CapturedDraftedSteps, CapturedPlainSteps
from k3lab.decode.traffic.captured import Served as TurnsServed
from k3lab.decode.traffic.clock import WallClock
from k3lab.decode.traffic.replay import Replay, Served
from k3lab.decode.traffic.seen import measured, percentile, seen
from k3lab.decode.traffic.sessions import Session, Traffic, Turn, read_traffic, traffic_of
from k3lab.decode.traffic.steps import DraftedSteps, PlainSteps, Steps
from k3lab.decode.traffic.synthetic import Shape, synthetic
from k3lab.decode.weights import RankWeights
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import SingleRank

from .evaluation_case import dispatcher, weights_of

SMALL = Shape(
    sessions=5, turns=3, system_tokens=6, systems=2, prompt=4, output=3, pause_s=2.0, arrivals_s=1.0, context=60
)


class Costs:
    """A clock that goes on by what is run: a second a prompt token, ten a decode step."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    shared = now

    def pass_until(self, moment: float) -> None:
        self.at = max(self.at, moment)


class Counting:
    """A dispatcher whose work takes time on a :class:`Costs`, and is remembered."""

    def __init__(self, inner: Any, clock: Costs) -> None:
        self._inner, self._clock = inner, clock
        self.ran: list[StepWork] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, work: StepWork, *more: Any, **other: Any) -> Any:
        self.ran.append(work)
        self._clock.at += sum(map(len, work.prompts.values())) + 10 * bool(work.tokens)
        return self._inner.run(work, *more, **other)


@pytest.fixture(scope="module")
def weights(tiny_tensors: ModelTensors, tiny: ModelCard) -> RankWeights:
    return weights_of(tiny_tensors, tiny)


def replayed(
    weights: RankWeights, traffic: Traffic, rows: int = 2, **more: Any
) -> tuple[list[Served], Replay, Counting]:
    clock = Costs()
    runs = Counting(dispatcher(weights, ReferenceOperators(weights.card), traffic.context, rows), clock)
    replay = Replay(runs, traffic, rows=rows, clock=clock, **more)  # type: ignore[arg-type]
    return list(replay.run()), replay, runs


def session(name: str, *turns: tuple[float, int, int], start: float = 0.0, system: int = 0) -> Session:
    return Session(name, start, "s" if system else None, system, tuple(Turn(*one) for one in turns))


def test_times_of_a_session_alone(weights: RankWeights) -> None:
    served, replay, _ = replayed(weights, traffic_of([session("a", (1.0, 5, 3), (4.0, 2, 1))]))
    first, second = served
    assert (first.due, first.begun, first.first, first.ended) == (1, 1, 6, 26)  # 5 tokens, then 2 steps
    # the last token was put out and not yet computed: it goes before the two new ones
    assert (second.due, second.first, second.ended) == (30, 33, 33)
    assert (first.reused, first.prefilled, second.reused, second.prefilled) == (0, 5, 7, 3)
    data = seen(served, replay)
    assert data["user_tokens_a_s"]["p50"] == 2 / 20 and data["group_decode_tokens_a_s"] == 2 / 20
    assert data["prefill_tokens_a_s"] == 1 and data["request_latency_s"]["p90"] == percentile([25, 3], 0.9)
    assert data["prefill_tokens_a_s_by_turn"]["p90"] == 1 and data["group_decode_tokens_a_s_by_step"]["p50"] == 0.1
    assert data["reused_share"] == 7 / 15 and data["longest_context"] == 11
    made = measured(data, MEASURES)  # of two turns; one of them has a token after its first
    assert made["request latency, median"] == {"value": 14.0, "unit": "s", "samples": 2, "tail_covered": True}
    assert made["request latency, P90"]["tail_covered"] is False and made["user rate, median"]["samples"] == 1
    assert made["prefill rate"] == {"value": 1.0, "unit": "tok/s"}


def test_turns_queue_for_rows_in_order_of_being_due(weights: RankWeights) -> None:
    three = traffic_of(
        [session(name, (0.0, 1, 2), start=start) for name, start in (("a", 0.0), ("c", 0.2), ("b", 0.1))]
    )
    served, *_ = replayed(weights, three, rows=1)
    assert [one.session for one in served] == ["a", "b", "c"]
    assert [one.begun for one in served] == [0, 11, 22]
    assert seen(served, replayed(weights, three, rows=1)[1])["queued_s"]["p50"] == pytest.approx(10.9)


def test_a_prompt_holds_the_others_up(weights: RankWeights) -> None:
    served, *_ = replayed(weights, traffic_of([session("a", (0.0, 1, 3)), session("b", (0.0, 7, 1), start=5.0)]))
    ended = {one.session: one.ended for one in served}
    assert ended == {"b": 18, "a": 28}  # a: 1 + 10, b's 7 tokens, 10


def test_contexts_that_come_back_give_the_same_tokens(weights: RankWeights) -> None:
    traffic = synthetic(SMALL, 3)

    def tokens(**more: Any) -> tuple[list[Any], dict[str, Any]]:
        served, replay, runs = replayed(weights, traffic, **more)
        decoded = sorted(token for work in runs.ran for token in (ids[0] for ids in work.tokens.values()))
        return decoded, seen(served, replay)

    kept, told = tokens()
    again, none = tokens(reuse=False)
    little, some = tokens(keep_bytes=200_000)
    assert kept == again == little
    assert told["reused_tokens"] > some["reused_tokens"] > none["reused_tokens"] == 0
    assert told["prefilled_tokens"] < some["prefilled_tokens"] < none["prefilled_tokens"]
    assert told["contexts_given_up"] == 0 < some["contexts_given_up"]
    assert told["turns"] == sum(len(one.turns) for one in traffic.sessions) == none["turns"]


def test_sessions_of_one_system_share_its_state(weights: RankWeights) -> None:
    two = traffic_of([session("a", (0.0, 2, 1), system=9), session("b", (0.0, 3, 1), start=50.0, system=9)])
    served, *_ = replayed(weights, two)
    assert [(one.reused, one.prefilled) for one in served] == [(0, 11), (9, 3)]


def put_out(replay: Replay) -> dict[tuple[str, int], list[int]]:
    """Tokens of each turn, filled as turns leave."""
    out: dict[tuple[str, int], list[int]] = {}
    leave = replay._leave

    def leaving(slot: int) -> Served:
        one = replay._live[slot]
        out[one.session.name, one.turn] = one.tokens
        return leave(slot)

    replay._leave = leaving  # type: ignore[method-assign]
    return out


def served_here(weights: RankWeights, told: list[int] | None = None) -> TurnsServed:
    note = told.append if told is not None else lambda _requests: None
    return TurnsServed(2, lambda _requests: ReferenceOperators(weights.card), note)


def drafted(
    weights: RankWeights, traffic: Traffic, length: float | None = None, *, captured: bool = False, rows: int = 2, **more: Any
) -> Any:  # fmt: skip
    """A replay with two drafts, and what each turn put out."""
    card = fitted_card(weights.card)
    draft = random_rank_draft(card, weights.card, seed=0, dtype=weights.dtype, tp=1, rank=0)

    def steps(runs: Any) -> Steps:
        accepts = acceptance(2, 0.0, length)
        drafter = Drafter(draft, weights, runs.cache, runs.comm)
        if captured:
            return CapturedDraftedSteps(runs, drafter, accepts, served_here(weights), drafts=2)
        return DraftedSteps(runs, drafter, accepts, drafts=2)

    clock = Costs()
    cache = DecodeCache(
        weights.card,
        max_requests=rows,
        max_context=traffic.context + 2,
        max_verify=3,
        dtype=weights.dtype,
        padding=captured,
    )
    inner = Dispatcher(weights, cache, SingleRank(), auto=ReferenceOperators(weights.card))
    replay = Replay(Counting(inner, clock), traffic, rows=rows, clock=clock, steps=steps, **more)  # type: ignore[arg-type]
    out = put_out(replay)
    return list(replay.run()), out, replay


TALK = [
    session("a", (0.0, 5, 6), (4.0, 2, 5), (1.0, 1, 4), system=7),
    session("b", (0.0, 3, 4), (2.0, 2, 3), start=3.0, system=7),
]


def test_drafts_that_the_target_verifies_change_no_token(weights: RankWeights) -> None:
    traffic = traffic_of(TALK)
    clock = Costs()
    plain = Replay(
        Counting(dispatcher(weights, ReferenceOperators(weights.card), traffic.context, 2), clock), traffic, rows=2, clock=clock,  # type: ignore[arg-type]
    )  # fmt: skip
    out = put_out(plain)
    list(plain.run())
    served, with_drafts, _ = drafted(weights, traffic)
    assert with_drafts == out and len(out) == 5
    assert [one.output for one in served] == [len(out[one.session, one.turn]) for one in served]


def test_a_drafters_rows_come_back_with_the_context(weights: RankWeights) -> None:
    """Synthetic acceptance puts drafts out, so that tokens follow the drafter's own context."""
    traffic = traffic_of(TALK)
    served, kept, replay = drafted(weights, traffic, 2.5)
    nothing, again, without = drafted(weights, traffic, 2.5, reuse=False)
    assert kept == again
    assert sum(one.reused for one in served) > 0 == sum(one.reused for one in nothing)
    assert [(one.session, one.turn) for one in sorted(served, key=lambda one: one.session)] == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert all(
        len(tokens) == turn.output for one in TALK for n, turn in enumerate(one.turns) for tokens in [kept[one.name, n]]
    )
    told = seen(served, replay)
    # nothing beyond what a turn asked for is counted
    assert told["output_tokens"] == 22 and replay.decode_tokens == 22 - 5
    assert 1 < told["mean_tokens_a_step"] <= 3 and without.how.accepted == replay.how.accepted


@pytest.mark.parametrize("rows", [1, 2])
def test_captured_steps_put_out_the_same_tokens(weights: RankWeights, rows: int) -> None:
    """Turns that come and go, into the row of another too; a last step that is cut, contexts that come back: as step by step."""
    traffic = traffic_of(TALK)
    _, wanted, eager = drafted(
        weights, traffic, 3.0, rows=rows
    )  # all drafts are accepted: turns of six and five tokens are cut
    _, got, replay = drafted(weights, traffic, 3.0, captured=True, rows=rows)
    assert {1, 2, 3} == set(replay.how.accepted)
    assert got == wanted and sorted(replay.how.accepted) == sorted(eager.how.accepted)
    plain = {}
    for captured in (False, True):
        told, clock = list[int](), Costs()
        cache = DecodeCache(
            weights.card, max_requests=rows, max_context=traffic.context, dtype=weights.dtype, padding=captured
        )
        runs = Dispatcher(weights, cache, SingleRank(), auto=ReferenceOperators(weights.card))
        how = (lambda own, told=told: CapturedPlainSteps(own, served_here(weights, told))) if captured else PlainSteps
        made = Replay(Counting(runs, clock), traffic, rows=rows, clock=clock, steps=how)  # type: ignore[arg-type]
        plain[captured] = put_out(made)
        list(made.run())
        assert not captured or sum(told) == 22 - 5
    assert plain[True] == plain[False]


def test_what_a_step_did_not_accept_cannot_be_cut(weights: RankWeights) -> None:
    cache = DecodeCache(weights.card, max_requests=1, max_context=9, max_verify=4, dtype=weights.dtype)
    slot = cache.add()
    cache.begin([slot], 4)
    with pytest.raises(InputError, match="unaccepted step"):
        cache.cut(slot, 1)
    cache.accept([slot], [3])
    cache.cut(slot, 2)
    assert (cache.length(slot), int(cache.context[slot]), int(cache.snapshot[slot])) == (1, 1, 0)
    for tokens in (1, -1):
        with pytest.raises(InputError, match="cannot be cut from a step of 1"):
            cache.cut(slot, tokens)


def test_made_up_traffic_is_the_seeds(tmp_path: Path) -> None:
    shape = Shape(sessions=40)
    one = synthetic(shape, 1)
    assert one == synthetic(shape, 1) and one.digest != synthetic(shape, 2).digest
    assert all(session.context <= shape.context and session.turns[0].pause_s == 0 for session in one.sessions)
    assert all("synthetic" in session.name for session in one.sessions)
    turns = [turn for session in one.sessions for turn in session.turns]
    assert 4 <= len(turns) / 40 <= 9
    assert 500 <= percentile([turn.prompt for turn in turns], 0.5) <= 1200  # type: ignore[operator]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(session.to_json()) for session in one.sessions))
    assert read_traffic(path) == one


GOOD = {"session": "a", "turns": [{"prompt": 1, "output": 1}]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {**GOOD, "turns": [{"pause_s": -1, "prompt": 1, "output": 1}]},
            "line 1, turn 0: pause_s is -1, must be seconds",
        ),
        ({**GOOD, "turns": [{"pause_s": float("nan"), "prompt": 1, "output": 1}]}, "pause_s is nan"),
        ({**GOOD, "turns": [{"prompt": 0, "output": 1}]}, "prompt is 0, must be a whole number of tokens"),
        ({**GOOD, "turns": [{"prompt": 1, "output": True}]}, "output is True"),
        ({**GOOD, "turns": [{"prompt": 1}]}, "turn 0 lacks output"),
        ({**GOOD, "turns": []}, "turns is no list of turns"),
        ({**GOOD, "pauses": 1}, "a field 'pauses' that is unknown"),
        ({**GOOD, "turns": [{"prompt": 10**4000, "output": 1}]}, "prompt is 10{21}, must be"),
        ({**GOOD, "x" * 5000: 1}, "a field 'x{100}' that is unknown"),
        ({**GOOD, "session": 3}, "session is 3, must be a name"),
        ({**GOOD, "start_s": "1"}, "start_s is '1'"),
        ({**GOOD, "system": {"name": "x"}}, "system lacks tokens"),
        ([], "line 1 is no object"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(InputError, match=words):
        read_traffic(path)


def test_sessions_that_contradict_each_other_are_refused(weights: RankWeights) -> None:
    with pytest.raises(InputError, match="'a' is there twice"):
        traffic_of([session("a", (0.0, 1, 1))] * 2)
    with pytest.raises(InputError, match="system 's' has 4 tokens, before 3"):
        traffic_of([session("a", (0.0, 1, 1), system=3), session("b", (0.0, 1, 1), system=4)])
    with pytest.raises(InputError, match="without a session"):
        traffic_of([])
    with pytest.raises(InputError, match="grows to 12 tokens; the cache has room for 8"):
        Replay(dispatcher(weights, ReferenceOperators(weights.card), 8), traffic_of([session("a", (0.0, 6, 6))]), rows=1, clock=Costs())  # fmt: skip
    for wrong in (Shape(sessions=0), Shape(sigma=-1.0), Shape(pause_s=-1.0), Shape(system_tokens=70_000)):
        with pytest.raises(InputError):
            synthetic(wrong, 0)


def test_pauses_are_passed_over_and_counted() -> None:
    clock = WallClock()
    time.sleep(0.05)
    assert clock.now() < 0.04  # it begins where it is first asked
    clock.pass_until(1000.0)
    assert 1000 <= clock.now() < 1010
    clock.pass_until(5.0)
    assert clock.now() >= 1000
    real = WallClock(real_pauses=True)
    real.pass_until(0.05)
    assert 0.05 <= real.now() < 5


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 0.5) is None and percentile([3.0], 0.9) == 3
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5 and percentile([0.0, 10.0], 0.9) == pytest.approx(9)
