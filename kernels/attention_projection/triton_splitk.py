"""Triton tensor-core kernel, weight-stationary split-K with a reduction in split order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_attention_projection_triton_splitk(
    x_ptr, w_ptr, out_ptr, partial_ptr, arrived_ptr, rows,
    outputs: tl.constexpr, hidden: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; ``rows <= BLOCK_M``.

    Weights are the M operand of the MMA. Block (i, s) sums K tiles ``s*T//S`` to ``(s+1)*T//S`` in
    ascending order, but the first of them last: with ``PDL`` (off on the interpreter, which knows no dependency
    wait) its weights are asked for before the wait and stay in registers, so that the pipelined loop need not
    wait for them. Everything else comes after the wait; the next kernel may start where ``RELEASE`` says: entry,
    loads (all of them asked for) or end. With ``SPLIT_K > 1`` it writes FP32 to ``partial[s, BLOCK_M, outputs]``; the last
    block of an output tile to arrive adds the partials in order s = 0, 1, ... whoever it is, so the
    bits do not depend on timing, and sets the counter ``arrived[i]`` back to zero for the next launch.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    tiles: tl.constexpr = hidden // BLOCK_K
    first = split * tiles // SPLIT_K
    last = (split + 1) * tiles // SPLIT_K
    w_row = w_ptr + n[:, None].to(tl.int64) * hidden + k[None, :]
    x_row = x_ptr + m[None, :] * hidden + k[:, None]
    live = m[None, :] < rows
    inside = n[:, None] < outputs
    w_first = tl.load(w_row + first * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_first = tl.load(x_row + first * BLOCK_K, mask=live, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(first + 1, last):
        w = tl.load(w_row + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_row + step * BLOCK_K, mask=live, other=0.0)
        acc = tl.dot(w, x, acc)
    if PDL and RELEASE == "loads":
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.dot(w_first, x_first, acc)
    where = m[None, :] * outputs + n[:, None]
    keep = live & inside
    if SPLIT_K == 1:
        tl.store(out_ptr + where, acc.to(out_ptr.dtype.element_ty), mask=keep)
    else:
        slot: tl.constexpr = BLOCK_M * outputs
        tl.store(partial_ptr + split * slot + where, acc, mask=keep)
        tl.debug_barrier()  # all stores of the block before its one arrival
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT_K - 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for s in range(SPLIT_K):
                # L2, not L1: other blocks wrote these words during this launch
                total += tl.load(partial_ptr + s * slot + where, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=keep)
            tl.atomic_xchg(arrived_ptr + tile, 0, sem="relaxed", scope="gpu")
