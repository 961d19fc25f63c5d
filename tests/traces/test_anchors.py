"""Layers cut where our projections begin them, and at places like them."""

from __future__ import annotations

import pytest
from k3lab.traces.anchors import agree, cut_at_anchors, our_anchors

NORM = ["square", "mean", "rsqrt", "scale"]
OURS = "k3_attention_projection_triton_splitk"


def layer(attention, mlp="experts", projection=OURS):
    return [projection, *(f"{attention}{i}" for i in range(6)), "o", *NORM, *(f"{mlp}{i}" for i in range(12)), *NORM]


def sizes(spans):
    return [end - start for start, end in spans]


def test_a_projection_of_two_launches_is_one_anchor():
    names = [OURS, "k3_attention_projection_triton_reduce", "x", "y", "z", f"void {OURS}<int>(float*)", "a"]
    assert our_anchors(names) == [0, 5]
    assert our_anchors(["xk3_attention_projection_a", "k3_attention_projectionist", "k3_kda_triton_x"]) == []


def test_layers_with_a_stock_projection_begin_where_ours_would():
    dense = layer("kda", "dense")[:20]
    dense = [*dense[:-4], *NORM]
    step = ["embed", "cast", *dense, *layer("kda"), *layer("mla", projection="gemm"), *layer("kda"),
            *layer("mla", projection="gemm"), "head", "sample"]  # fmt: skip
    found = cut_at_anchors(step, our_anchors(step))
    assert sizes(found) == [20, 28, 28, 28, 28]
    assert (found[0][0], len(step) - found[-1][1]) == (2, 2)
    assert cut_at_anchors(step, our_anchors(step), layers=5) == found
    assert cut_at_anchors(step, our_anchors(step), layers=4) is None


def test_projections_of_ours_in_every_fourth_layer_do_not_make_four_layers_one():
    quad = [*layer("kda", projection="gemm") * 3, *layer("mla")]
    step = [*NORM, *quad * 3, "head"]
    assert sizes(cut_at_anchors(step, our_anchors(step))) == [28] * 12


def test_a_missing_projection_is_no_layer_of_double_length():
    step = [part for index in range(6) for part in layer("kda", projection="other" if index == 3 else OURS)]
    step = [f"{part}_last" if part == "scale" and 100 <= index <= 112 else part for index, part in enumerate(step)]
    found = cut_at_anchors(step, our_anchors(step))
    assert found is None or sizes(found) == [28] * 6


@pytest.mark.parametrize("count", [0, 1])
def test_one_anchor_tells_nothing(count):
    step = layer("kda") * count + ["x"] * 40
    assert cut_at_anchors(step, our_anchors(step)) is None


def test_anchors_that_do_not_fit_a_split():
    assert agree(((2, 10), (10, 18), (18, 26)), [3, 11])
    assert agree(((2, 10), (10, 18)), [])
    assert not agree(((2, 10), (10, 18)), [3, 12])  # not at the same place
    assert not agree(((2, 10), (10, 18)), [3, 5])  # two in one layer
    assert not agree(((2, 10), (10, 18)), [1, 11])  # before the first layer
