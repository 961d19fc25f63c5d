"""Triton kernel: logits of a rank's vocabulary rows on tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_lm_head_triton_shard(
    h_ptr, w_ptr, logits_ptr, rows,
    vocab: tl.constexpr, hidden: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """logits[rows, vocab] = h[rows, hidden] @ w[vocab, hidden]^T; ``rows <= BLOCK_M``.

    K tiles ascending, but the first of them last: with ``PDL`` (off on the interpreter, which knows no dependency wait)
    its weights are asked for before the wait and stay in registers. The next kernel may start where ``RELEASE`` says.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    w_row = w_ptr + n[:, None].to(tl.int64) * hidden + k[None, :]
    h_row = h_ptr + m[None, :] * hidden + k[:, None]
    live = m[None, :] < rows
    inside = n[:, None] < vocab
    w_first = tl.load(w_row, mask=inside, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    h_first = tl.load(h_row, mask=live, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(BLOCK_K, hidden, BLOCK_K):
        w = tl.load(w_row + start, mask=inside, other=0.0, eviction_policy="evict_first")
        h = tl.load(h_row + start, mask=live, other=0.0)
        acc = tl.dot(w, h, acc)
    if PDL and RELEASE == "loads":
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.dot(w_first, h_first, acc)
    tl.store(logits_ptr + m[None, :] * vocab + n[:, None], acc.to(logits_ptr.dtype.element_ty), mask=live & inside)
