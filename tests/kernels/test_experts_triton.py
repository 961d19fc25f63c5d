"""The Triton engine of the experts: on the interpreter against the twin, and its machine code."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from k3lab.kernels import K3, SMALL_K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import kernel_resources

FAMILY = family("experts")
ENGINE = FAMILY.engine("triton")


def small(rows: int, kind: str):
    one = FAMILY.problem(SMALL_K3, tp=4, rows=rows, kind=kind)
    return dataclasses.replace(one, latent=96, intermediate=64, top_k=2, experts=5, hidden=128, shared_intermediate=64)


def interpreted(cases: list[tuple[int, str, dict[str, int]]]) -> list[dict[str, float]]:
    """Relative errors of each output, from a process with the interpreter on."""
    code = """
import dataclasses, json, sys
from k3lab.kernels import SMALL_K3, family
f = family("experts"); e = f.engine("triton"); found = []
from k3lab.kernels.gpu_cards import gpu_card
for rows, kind, change in json.loads(sys.argv[1]):
    one = f.problem(SMALL_K3, tp=4, rows=rows, kind=kind)
    one = dataclasses.replace(one, latent=96, intermediate=64, top_k=2, experts=5, hidden=128, shared_intermediate=64)
    space = e.space(one, gpu_card("H200"))
    config = {**space.default, **change}
    assert space.illegal(config) is None, space.illegal(config)
    inputs = f.inputs(one, rows)
    got, wanted = e.interpret(one, config, inputs), f.twin(one, inputs)
    assert set(got) == set(wanted)
    found.append({n: float((got[n].double() - wanted[n].double()).norm() / wanted[n].double().norm()) for n in wanted})
print(json.dumps(found))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], capture_output=True, text=True, timeout=240, env=environment,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_equals_the_twin_on_the_interpreter():
    cases = [(3, "bf16", {}), (1, "routed", {"groups1": 2, "groups2": 2}), (2, "routed", {"groups1": 4, "groups2": 16})]
    for (rows, kind, _), errors in zip(cases, interpreted(cases), strict=True):
        assert set(errors) == set(FAMILY.output_specs(small(rows, kind)))
        for name, error in errors.items():
            assert error <= FAMILY.tolerance(small(rows, kind), name).relative, (kind, name, error)


def test_refusals_say_why():
    assert ENGINE.refuses(FAMILY.problem(K3, tp=16, rows=64), "sm_103a") is None
    assert "mxfp8_ceil" in ENGINE.refuses(FAMILY.problem(K3, tp=16, rows=1, kind="mxfp8_ceil"), "sm_90a")
    assert "sm_80" in ENGINE.refuses(FAMILY.problem(K3, tp=16, rows=1), "sm_80")
    assert "not a multiple of 32" in ENGINE.refuses(dataclasses.replace(small(1, "routed"), latent=80), "sm_90a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_machine_code(arch):
    problem = FAMILY.problem(K3, tp=16, rows=8)
    space = ENGINE.space(problem, gpu_card("H200"))
    launches = compile_config(ENGINE, problem, space.default, arch).launches
    roles = ["first", "second", "sum", "shared_first", "shared_second"]
    assert [launch.kernel for launch in launches] == [f"k3_experts_triton_{role}" for role in roles]
    for launch in launches:
        found = kernel_resources(launch)
        assert found.spill_instructions == 0, launch.kernel
        assert found.dynamic_shared_bytes <= gpu_card("H200").shared_per_block
    assert [launch.grid for launch in launches] == [(12, 128, 1), (112, 128, 1), (14, 8, 1), (48, 1, 1), (448, 1, 1)]
