"""What parameters did: shares of the spread of times, and slices."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from k3lab.tuning.effects import importance, slices


def trials(formula, repeats: int = 1) -> list:
    grid = itertools.product((1, 2, 4), ("x", "y"), range(repeats))
    return [({"a": a, "b": b}, formula(a, b)) for a, b, _ in grid]


def test_one_parameter_decides_all() -> None:
    shares = importance(trials(lambda a, b: 10.0 * a))
    assert shares == {"a": pytest.approx(1.0), "b": 0.0}
    assert list(importance(trials(lambda a, b: 20.0 if b == "x" else 10.0))) == ["b", "a"]


def test_two_parameters_that_multiply_share_by_their_spread() -> None:
    shares = importance(trials(lambda a, b: a * (3.0 if b == "x" else 1.0), repeats=50))
    a = sum((math.log(v) - math.log(2)) ** 2 for v in (1, 2, 4)) / 3
    b = (math.log(3) / 2) ** 2
    assert shares["a"] == pytest.approx(a / (a + b), rel=0.03)
    assert shares["b"] == pytest.approx(b / (a + b), rel=0.03)


def test_chance_is_no_importance() -> None:
    draw = random.Random(0)
    noisy = [({"a": draw.randrange(8), "b": draw.randrange(2)}, math.exp(draw.gauss(0, 0.1))) for _ in range(400)]
    assert max(importance(noisy).values()) < 0.03
    many = [
        ({"a": i // 2}, math.exp(draw.gauss(0, 0.1))) for i in range(40)
    ]  # twenty values: half the spread by count alone
    assert importance(many)["a"] < 0.35


def test_too_little_says_nothing() -> None:
    assert importance([]) == {}
    assert importance([({"a": 1}, 1.0), ({"a": 2}, 2.0)]) == {}
    assert importance([({"a": i}, float(i + 1)) for i in range(5)]) == {"a": 0.0}  # a value a trial: nothing repeats
    assert importance([({"a": i % 2}, 1.0) for i in range(5)]) == {"a": 0.0}


def test_slices_are_in_order_with_all_their_times() -> None:
    found = slices([({"n": 16}, 3.0), ({"n": 2}, 5.0), ({"n": 16}, 4.0)])["n"]
    assert [(part.value, part.times_us, part.best_us, part.median_us) for part in found] == [
        (2, (5.0,), 5.0, 5.0),
        (16, (3.0, 4.0), 3.0, 3.5),
    ]
