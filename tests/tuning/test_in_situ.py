"""The layer has the last word: one replacement at a time, beyond the noise, and checked again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from k3lab.kernels import InputError
from k3lab.tuning.in_situ import Candidate, Layer, robust, try_in_layer


def candidate(name: str, us: float) -> Candidate:
    return Candidate(name, {"n": name}, us)


A = [candidate("a0", 10.0), candidate("a1", 10.4), candidate("a2", 11.0), candidate("a3", 11.1)]
B = [candidate("b0", 5.0), candidate("b1", 5.2)]
CHOSEN = {"a": A[0], "b": B[0]}


class Rig:
    """A made-up layer: what each part takes in it, drift, noise, and what was captured."""

    def __init__(self, inside: Mapping[str, float], noise: float = 0.0005, drift: float = 0.0) -> None:
        self.inside, self.noise, self.drift = dict(inside), noise, drift
        self.captured: list[dict[str, str]] = []
        self.clock = itertools.count()
        self.rng = random.Random(1)

    def capture(self, layer: Layer) -> Callable[[], float]:
        names = {place: one.engine for place, one in layer.items()}
        self.captured.append(names)

        def replay() -> float:
            us = sum(self.inside[name] for name in names.values())
            return us * (1 + self.drift * next(self.clock)) * self.rng.gauss(1, self.noise)

        return replay


INSIDE = {"a0": 10.0, "a1": 8.5, "a2": 9.0, "a3": 1.0, "b0": 5.0, "b1": 5.1}


def test_the_winner_of_the_layer_is_taken_and_both_numbers_are_kept() -> None:
    rig = Rig(INSIDE)
    (first, second) = try_in_layer(CHOSEN, {"a": A, "b": B}, rig.capture)
    assert (first.winner.engine, first.changed) == ("a1", True)
    assert "though 10.40 against 10.00 us alone" in first.reason
    told = first.to_json()
    assert [one["engine"] for one in told["entries"]] == ["a0", "a1", "a2"]  # three, the isolated winner first
    winner = told["entries"][1]
    assert winner["isolated_us"] == 10.4 and winner["in_situ_us"] == pytest.approx(13.5, rel=0.01)
    assert (second.winner.engine, second.changed) == ("b0", False)
    assert "no other is ahead" in second.reason


def test_the_best_of_another_engine_is_tried_however_many_are_faster_alone() -> None:
    own = [Candidate("a0", {"n": n}, 10.0 + n) for n in range(3)]
    rig = Rig({**INSIDE, "a3": 8.0, "a3x": 9.0})
    (verdict,) = try_in_layer(
        {"a": own[0], "b": B[0]}, {"a": [*own, candidate("a3", 20.0), candidate("a3x", 21.0)]}, rig.capture
    )
    assert [one.engine for one in verdict.entries] == ["a0", "a3", "a3x"] and verdict.winner.engine == "a3"
    (verdict,) = try_in_layer({"a": own[0], "b": B[0]}, {"a": [*own, candidate("a3", 20.0)]}, rig.capture)
    assert [one.isolated_us for one in verdict.entries] == [10.0, 20.0, 11.0]


def test_one_replacement_at_a_time_and_what_changed_stays() -> None:
    rig = Rig(INSIDE)
    try_in_layer(CHOSEN, {"a": A, "b": B}, rig.capture)
    assert rig.captured == [
        {"a": "a0", "b": "b0"}, {"a": "a1", "b": "b0"}, {"a": "a2", "b": "b0"}, {"a": "a1", "b": "b0"}, {"a": "a1", "b": "b1"},
    ]  # fmt: skip


def test_a_difference_inside_the_noise_changes_nothing() -> None:
    rig = Rig({**INSIDE, "a1": 9.9, "a2": 9.95}, noise=0.02)
    (verdict,) = try_in_layer(CHOSEN, {"a": A}, rig.capture)
    assert not verdict.changed and "stays" in verdict.reason


def test_drift_hits_all_alike() -> None:
    """Clocks fall by a fifth of a percent with every series: who is timed first must not win by it."""
    rig = Rig({**INSIDE, "a1": 10.0, "a2": 10.0}, noise=0.0, drift=0.002)
    (verdict,) = try_in_layer(CHOSEN, {"a": A}, rig.capture)
    medians = [one.us for one in verdict.entries]
    assert max(medians) / min(medians) < 1.006
    assert not verdict.changed


def test_a_candidate_that_fails_is_out_and_says_why() -> None:
    rig = Rig(INSIDE)

    def capture(layer: Layer) -> Callable[[], float]:
        if layer["a"].engine == "a1":
            raise RuntimeError("no room on the SM")
        replay = rig.capture(layer)
        if layer["a"].engine == "a2":

            def broken() -> float:
                raise RuntimeError("a wait gave up")

            return broken
        return replay

    (verdict,) = try_in_layer(CHOSEN, {"a": A}, capture)
    assert not verdict.changed
    told: list[dict[str, Any]] = verdict.to_json()["entries"]
    assert [one["failed"] for one in told] == ["", "RuntimeError: no room on the SM", "RuntimeError: a wait gave up"]
    assert [one["in_situ_us"] is None for one in told] == [False, True, True]


def test_a_winner_that_is_wrong_after_timing_gives_way_to_the_next() -> None:
    rig = Rig(INSIDE)
    asked: list[str] = []

    def check(layer: Layer) -> str:
        asked.append(layer["a"].engine)
        return "rows differ" if layer["a"].engine == "a1" else ""

    (verdict,) = try_in_layer(CHOSEN, {"a": A}, rig.capture, check)
    assert asked == ["a1", "a2"] and verdict.winner.engine == "a2"
    assert verdict.entries[1].failed == "wrong after timing: rows differ"
    with pytest.raises(InputError, match="the layer is wrong with what a has now"):
        try_in_layer(CHOSEN, {"a": A[:1]}, rig.capture, lambda layer: "all of it")


def test_what_does_not_belong_together_is_refused() -> None:
    rig = Rig(INSIDE)
    with pytest.raises(InputError, match="has no tuned c; it has a, b"):
        try_in_layer(CHOSEN, {"c": B}, rig.capture)
    with pytest.raises(InputError, match="isolated winner of a is not among"):
        try_in_layer(CHOSEN, {"a": A[1:]}, rig.capture)

    def never(layer: Layer) -> Callable[[], float]:
        raise RuntimeError("out of memory")

    with pytest.raises(InputError, match="does not run with what a has now: RuntimeError: out of memory"):
        try_in_layer(CHOSEN, {"a": A}, never)


def test_a_config_holds_over_the_routing_profiles() -> None:
    times = {
        "uniform": {"x": (10.0, 0.01), "y": (10.5, 0.01), "z": (10.05, 0.01)},
        "hot": {"x": (8.0, 0.01), "y": (5.1, 0.01), "z": (5.3, 0.01)},
    }
    chosen, loss = robust(times)
    assert (chosen, loss) == ("z", pytest.approx(5.3 / 5.1 - 1))
    assert robust({"uniform": times["uniform"]})[0] == "x"
    near = {"uniform": {"x": (10.0, 0.02), "y": (10.1, 0.02)}, "hot": {"x": (5.05, 0.02), "y": (5.0, 0.02)}}
    assert robust(near) == ("x", 0.0)  # both hold within the noise: the least sum
    with pytest.raises(InputError, match="under every routing profile"):
        robust({"uniform": {"x": (1.0, 0.01)}, "hot": {"y": (1.0, 0.01)}})
    with pytest.raises(InputError, match="under every routing profile"):
        robust({})
