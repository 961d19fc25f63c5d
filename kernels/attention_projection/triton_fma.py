"""Triton FMA kernel for very few rows: one block of outputs, the whole reduction in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_attention_projection_triton_fma(
    x_ptr, w_ptr, out_ptr, rows,
    outputs: tl.constexpr, hidden: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; ``rows <= ROWS``, a power of two.

    Every thread keeps its own products over the K tiles in ascending order; one tree sum at the end.
    With ``PDL`` (off on the interpreter, which knows no dependency wait) the first weight tile is asked for before
    the wait, everything else after it; the next kernel may start where ``RELEASE`` says: entry, loads or end.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, ROWS)
    w_row = w_ptr + n[:, None].to(tl.int64) * hidden + k[None, :]
    x_row = x_ptr + r[:, None] * hidden + k[None, :]
    live = r[:, None] < rows
    inside = n[:, None] < outputs
    w = tl.load(w_row, mask=inside, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_row, mask=live, other=0.0)
    products = x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    for start in range(BLOCK_K, hidden, BLOCK_K):
        w = tl.load(w_row + start, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_row + start, mask=live, other=0.0)
        products += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    if PDL and RELEASE == "loads":
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(products, axis=2)
    where = out_ptr + r[:, None] * outputs + n[None, :]
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=live & (n[None, :] < outputs))
