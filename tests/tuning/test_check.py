"""Checks: Triton engines on the interpreter at odd rows and uneven splits; what cannot run is no pass."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from k3lab.kernels import SMALL_K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.check import check, row_cases
from k3lab.tuning.interpret import check_interpreted

FAMILY = family("attention_projection")
TRITON = FAMILY.engine("triton")
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "split in two": {"schedule": "splitk", "block_n": 64, "block_k": 64, "split_k": 2, "num_warps": 4, "num_stages": 4, "release": "loads"},
    "uneven split, ragged outputs": {
        "schedule": "splitk", "block_n": 128, "block_k": 64, "split_k": 3, "num_warps": 4, "num_stages": 2, "release": "entry",
    },
    "one block a tile": {"schedule": "splitk", "block_n": 32, "block_k": 128, "split_k": 1, "num_warps": 4, "num_stages": 2, "release": "end"},
    "fma": {"schedule": "fma", "block_n": 8, "block_k": 128, "split_k": 1, "num_warps": 4, "num_stages": 1, "release": "loads"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_interpreter_agrees_with_the_twin(name):
    problem = FAMILY.problem(SMALL_K3, tp=4, rows=5)
    space = TRITON.space(problem, gpu_card("GB300"))
    assert space.illegal(CONFIGS[name]) is None
    result = check(FAMILY, TRITON, problem, CONFIGS[name], seed=11)
    assert result.how == "interpreter"
    assert result.ok, result.reason
    assert [case["rows"] for case in result.cases] == [5, 4]
    assert 0 < result.errors["out"] < FAMILY.tolerance(problem, "out").relative


def test_more_rows_than_fma_takes():
    problem = FAMILY.problem(SMALL_K3, tp=16, rows=33, kind="mla")
    result = check(FAMILY, TRITON, problem, TRITON.space(problem, gpu_card("GB300")).default, seed=2)
    assert result.ok, result.reason


@pytest.mark.parametrize(
    ("file", "find", "replace"),
    [
        ("triton_splitk.py", "acc = tl.dot(w, x, acc)", "acc = tl.dot(w, x, acc)  # the copy itself is sound"),
        pytest.param(
            "triton_splitk.py",
            "first = split * tiles // SPLIT_K",
            "first = split * tiles // SPLIT_K + 1",
            marks=pytest.mark.slow,
        ),
        ("triton_splitk.py", "for s in range(SPLIT_K):", "for s in range(SPLIT_K - 1):"),
        pytest.param("triton_splitk.py", "if before == SPLIT_K - 1:", "if before == SPLIT_K:", marks=pytest.mark.slow),
        ("triton_splitk.py", "live = m[None, :] < rows", "live = m[None, :] < rows - 1"),
        (
            "triton_fma.py",
            "for start in range(BLOCK_K, hidden, BLOCK_K):",
            "for start in range(BLOCK_K, hidden - BLOCK_K, BLOCK_K):",
        ),
        ("triton_splitk.py", "acc = tl.dot(w_first, x_first, acc)", "acc = tl.dot(w_first, x_first, acc * 0)"),
        ("triton_splitk.py", "x_row + first * BLOCK_K", "x_row + (first + 1) * BLOCK_K"),
        ("triton_fma.py", "r[:, None] * outputs + n[None, :]", "r[:, None] * hidden + n[None, :]"),
    ],
)
def test_a_fault_in_the_kernel_is_found(file, find, replace, tmp_path):
    for package in ("kernels", "tuning"):
        shutil.copytree(ROOT / package, tmp_path / "k3lab" / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "k3lab" / "kernels" / "attention_projection" / file
    text = path.read_text()
    assert text.count(find) == 1
    path.write_text(text.replace(find, replace))
    config = CONFIGS["fma" if "fma" in file else "uneven split, ragged outputs"]
    script = (
        "import json, sys; from k3lab.kernels import SMALL_K3, family; from k3lab.tuning.interpret import check_interpreted;"
        "f = family('attention_projection'); p = f.problem(SMALL_K3, tp=4, rows=5);"
        "print(json.dumps(check_interpreted(f, f.engine('triton'), p, json.loads(sys.argv[1]), 3).to_json()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(config)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["cases"], f"it did not run: {result['reason']}"
    assert result["ok"] == ("sound" in replace), result["reason"]


def test_what_only_compiled_is_no_pass():
    engine, problem = FAMILY.engine("cute_skinny"), FAMILY.problem(SMALL_K3, tp=4, rows=2)
    result = check(FAMILY, engine, problem, engine.space(problem, gpu_card("GB300")).default)
    assert (result.ok, result.how) == (False, "compiled")
    assert "none is here" in result.reason


def test_an_interpreter_that_hangs_is_stopped(monkeypatch, tmp_path):
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    problem = FAMILY.problem(SMALL_K3, tp=4, rows=1)
    result = check_interpreted(FAMILY, TRITON, problem, CONFIGS["fma"], limit_s=0.5)
    assert not result.ok
    assert "did not finish" in result.reason


@pytest.mark.parametrize(("rows", "cases"), [(1, [1]), (2, [2, 1]), (8, [8, 7, 4, 1]), (64, [64, 63, 32, 1])])
def test_row_cases(rows, cases):
    assert row_cases(rows) == cases


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_a_store_behind_the_end_is_seen(dtype):
    import torch
    from k3lab.tuning.check import GUARD, guarded_output, written_beyond

    whole, view = guarded_output((3, 5), getattr(torch, dtype), "cpu")
    assert view.is_contiguous()
    assert whole.numel() == 15 + GUARD
    view.zero_()
    assert written_beyond(whole, view) is None
    whole[17] = 0
    assert written_beyond(whole, view) == 17
