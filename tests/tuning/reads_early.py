"""A projection that reads its activation before it waits for the kernel that writes it: what the check must tell."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def k3lab_test_reads_early(
    x_ptr, w_ptr, out_ptr, rows,
    outputs: tl.constexpr, hidden: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = x @ w^T, a block an output and row; ``EARLY``: x is read before the wait."""
    column, row = tl.program_id(0), tl.program_id(1)
    if not EARLY:
        gdc_wait()
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, hidden, BLOCK):
        x = tl.load(x_ptr + row * hidden + k + at, mask=(row < rows) & (k + at < hidden), other=0.0)
        w = tl.load(w_ptr + column * hidden + k + at, mask=k + at < hidden, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    result = tl.sum(total)
    if EARLY:
        gdc_wait()
    gdc_launch_dependents()
    tl.store(out_ptr + row * outputs + column, result.to(tl.bfloat16), mask=row < rows)
