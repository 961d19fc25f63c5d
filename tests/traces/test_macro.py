"""The macro period of classes of layers."""

from __future__ import annotations

import pytest
from k3lab.traces import inspect_trace, synthesize
from k3lab.traces.macro import Macro, broken_at, macro_period

KERNELS = {"A": 13, "B": 15, "C": 9, "D": 20}


def macro(text: str) -> Macro | None:
    return macro_period(tuple(text), [KERNELS[letter] for letter in text])


@pytest.mark.parametrize(
    ("layers", "classes", "first", "times", "kernels"),
    [
        ("A" * 36, "A", 0, 36, 13),
        ("AAAB" * 3, "AAAB", 0, 3, 54),
        ("AB" * 18, "AB", 0, 18, 28),
        ("CAAB" + "AAAB" * 22 + "D", "AAAB", 4, 22, 54),  # a dense first layer and a last one that differs
        ("C" + "AAAB" * 5, "BAAA", 4, 4, 54),
    ],
)
def test_the_shortest_turn_that_covers_most(layers, classes, first, times, kernels):
    assert macro(layers) == Macro(tuple(classes), first, times, kernels)


@pytest.mark.parametrize("layers", ["", "A", "AB", "ABCD", "ABBACD", "AAAABAAAAAA"])
def test_none_where_nothing_recurs(layers):
    assert macro(layers) is None


def test_the_report_tells_it(tmp_path):
    (device,) = inspect_trace(synthesize(tmp_path / "t.json")).to_json()["devices"]
    assert device["split"]["macro_period"] == {
        "layers": 4,
        "classes": ["A", "A", "A", "B"],
        "first": 0,
        "times": 3,
        "kernels": 54,
    }


@pytest.mark.parametrize(
    "whole", ["AAAB" * 6, "CAAB" + "AAAB" * 22 + "D", "AB" * 10, "A" * 36, "CCC" + "A" * 30, "AABAACA", ""]
)
def test_layers_in_turn_keep_it(whole):
    assert broken_at(whole) is None


@pytest.mark.parametrize("lost", range(4, 91))
def test_a_lost_layer_breaks_the_turn(lost):
    whole = "CAAB" + "AAAB" * 22 + "A"
    broken = broken_at(whole[:lost] + whole[lost + 1 :])
    assert broken is not None
    assert abs(broken - lost) <= 4
