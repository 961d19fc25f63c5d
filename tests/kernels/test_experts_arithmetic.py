"""The experts' kernel itself, run on the CPU by :mod:`experts_on_threads`: against the twin, each weight read once, launch after launch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.experts.cute_engine import INPUTS, buffers
from k3lab.kernels.experts.layout import LOADED, SHARED
from k3lab.kernels.experts.plan import Plan

from .experts_case import LARGE, exact_inputs, exact_outputs
from .experts_on_threads import Machine, Memory, Word, e4m3, to_float

FAMILY = family("experts")
SMALL = {"latent": 128, "intermediate": 32, "hidden": 128, "shared_intermediate": 32, "experts": 6, "top_k": 2}
CASES = {
    "three rows": ({"rows": 3}, {}, 3),
    "fewer rows than compiled for, one block": ({"rows": 5}, {"blocks": 1}, 2),
    "a block for the shared expert alone": ({"rows": 3}, {"blocks": 3, "reserved": 1}, 2),
    "two of three blocks for the shared expert alone, MXFP8": (
        {"rows": 2, "latent": 256, "kind": "mxfp8_ceil"},
        {"latent_rounding": "ceil", "hidden_rounding": "ceil", "blocks": 3, "reserved": 2},
        2,
    ),
    "eleven rows of one expert": ({"rows": 11, "top_k": 1, "experts": 2}, {"blocks": 3}, 11),
    "a ring over several units, two tasks": (
        {"rows": 2, "intermediate": 64, "shared_intermediate": 64},
        {"depth": 1, "x_depth": 1, "tasks": 2},
        2,
    ),
    "a shared expert whose last units ask for fewer steps ahead": (
        {"rows": 2, "latent": 256, "hidden": 256, "intermediate": 64},
        {"depth": 4, "x_depth": 4, "tasks": 2},
        2,
    ),
    "one row": ({"rows": 1, "intermediate": 64}, {"tasks": 2}, 1),
    "one row, MXFP8": (
        {"rows": 1, "latent": 256, "kind": "mxfp8_ceil"},
        {"latent_rounding": "ceil", "hidden_rounding": "ceil", "wide": 0},
        1,
    ),
    "one row, second products where first ones are fewer": ({"rows": 1}, {"blocks": 3, "wide": 0}, 1),
    "MXFP8 activations, both scales rounded up": (
        {"rows": 3, "latent": 256, "kind": "mxfp8_ceil"},
        {"latent_rounding": "ceil", "hidden_rounding": "ceil"},
        3,
    ),
    "MXFP8 activations, OCP scales": (
        {"rows": 6, "latent": 256, "top_k": 1, "kind": "mxfp8_floor"},
        {"latent_rounding": "floor", "hidden_rounding": "floor", "blocks": 3, "wide": 0},
        5,
    ),
    "more than 32 rows, no shared expert": ({"rows": 35, "top_k": 1, "experts": 3}, {"wide": 0}, 35),
}


def case(change, sizes):
    problem = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=1), **{**SMALL, **change})
    made = Plan(
        rows=problem.rows, top_k=problem.top_k, experts=problem.experts, latent=problem.latent, inner=problem.intermediate,
        hidden=problem.hidden, **{"warps": 2, "depth": 2, "x_depth": 2, "tasks": 1, "blocks": 2, "wide": problem.shared_intermediate, **sizes},
    )  # fmt: skip
    assert made.refusal() is None
    return problem, made


OF_ROWS = ("latent", "ids", "weights", "x")


def memory_of(problem, sizes, inputs, live=None):
    """Inputs, of live rows alone; poisoned outputs and zeroed buffers."""
    memory = Memory()
    for name, tensor in inputs.items():
        memory.add(name, (tensor[:live] if name in OF_ROWS else tensor).contiguous().view(torch.uint8).numpy().copy())
    for name, (shape, _) in FAMILY.output_specs(problem).items():
        memory.add(name, np.full(math.prod(shape), 0x7FFF, dtype=np.uint16))
    for buffer in buffers(sizes):
        zeros = np.zeros(math.prod(buffer.shape), dtype=np.int32)
        memory.add(buffer.name, zeros if buffer.persistent else np.full(len(zeros), 0x7FFF, dtype=np.int16))
    return memory


def output(memory, problem, name):
    shape = FAMILY.output_specs(problem)[name][0]
    data = memory.held[memory.names[name] >> 40].view(np.int16).reshape(shape)
    return torch.from_numpy(data.copy()).view(torch.bfloat16).float()


LONG = ("two of three blocks for the shared expert alone, MXFP8", "MXFP8 activations, both scales rounded up")
"""Seconds each on threads; the compiled kernels do the same on the tests' machine in every run."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES])
def test_the_kernel_computes_what_the_twin_does(name):
    change, sizes, live = CASES[name]
    problem, made = case(change, sizes)
    names = [*INPUTS, *(buffer.name for buffer in buffers(made))]
    inputs = FAMILY.inputs(problem, 5)
    memory = memory_of(problem, made, inputs, live)
    seeds = (5, 6) if name == "three rows" else (5,)
    for seed in seeds:  # a second launch finds what the first one left
        fresh = FAMILY.inputs(problem, seed)
        for one in ("ids", "latent"):
            memory.held[memory.names[one] >> 40][:] = fresh[one][:live].view(torch.uint8).numpy().reshape(-1)
        machine = Machine(made, memory, live)
        for count in memory.reads.values():
            count[:] = 0
        machine.run(names, problem.beta, problem.linear_beta)
        fresh = {**inputs, **{one: fresh[one] for one in ("ids", "latent")}}
        some = {
            key: value[:live] if len(value) == problem.rows and key not in (*LOADED, *SHARED) else value
            for key, value in fresh.items()
        }
        wanted = FAMILY.twin(problem, some)
        for key in FAMILY.outputs if made.wide else ("latent_partial",):
            got = output(memory, problem, key)
            tolerance = FAMILY.tolerance(problem, key)
            error = (got[:live] - wanted[key]).norm() / wanted[key].norm()
            assert error <= tolerance.relative, (key, float(error))
            assert got[live:].isnan().all(), f"{key} was written beyond its rows"
        each_weight_once(memory, problem, made, some["ids"])


