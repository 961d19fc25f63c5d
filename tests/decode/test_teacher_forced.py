"""Schedules of given tokens, and the drift of the backends that run here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.judged_routes import Routes
from k3lab.decode.operators import Operators, ReferenceOperators
from k3lab.decode.random_weights import random_weights
from k3lab.decode.teacher_forced import Follower, bits, drift, schedule, widened
from k3lab.decode.weights import RankWeights
from k3lab.kernels import InputError, ModelCard
from k3lab.kernels.collectives import SingleRank

SIZES = {"requests": 4, "context": 24, "max_verify": 4}
FEW = {"requests": 2, "context": 24, "max_verify": 3}


@pytest.fixture(scope="module")
def rounded(tiny: ModelCard) -> RankWeights:
    return random_weights(tiny, seed=3, dtype=torch.bfloat16)


def follower(weights: RankWeights, operators: Operators, **more: Any) -> Follower:
    return Follower(weights, operators, SingleRank(), block_size=4, **FEW, **more)


def test_a_schedule_has_all_that_happens_to_a_server() -> None:
    made = schedule(vocabulary=50, steps=400, **SIZES)
    assert made == schedule(vocabulary=50, steps=400, **SIZES) != schedule(vocabulary=50, steps=400, seed=1, **SIZES)
    lengths: dict[int, int] = {}
    for one in made:
        for request in one.leave:
            del lengths[request]
        for request in one.join:
            assert request not in lengths
            lengths[request] = 0
        width = len(one.tokens[0])
        assert {len(row) for row in one.tokens} == {width}
        assert set(one.requests) <= set(lengths)
        assert len(set(one.requests)) == len(one.requests) <= 4
        for request, count in zip(one.requests, one.accept, strict=True):
            assert 1 <= count <= width
            assert lengths[request] + width <= 24
            lengths[request] += count
        assert all(0 <= token < 50 for row in one.tokens for token in row)
    widths = [len(one.tokens[0]) for one in made]
    assert set(widths) == {1, 2, 3, 4}
    assert 0.5 < widths.count(1) / 400 < 0.8
    assert any(count < len(one.tokens[0]) for one in made for count in one.accept)
    assert len({len(one.requests) for one in made}) == 4
    assert sum(map(len, (one.leave for one in made))) > 10
    for wrong in ({"requests": 0}, {"context": 7}, {"max_verify": 9}):
        with pytest.raises(InputError, match="no schedule of"):
            schedule(vocabulary=50, steps=3, **{**SIZES, **wrong})


def test_auto_drifts_no_more_than_the_twins_in_the_same_dtype(tiny: ModelCard, rounded: RankWeights) -> None:
    steps = schedule(vocabulary=tiny.vocab_size, steps=14, **FEW)
    judge = widened(rounded)
    assert judge.dtype == judge.layers[0].attention.core.a_log.dtype == torch.float64
    assert judge.layers[1].mlp.experts.w1.dtype == torch.uint8
    assert (judge.card, judge.tp) == (tiny, 1)
    assert torch.equal(judge.lm_head.bfloat16(), rounded.lm_head)
    auto = AutoOperators(tiny, dtype=torch.bfloat16, device="cpu")
    exact = AutoOperators(tiny, dtype=torch.float64, device="cpu")
    own = ReferenceOperators(tiny)
    got = drift(
        follower(judge, own),
        [follower(rounded, own), follower(rounded, auto), follower(judge, exact)],
        steps,
        tolerance=0.2,
    )
    twins, stock, same = got
    assert len(stock.logits) == 14
    assert 1e-4 < twins.mean < 1
    # both round to BF16 at much the same places: neither drifts further than the other does
    assert stock.mean < 1.25 * twins.mean
    assert stock.states < 1.25 * twins.states
    assert max(same.logits) < 1e-9
    assert same.states < 1e-9
    assert same.clear > 5
    assert same.agreement == 1.0


def test_steps_that_are_filled_up_are_those_that_are_not(tiny: ModelCard, rounded: RankWeights) -> None:
    steps = schedule(vocabulary=tiny.vocab_size, steps=8, seed=1, **FEW)
    forms = {(len(one.requests), len(one.tokens[0])) for one in steps}
    assert {(1, 1), (2, 1)} < forms and any(width > 1 for _, width in forms), forms
    exact, asked = AutoOperators(tiny, dtype=torch.float64, device="cpu"), list[int]()

    class Verifying(AutoOperators):
        def kda(self, proj: torch.Tensor, attention: Any, states: Any, q_len: int) -> torch.Tensor:
            asked.append(proj.shape[0] // q_len)
            assert q_len > 1
            return super().kda(proj, attention, states, q_len)

    verify = Verifying(tiny, dtype=torch.float64, device="cpu")
    judge = widened(rounded)
    (filled,) = drift(
        follower(judge, exact), [follower(judge, exact, sizes=[2], verify={2: verify, 3: verify})], steps, tolerance=0.2
    )
    # one request in a step made for two: the padding slot stands in for the other
    assert set(asked) == {2}
    assert max(filled.logits) < 1e-9
    assert filled.states < 1e-9


def test_a_follower_that_is_led_goes_on_with_the_judges_experts(tiny: ModelCard, rounded: RankWeights) -> None:
    steps = schedule(vocabulary=tiny.vocab_size, steps=6, **FEW)
    judge = widened(rounded)
    routes, own = Routes(judge), AutoOperators(tiny, dtype=torch.float64, device="cpu")

    class Astray(AutoOperators):
        def router(self, x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            ids, weights, latent = super().router(x, *more)
            ids[0] = (ids[0] + 1) % tiny.num_experts  # the first row of every step and layer
            return ids.flip(-1), weights.flip(-1), latent

    astray = routes.led(Astray(tiny, dtype=torch.float64, device="cpu"))
    sound = routes.led(own)
    led, same = drift(
        follower(judge, routes.judging(own)),
        [follower(judge, astray, sizes=[2]), follower(judge, sound, sizes=[2])],
        steps,
        tolerance=0.2,
    )
    assert max(*led.logits, *same.logits, led.states, same.states) < 1e-9
    rows = [len(one.requests) * len(one.tokens[0]) for one in steps]
    assert astray.routed == sound.routed == routes.layers * sum(rows)
    assert astray.otherwise == routes.layers * len(steps) and sound.otherwise == 0
    # not led, they are another model's
    (free,) = drift(follower(judge, own), [follower(judge, astray._operators)], steps, tolerance=0.2)
    assert min(free.logits) > 1e-3


def test_agreement_counts_clear_rows_alone(tiny: ModelCard, rounded: RankWeights) -> None:
    steps = schedule(vocabulary=tiny.vocab_size, steps=3, **FEW)
    judge, own = widened(rounded), ReferenceOperators(tiny)

    class Turned(ReferenceOperators):
        def lm_head(self, h: torch.Tensor, w: torch.Tensor, comm: SingleRank) -> torch.Tensor:  # type: ignore[override]
            return super().lm_head(h, w, comm).roll(1, dims=-1)

    rows = sum(len(one.requests) * len(one.tokens[0]) for one in steps)
    turned, same = drift(
        follower(judge, own), [follower(judge, Turned(tiny)), follower(judge, own)], steps, tolerance=0.0
    )
    assert (turned.clear, turned.agreed, turned.agreement) == (rows, 0, 0.0)
    assert (same.agreed, same.states) == (rows, 0.0)
    (none,) = drift(follower(judge, own), [follower(judge, own)], steps, tolerance=1e9)
    assert (none.clear, none.agreement) == (0, 1.0)


def test_a_repeated_run_has_the_same_bits(tiny: ModelCard, rounded: RankWeights) -> None:
    steps = schedule(vocabulary=tiny.vocab_size, steps=4, **FEW)
    auto = AutoOperators(tiny, dtype=torch.bfloat16, device="cpu")
    one, again = (list(bits(follower(rounded, auto), steps)) for _ in range(2))
    assert one == again
    other = list(
        bits(
            follower(rounded, auto),
            [replace(steps[0], tokens=tuple((7,) * len(row) for row in steps[0].tokens)), *steps[1:]],
        )
    )
    assert one != other
    assert len(one[0]) == len(steps[0].requests) * len(steps[0].tokens[0]) * tiny.vocab_size * 2
