"""Layers of an eager run with ranges, lent to a graph replay without: launch orders that differ in places."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from conftest import host, kernel, write_torch
from hypothesis import given
from hypothesis import strategies as st
from k3lab.cli.main import run
from k3lab.traces import TraceError, check_trace, inspect_trace
from k3lab.traces.alignment import common
from k3lab.traces.layers import LENT

KERNELS = [[f"l{layer}_k{index}<int>" for index in range(3 + layer)] for layer in range(4)]
"""Of layers that have nothing in common: nothing recurs."""


def eager(path, kernels=KERNELS, steps=2):
    events, clock, number = [], 1000.0, 100
    for step in range(steps):
        begun = clock
        for layer, names in enumerate([["embed"], *kernels, ["head"]]):
            start = clock
            for name in names:
                number += 1
                events += [host("cuda_runtime", "cudaLaunchKernel", clock, 1.0, correlation=number),
                           kernel(name, clock + 3, 5.0, correlation=number)]  # fmt: skip
                clock += 10
            if 0 < layer <= len(kernels):
                events.append(host("user_annotation", f"layer_{layer - 1}", start - 1, clock - start))
        events.append(host("user_annotation", f"step[DECODE bs=1] {step}", begun - 2, clock - begun + 4))
        clock += 50
    return write_torch(path, events)


def graph(path, kernels=KERNELS, steps=3):
    events, clock = [], 1000.0
    for step in range(steps):
        events.append(host("cuda_runtime", "cudaGraphLaunch", clock - 20, 8.0, correlation=10 + step))
        for name in ["embed", *(name for layer in kernels for name in layer), "head"]:
            events.append(kernel(name, clock, 5.0, correlation=10 + step))
            clock += 5
        clock += 50
    return write_torch(path, events)


def test_a_graph_without_marks_has_the_layers_of_the_eager_run(tmp_path):
    plain = graph(tmp_path / "g.json")
    assert len(inspect_trace(plain).devices[0].layers.layers) != 4
    (device,) = inspect_trace(plain, layers_from=eager(tmp_path / "e.json")).to_json()["devices"]
    assert device["split"]["method"] == LENT
    assert [(layer["number"], layer["name"], layer["kernels"]) for layer in device["layers"]] == [
        (0, "layer_0", 3), (1, "layer_1", 4), (2, "layer_2", 5), (3, "layer_3", 6),
    ]  # fmt: skip
    assert (device["split"]["prefix"], device["split"]["suffix"]) == (1, 1)


def test_fused_and_additional_kernels_are_places_where_the_orders_differ(tmp_path):
    ours = [list(names) for names in KERNELS]
    ours[1][1:3] = ["fused"]  # in place of two
    ours[2].insert(0, "cast")  # before the first kernel of a layer: counted in it
    ours[3][-1] = "l3_k5<float>"  # another instance of a template
    (device,) = inspect_trace(graph(tmp_path / "g.json", ours), layers_from=eager(tmp_path / "e.json")).to_json()[
        "devices"
    ]
    assert [layer["kernels"] for layer in device["layers"]] == [3, 3, 6, 6]


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ([KERNELS[0], KERNELS[2], KERNELS[3]], "nothing of layer_1 is in this trace"),
        ([[f"other{index}" for index in range(18)]], "less than half of the kernels are in both launch orders"),
    ],
)
def test_layers_that_do_not_fit_are_no_layers(tmp_path, kernels, says):
    report = check_trace(graph(tmp_path / "g.json", kernels), "gb300-tp16", layers_from=eager(tmp_path / "e.json"))
    assert report.verdict == "inconclusive"
    assert any(says in reason for reason in report.reasons)


def test_another_number_of_layers_is_not_accepted(tmp_path):
    report = inspect_trace(graph(tmp_path / "g.json"), layers_from=eager(tmp_path / "e.json"), layers=5)
    assert report.devices[0].layers.abstained.reason.endswith("e.json has 4 layers, not 5")


def test_own_marks_come_first(tmp_path):
    other = eager(tmp_path / "o.json", [["a", "b", "c"], ["d", "e", "f"]])
    report = inspect_trace(eager(tmp_path / "e.json"), layers_from=other)
    assert len(report.devices[0].layers.layers) == 4
    assert report.devices[0].layers.method != LENT


def test_a_trace_without_marks_has_nothing_to_lend(tmp_path, capsys):
    plain = graph(tmp_path / "g.json")
    with pytest.raises(TraceError, match="its layers are not under ranges"):
        inspect_trace(plain, layers_from=plain)
    assert run(["trace", "show", str(plain), "--layers-from", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert run(["trace", "show", str(plain), "--layers-from", str(eager(tmp_path / "e.json"))]) == 0
    assert LENT in capsys.readouterr().out.replace("\n", " ")


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_common_is_a_longest_common_subsequence(one, other):
    found = common(one, other)
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, first in enumerate(one):
        for j, second in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if first == second else max(table[i][j + 1], table[i + 1][j])
    assert len(found) == table[-1][-1]
    assert all(one[a] == other[b] for a, b in found)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))


def test_what_differs_in_too_much_is_given_up():
    rng = random.Random(3)
    one, other = ([rng.random() for _ in range(1500)] for _ in range(2))
    assert common(one, other) is None
