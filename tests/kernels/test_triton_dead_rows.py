"""Triton engines of AttnRes and the head on the interpreter, launched for fewer rows than compiled for: dead ones NaN, and left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.tuning.compare import compare

from . import attn_res_case, lm_head_case


def launched(engine: Any, one: Any, tensors: dict[str, torch.Tensor], out: torch.Tensor, **numbers: int) -> None:
    """One launch on FP32 copies, without an edge; in a process that has the interpreter."""
    function, args, constants, grid = engine._kernel(
        one, dict(engine.space(one, attn_res_case.H200).default), pdl=False
    )
    held: dict[str, Any] = {name: tensor.float() for name, tensor in tensors.items()}
    held |= dict.fromkeys(("out", "logits"), out)
    found = {
        name: numbers[arg.name] if arg.kind == "int32" else held[arg.name or "norm_w"]
        for name, (_, arg) in args.items()
    }
    function[grid](**found, **constants)


def attn_res(kind: str, rows: int, live: int, saved: int) -> None:
    one = attn_res_case.problem(rows, kind, hidden=300, **({} if kind == "first" else {"blocks": 5}))
    inputs = attn_res_case.spread(one, rows)
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    given["prefix"][live:] = float("nan")
    if "blocks" in given:
        given["blocks"][saved:], given["blocks"][:, live:] = float("nan"), float("nan")
    out = torch.full((rows, one.hidden), 7.0)
    launched(attn_res_case.TRITON, one, given, out, rows=live, blocks=saved)
    family = attn_res_case.FAMILY
    wanted = attn_res_case.with_fewer(one, inputs, saved) if kind != "first" else family.twin(one, inputs)["out"]
    for row in range(live):
        got = out[row : row + 1].to(torch.bfloat16)
        result = compare("out", got, wanted[row : row + 1], family.tolerance(one, "out"))
        assert result.ok, f"row {row}: {result.message}"
    assert bool((out[live:] == 7).all()), "rows beyond the live ones were written"


def head(rows: int, live: int) -> None:
    one = lm_head_case.small(rows, "shard")
    inputs = lm_head_case.whole_numbers(one, rows)
    given = {**inputs, "h": inputs["h"].clone()}
    given["h"][live:] = float("nan")
    out = torch.full((rows, one.vocab), 7.0)
    launched(lm_head_case.TRITON, one, given, out, rows=live)
    wanted = lm_head_case.FAMILY.twin(one, inputs)["logits"]
    assert torch.equal(out[:live], wanted[:live]) and bool((out[live:] == 7).all())


CALLS = {
    "attn_res": "attn_res('blocks', 4, 3, 5); attn_res('blocks', 3, 1, 2); attn_res('final', 3, 2, 4); attn_res('first', 3, 2, 0)",
    "lm_head": "head(5, 3); head(17, 16)",
}  # fmt: skip


@pytest.mark.parametrize("family", CALLS)
def test_dead_rows_and_blocks_are_not_read_and_dead_rows_not_written(family: str) -> None:
    """In one process each, with the interpreter on."""
    code = f"from tests.kernels.test_triton_dead_rows import *; {CALLS[family]}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
