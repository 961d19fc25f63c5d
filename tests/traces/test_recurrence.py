"""Layers from the sequence alone: macro periods, differing first and last layers, and abstaining."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k3lab.traces.layers import classify
from k3lab.traces.recurrence import Abstain, Split, find_layers

KDA = [("proj", 245), ("kda", 31), ("oproj", 112)]
MLA = [("proj", 180), ("query", 8), ("core", 9), ("value", 4), ("oproj_p", 112), ("oproj_c", 7)]
MOE = [("gate_up", 62), ("situ", 7), ("down", 62), ("front", 30), ("route", 16), ("experts", 148), ("tail", 98),
       ("attn_res", 7), ("prefetch_a", 7), ("prefetch_b", 7)]  # fmt: skip
DENSE = [("dense_up", 66), ("dense_situ", 7), ("dense_down", 62), ("all_reduce", 8), ("attn_res", 7)]


def k3(layers, prefix=(("embed", 1), ("attn_res", 7)), suffix=(("norm", 1), ("head", 100), ("argmax", 1))):
    """K3's layers: dense first, MLA every fourth and last; projections of the two kinds differ in their grid."""
    kinds = [MLA if index % 4 == 3 or index == layers - 1 else KDA for index in range(layers)]
    parts = [kind + (DENSE if index == 0 else MOE) for index, kind in enumerate(kinds)]
    return [*prefix, *(token for part in parts for token in part), *suffix], [len(part) for part in parts]


def sizes(split):
    assert isinstance(split, Split), split
    return [end - start for start, end in split.layers]


@pytest.mark.parametrize("layers", [8, 12, 24, 93])
def test_k3_layers_with_a_dense_first_and_two_mla_at_the_end(layers):
    tokens, expected = k3(layers)
    split = find_layers(tokens)
    assert sizes(split) == expected
    assert split.layers[0][0] + len(tokens) - split.layers[-1][1] + sum(expected) == len(tokens)
    assert find_layers(tokens, layers) == split


def test_another_number_of_layers_is_not_accepted():
    tokens, _ = k3(12)
    found = find_layers(tokens, 13)
    assert isinstance(found, Abstain)
    assert "13 layers" in found.reason
    assert (12, 13) in found.candidates


def test_macro_period_of_two_kinds_is_two_layers_each():
    """17 kernels with sliding and 18 with full attention in turn; the first layer lacks its norm."""
    sliding = [("norm", 1), ("qkv", 2), ("rope", 3), ("cache", 4), ("slide", 5), ("o", 6), ("ar", 7), ("norm", 1),
               *((f"moe{index}", 9) for index in range(8)), ("ar", 7)]  # fmt: skip
    full = [*sliding[:4], ("full", 5), ("merge", 5), *sliding[5:]]
    tokens = [("embed", 0), *sliding[1:], *full, *(sliding + full) * 11, ("norm", 1), ("head", 3)]
    split = find_layers(tokens)
    assert sizes(split) == [17, 18] * 12
    groups = classify([tuple(name for name, _ in tokens[a:b]) for a, b in split.layers])
    assert [len(group.members) for group in groups] == [12, 12]


def test_names_that_recur_inside_a_layer_do_not_cut_it():
    layer = ["norm", "gemm", "copy", "norm", "copy", "norm", "rope", "store", "attn", "reduce", "gemm", "norm", "gemm",
             "act", "gemm"]  # fmt: skip
    tokens = ["gather", *layer * 36, "norm", "gemm", "argmax"]
    split = find_layers(tokens)
    assert sizes(split) == [15] * 36
    assert split.layers[0][0] == 1


@pytest.mark.parametrize("change", ["extra", "missing"])
@pytest.mark.parametrize("which", [0, 5, 11])
def test_one_layer_with_a_kernel_more_or_less(change, which):
    base = [f"k{index}" for index in range(13)]
    layers = [list(base) for _ in range(12)]
    if change == "extra":
        layers[which].insert(6, "extra")
    else:
        del layers[which][6]
    tokens = ["embed", *(token for layer in layers for token in layer), "head"]
    assert sizes(find_layers(tokens)) == [len(layer) for layer in layers]
    groups = classify([tuple(layer) for layer in layers])
    assert [group.sequence for group in groups] == [tuple(base)]


def test_noise_abstains():
    rng = random.Random(1)
    tokens = [rng.choice("abcdefghij") for _ in range(400)]
    assert isinstance(find_layers(tokens), Abstain)


@pytest.mark.parametrize("tokens", [[], ["a"], ["a"] * 50, ["a", "b"] * 200, list("abcd") * 2, list("abcdefg")])
def test_what_is_no_layer_abstains(tokens):
    assert isinstance(find_layers(tokens), Abstain)


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 16), st.integers(3, 20), st.integers(0, 4), st.integers(0, 4))
def test_any_clean_recurrence_is_found_exactly(kernels, layers, before, after):
    layer = [f"k{index}" for index in range(kernels)]
    tokens = [f"p{index}" for index in range(before)] + layer * layers + [f"s{index}" for index in range(after)]
    found = find_layers(tokens)
    if isinstance(found, Split):
        assert found.layers == tuple((before + kernels * i, before + kernels * (i + 1)) for i in range(layers))
    else:
        assert kernels * layers < 0.7 * len(tokens)


def test_two_unlike_halves_are_one_layer():
    """Norms, casts and all-reduces occur in both halves; that alone does not make a half a layer."""
    attention = ["norm", "cast", "qkv", "rope", "attn", "cast_o", "o", "all_reduce", "add"]
    mlp = ["norm", "cast", "gate_up", "act", "down", "all_reduce", "add"]
    split = find_layers(["embed", *(attention + mlp) * 12, "head"])
    assert sizes(split) == [16] * 12
