"""CuTe DSL kernels of the MLA core as the compiler made them, run on the CPU: ragged contexts, pages, masks, dead rows."""

from __future__ import annotations

import pytest

from .mla_case import inserted, judge_exact, problem, same_cache, written
from .mla_case import judge as judge_out
from .mla_machine import judge, run

SIZES = {"context": 200, "q_lora": 256}


@pytest.mark.parametrize(
    ("kind", "rows", "live", "heads", "contexts", "change"),
    [
        ("bf16", 3, 2, 6, [70, 129, 0], {"splits": 2, "tile": 64, "stages": 2}),
        ("bf16_verify4", 8, 5, 12, [0, 64], {"splits": 4, "tile": 32, "stages": 3, "queries": 32, "early": "none"}),
        ("fp8_verify8", 8, 7, 6, [129], {"splits": 2, "tile": 64, "stages": 3, "queries": 48}),
        ("fp8_verify8", 8, 8, 3, [31], {"splits": 1, "tile": 128, "stages": 2, "queries": 32}),
    ],
)
def test_parts_are_those_of_fp64(monkeypatch, kind, rows, live, heads, contexts, change):
    one = problem(rows, kind, heads=heads, **SIZES)
    done = run(one, monkeypatch, contexts, live, **change)
    judge(one, done, live, change["tile"], change["splits"])


@pytest.mark.parametrize(
    ("kind", "rows", "live", "heads", "contexts", "change"),
    [
        ("bf16", 3, 2, 2, [70, 129, 0], {"splits": 2, "tile": 64, "stages": 2, "cluster": 8}),
        ("fp8_verify4", 8, 7, 2, [0, 64], {"splits": 2, "tile": 64, "stages": 3, "cluster": 4, "early": "none"}),
        ("bf16_verify8", 24, 21, 1, [3, 70, 20], {"splits": 4, "tile": 32, "stages": 2, "cluster": 16}),
    ],
)
def test_a_whole_step_equals_the_twin(monkeypatch, kind, rows, live, heads, contexts, change):
    """Query, new rows, attention, merge, values and gate: the new rows of the cache are found NaN."""
    one = problem(rows, kind, heads=heads, **SIZES)
    done = run(one, monkeypatch, contexts, live, whole=True, **change)
    judge_out(one, done.inputs, done.out.view(rows, -1), live)
    same_cache(done.cache, inserted(one, done.inputs), done.before, written(one, done.inputs, live))


@pytest.mark.parametrize(
    ("kind", "change"),
    [("bf16", {"splits": 4, "tile": 32, "stages": 3}), ("fp8", {"splits": 2, "tile": 64, "stages": 2})],
)
def test_exact_inputs_give_the_twins_bits(monkeypatch, kind, change):
    """What the GPU tests compare to the bit."""
    one = problem(2, kind, heads=1, **SIZES)
    done = run(one, monkeypatch, [127, 31], whole=True, exact=True, **change)
    judge_exact(one, done.inputs, done.out.view(2, -1))
