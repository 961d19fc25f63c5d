"""Triton kernels: the shared expert in BF16 from the held layout, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_routed import situ


@triton.jit
def product(x_ptr, w_ptr, unit, rows, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[ROWS, 16] = x[rows, K] times 16 rows of held blocks; K ascending."""
    m, n, k = tl.arange(0, ROWS), tl.arange(0, 16), tl.arange(0, BLOCK_K)
    blocks = (unit * 2 + n // 8) * (K // 32)
    w_at = w_ptr + (blocks[None, :] + k[:, None] // 32) * 256 + (n % 8)[None, :] * 32 + k[:, None] % 32
    x_at = x_ptr + m[:, None] * K + k[None, :]
    acc = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_at + start, mask=(m < rows)[:, None], other=0.0)
        w = tl.load(w_at + start * 8, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def k3_experts_triton_shared_first(
    x_ptr, w_ptr, wide_ptr, rows,
    HIDDEN: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BETA: tl.constexpr,
    LINEAR: tl.constexpr,
):  # fmt: skip
    """wide[rows, I]: block u makes columns 8 u to 8 u + 7, from four rows of gate, four of up, and again."""
    unit = tl.program_id(0)
    acc = product(x_ptr, w_ptr, unit, rows, HIDDEN, ROWS, BLOCK_K)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, 2, 4)), (0, 1, 3, 2)))
    value = tl.reshape(situ(gate, up, BETA, LINEAR), (ROWS, 8))
    m, column = tl.arange(0, ROWS), unit * 8 + tl.arange(0, 8)
    where = wide_ptr + m[:, None] * WIDE + column[None, :]
    tl.store(where, value.to(wide_ptr.dtype.element_ty), mask=(m < rows)[:, None])


@triton.jit
def k3_experts_triton_shared_second(
    wide_ptr, w_ptr, out_ptr, rows,
    HIDDEN: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[rows, H]: block u makes columns 16 u to 16 u + 15."""
    unit = tl.program_id(0)
    acc = product(wide_ptr, w_ptr, unit, rows, WIDE, ROWS, BLOCK_K)
    m, column = tl.arange(0, ROWS), unit * 16 + tl.arange(0, 16)
    where = out_ptr + m[:, None] * HIDDEN + column[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None])