def each_weight_once(memory, problem, made, ids):
    """Every word of a chosen expert is asked for once an item, the shared expert's once, the other experts' never."""
    chosen, rows = ids.unique(return_counts=True)
    items = torch.zeros(problem.experts, dtype=torch.int64)
    items[chosen] = -(-rows // 8)
    for name in ("w13", "w2"):
        count = torch.from_numpy(memory.reads[name][:-1]).view(problem.experts, -1)
        assert (count == items[:, None]).all(), name
    for name in SHARED:
        assert (memory.reads[name][:-1] == (1 if made.wide else 0)).all(), name


def test_sums_that_are_exact_have_the_twins_bits():
    change, sizes, live = CASES["three rows"]
    problem, made = case(change, sizes)
    problem = dataclasses.replace(problem, beta=LARGE, linear_beta=LARGE)
    inputs = exact_inputs(problem, 7)
    memory = memory_of(problem, made, inputs)
    machine = Machine(made, memory, live)
    machine.run([*INPUTS, *(buffer.name for buffer in buffers(made))], problem.beta, problem.linear_beta)
    for key, wanted in exact_outputs(problem, inputs).items():
        assert torch.equal(output(memory, problem, key), wanted.float()), key
        assert wanted.float().abs().max() > 16


def test_a_nan_of_a_live_row_is_seen_in_that_row_alone():
    change, sizes, live = CASES["MXFP8 activations, both scales rounded up"]
    problem, made = case(change, {**sizes, "wide": 0})
    inputs = FAMILY.inputs(problem, 5)
    inputs["latent"][1, 40] = float("nan")
    memory = memory_of(problem, made, inputs)
    machine = Machine(made, memory, live)
    machine.run([*INPUTS, *(buffer.name for buffer in buffers(made))], problem.beta, problem.linear_beta)
    got = output(memory, problem, "latent_partial")
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_hidden_values_of_24_bits_round_to_four_as_those_of_32():
    _, made = case({"rows": 1}, {})
    space, sent = Machine(made, Memory(), 1).space, []
    space["publish"] = lambda address, words, scope: sent.append(words)
    ties = [1.0 + odd / 16 for odd in (1, 3, 5, 7, 9, 11, 13, 15)]
    near = [float(np.nextafter(np.float32(one), np.float32(to))) for one in ties for to in (0, 4)]
    values = [*ties, *near, 0.0, -0.0, -1.9999999, math.inf]
    for place in range(0, len(values), 4):
        space["publish_wide"](0, values[place : place + 4], Word(7))
    got = []
    for *words, epoch in sent:
        assert epoch == 7
        fourth = sum((int(word) & 0xFF) << (24 - 8 * i) for i, word in enumerate(words))
        got += [to_float(int(word) & 0xFFFFFF00) for word in words] + [to_float(fourth)]
    for value, cut in zip(values, got, strict=True):
        assert e4m3(cut) == e4m3(value) and math.copysign(1, cut) == math.copysign(1, value)
        assert math.frexp(cut)[1] == math.frexp(value)[1], "its group would get another scale"
