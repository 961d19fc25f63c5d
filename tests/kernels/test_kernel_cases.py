"""Kernels of the cores as they come, on each GPU's card: no engine is left out, and what must be there together fits."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from k3lab import kernels
from k3lab.decode.choices import STEP_FAMILIES
from k3lab.kernels import InputError, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.residency import concerned
from k3lab.tuning.compiling import compile_config, resources_of
from k3lab.tuning.evaluate import not_together

from . import sanitize
from .kernel_cases import CORES, engines_of, kinds_of

KERNELS = Path(kernels.__file__).parent


def kernels_of(name: str) -> set[str]:
    """Names of the functions in a family's folder that are kernels."""
    found = set()
    for path in (KERNELS / name).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("k3_"):
                found.add(node.name)
    return found


def test_every_engine_of_every_family_has_a_case_on_the_gpu_it_is_for() -> None:
    for name in STEP_FAMILIES:
        found = family(name)
        assert set(kinds_of(found)) <= {*found.kinds, None}
        served = {engine.name for arch in ("sm_90a", "sm_103a") for engine, _ in engines_of(name, 8, arch)}
        assert served == {engine.name for engine in found.engines}


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("gpu", ["H200", "GB300", pytest.param("B200", marks=pytest.mark.slow)])
def test_clusters_and_blocks_that_wait_for_each_other_fit(name: str, gpu: str) -> None:
    """64 rows; by registers, shared memory and GPCs of 132, 148 and 152 SMs. The driver is asked again before a launch."""
    card = gpu_card(gpu)
    assert card.sms in (132, 148, 152)
    for engine, problem in engines_of(name, 64, card.arch):
        if engine.compiler == "triton":  # no clusters, and no block waits for another
            continue
        compiled = compile_config(engine, problem, dict(engine.space(problem, card).default), card.arch)
        found = resources_of(compiled)
        assert not_together(compiled, found, card) is None
        for launch, kernel in zip(compiled.launches, found, strict=True):
            assert launch.pdl, "every kernel of a step waits for the one before it by itself"
            assert kernel.registers * 128 * -(-launch.threads // 128) <= card.registers_per_sm
            assert kernel.dynamic_shared_bytes == launch.shared_bytes <= card.shared_per_block


@pytest.mark.slow
@pytest.mark.parametrize("name", CORES)
def test_every_kernel_of_a_family_is_among_the_cases(name: str) -> None:
    card, launched = gpu_card("H200"), set()
    for rows in (1, 64):
        for engine, problem in engines_of(name, rows, card.arch):
            compiled = compile_config(engine, problem, dict(engine.space(problem, card).default), card.arch)
            launched |= {re.sub(r"_\d+$", "", launch.kernel) for launch in compiled.launches}
            assert all(
                (launch.pdl and not concerned(launch)) or engine.compiler == "cute" for launch in compiled.launches
            )
    assert launched == kernels_of(name)


@pytest.mark.parametrize("name", CORES)
def test_the_sanitizers_script_comes_to_every_engine_and_kind(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It stops where it would compile."""
    came = set()

    def stopped(engine: Any, problem: Any, config: Any, arch: str) -> None:
        came.add((engine.name, getattr(problem, "kind", None)))
        raise InputError("no GPU here")

    found = family(name)
    monkeypatch.setattr(type(found), "inputs", lambda *_: {})
    monkeypatch.setattr(sanitize, "compile_config", stopped)
    device = SimpleNamespace(need_card=lambda: gpu_card("H200"), arch="sm_90a")
    monkeypatch.setattr(sanitize, "require", lambda _: device)
    assert sanitize.main(name, [8], []) == len(came)
    assert came == {(engine.name, getattr(problem, "kind", None)) for engine, problem in engines_of(name, 8, "sm_90a")}
