"""The Triton engine of the router: equal to the twin on the interpreter, compiled for every architecture, weights ahead of the wait."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.router import arithmetic, triton_engine
from k3lab.tuning.check import row_cases
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.interpret import check_interpreted
from k3lab.tuning.sass_order import order, wait_fault

from .router_case import FAMILY, problem

ENGINE = FAMILY.engine("triton")
FMA = {"schedule": "fma", "block_n": 2, "block_k": 512, "split_k": 1, "num_stages": 1}


def default(one):
    return dict(ENGINE.space(one, gpu_card("H200")).default)


@pytest.mark.parametrize(
    ("one", "change"),
    [
        (problem(3, "choice"), {}),
        (problem(2, "front", hidden=512), FMA),
        (problem(17, "front", hidden=512, latent=20, tp=4, experts=14), {"split_k": 4, "block_k": 64}),
    ],
    ids=["choice", "fma", "split"],
)
def test_equals_the_twin_on_the_interpreter(one, change):
    result = check_interpreted(FAMILY, ENGINE, one, {**default(one), **change}, 0)
    assert result.how == "interpreter"
    assert result.ok, result.reason
    assert {case["rows"] for case in result.cases} <= set(row_cases(one.rows))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_compiles_without_spills_and_asks_for_weights_before_the_wait(arch):
    for rows, kind, change in ((1, "front", {**FMA, "block_k": 1024}), (8, "front", {}), (8, "choice", {})):
        one = problem(rows, kind)
        (launch,) = ENGINE.compile(one, {**default(one), **change}, arch).launches
        found = kernel_resources(launch)
        assert re.match(r"k3_router_triton_(front|fma|choice)$", found.kernel)
        assert found.spill_instructions == 0
        assert launch.pdl
        assert wait_fault(order(launch.cubin), r"LDG\..*") is None, found.kernel


def test_refusals_say_why():
    assert "publishes no packets" in ENGINE.refuses(problem(8), "sm_90a")
    assert "not a multiple of 64" in ENGINE.refuses(problem(8, "front", hidden=7200), "sm_90a")
    assert "sm_80" in ENGINE.refuses(problem(8, "choice"), "sm_80")
    assert "top-12" in ENGINE.refuses(problem(8, "choice", top_k=12), "sm_90a")
    assert ENGINE.refuses(dataclasses.replace(problem(8, "choice"), top_k=8), "sm_90a") is None


def test_the_sigmoid_has_the_constants_of_the_exact_one():
    text = (Path(triton_engine.__file__).parent / "triton_choice.py").read_text()
    found = {name: float(value) for name, value in re.findall(r"^(\w+) = tl\.constexpr\((.*)\)$", text, re.M)}
    names = ("LEAST", "BIG", "LOG2E", "MAGIC", "LN2_HIGH", "LN2_LOW")
    wanted = {name: getattr(arithmetic, name) for name in names}
    wanted |= {f"C{6 - place}": value for place, value in enumerate(arithmetic.POLYNOMIAL[:4])}
    bits = arithmetic.fp32_bits
    assert {name: bits(value) for name, value in found.items()} == {name: bits(value) for name, value in wanted.items()}
