"""Triton kernels: attention over a part of each request's paged cache; merge of the parts, head values, output gate."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_mla_triton_attend(
    query_ptr, cache_ptr, k_scale_ptr, table_ptr, context_ptr, partial_ptr, lse_ptr, rows,
    most, softmax_scale, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, Q_LEN: tl.constexpr,
    PAGE: tl.constexpr, pages: tl.constexpr, FP8: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """Part s of request b: partial[s, query, LATENT] FP32 and lse[s, query], the base-2 logarithm of its sum of weights.

    Block (s, i, b): QUERIES of the request's (row, head) pairs from i QUERIES on; ``most`` is the rows compiled for. A part is
    the s-th run of ``ceil(tokens / SPLITS)`` tokens, rounded up to whole tiles of BLOCK_N, summed tile after tile ascending
    with a running maximum; one without tokens leaves an lse of minus infinity and no sums. Row j of a request sees tokens
    up to ``context + j``. Sums are of what the cache holds: its scale is left to the merge.
    """
    if PDL:
        if RELEASE == "entry":
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0)
    request = tl.program_id(2)
    live_rows = tl.minimum(rows - request * Q_LEN, Q_LEN)
    if live_rows > 0:
        width: tl.constexpr = LATENT + ROPE
        i = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
        c = tl.arange(0, LATENT)
        p = tl.arange(0, ROPE)
        n = tl.arange(0, BLOCK_N)
        live = i < live_rows * HEADS
        query = request * Q_LEN * HEADS + i
        before = tl.load(context_ptr + request)
        tokens = before + live_rows
        sees = before + i // HEADS
        part = (tokens + SPLITS * BLOCK_N - 1) // (SPLITS * BLOCK_N) * BLOCK_N
        first = split * part
        last = tl.minimum(first + part, tokens)
        scale = softmax_scale * 1.4426950408889634
        if FP8:
            scale = scale * tl.load(k_scale_ptr)
        # to WIDE: E4M3 operands become BF16 exactly; the MMA of a few rows has no FP8 form
        q_row = query_ptr + query[:, None] * width
        q_latent = tl.load(q_row + c[None, :], mask=live[:, None], other=0.0).to(WIDE)
        q_shared = tl.load(q_row + LATENT + p[None, :], mask=live[:, None], other=0.0).to(WIDE)
        maximum = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((QUERIES,), dtype=tl.float32)
        acc = tl.zeros((QUERIES, LATENT), dtype=tl.float32)
        for start in range(first, last, BLOCK_N):
            t = start + n
            held = t < last
            page = tl.load(table_ptr + request * pages + t // PAGE, mask=held, other=0).to(tl.int64)
            row = cache_ptr + (page * PAGE + t % PAGE)[:, None] * width
            k_latent = tl.load(row + c[None, :], mask=held[:, None], other=0.0, eviction_policy="evict_first").to(WIDE)
            k_shared = tl.load(
                row + LATENT + p[None, :], mask=held[:, None], other=0.0, eviction_policy="evict_first"
            ).to(WIDE)
            scores = tl.dot(q_latent, tl.trans(k_latent))
            scores = tl.dot(q_shared, tl.trans(k_shared), scores) * scale
            scores = tl.where(held[None, :] & (t[None, :] <= sees[:, None]), scores, float("-inf"))
            highest = tl.maximum(maximum, tl.max(scores, axis=1))
            # a row that sees none of these tokens nor any before them: nothing to subtract, and nothing added
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(maximum - base)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(WIDE), k_latent, acc)
            maximum = highest
        to = split * most * HEADS + query
        seen = total > 0.0
        lse = tl.where(seen, maximum + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + to, lse, mask=live)
        share = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
        tl.store(
            partial_ptr + to.to(tl.int64)[:, None] * LATENT + c[None, :],
            acc * share[:, None],
            mask=(live & seen)[:, None],
        )
    if PDL and RELEASE == "loads":
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _merged(
    partial_ptr, lse_ptr, query, live, c, most, HEADS: tl.constexpr, LATENT: tl.constexpr, SPLITS: tl.constexpr
):
    """Latents [len(query), len(c)] FP32: the parts ascending, each by its share of the whole sum of weights."""
    slot = most * HEADS
    highest = tl.full(query.shape, float("-inf"), dtype=tl.float32)
    for s in range(SPLITS):
        highest = tl.maximum(highest, tl.load(lse_ptr + s * slot + query, mask=live, other=0.0))
    total = tl.zeros(query.shape, dtype=tl.float32)
    found = tl.zeros((query.shape[0], c.shape[0]), dtype=tl.float32)
    for s in range(SPLITS):
        lse = tl.load(lse_ptr + s * slot + query, mask=live, other=0.0)
        share = tl.exp2(lse - highest)
        held = live & (lse > float("-inf"))
        at = (s * slot + query).to(tl.int64)[:, None] * LATENT + c[None, :]
        found += share[:, None] * tl.load(partial_ptr + at, mask=held[:, None], other=0.0)
        total += share
    return found / total[:, None]


@triton.jit
def k3_mla_triton_merge(
    partial_ptr, lse_ptr, k_scale_ptr, latent_ptr, rows,
    most, HEADS: tl.constexpr, LATENT: tl.constexpr, FP8: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """latent[query, LATENT] BF16 from the parts. Block (i, query): BLOCK_C columns of one (row, head) pair."""
    if PDL:
        if RELEASE == "entry":
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    query = tl.program_id(1) + tl.arange(0, 1)
    live = query < rows * HEADS
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    latent = _merged(partial_ptr, lse_ptr, query, live, c, most, HEADS, LATENT, SPLITS)
    if FP8:
        latent = latent * tl.load(k_scale_ptr)
    to = latent_ptr + query[:, None] * LATENT + c[None, :]
    tl.store(to, latent.to(latent_ptr.dtype.element_ty), mask=live[:, None])
    if PDL and RELEASE == "loads":
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def k3_mla_triton_value(
    partial_ptr, lse_ptr, latent_ptr, k_scale_ptr, w_uv_ptr, proj_ptr, out_ptr, rows,
    most, columns: tl.constexpr, GATE: tl.constexpr, HEADS: tl.constexpr, LATENT: tl.constexpr, V: tl.constexpr,
    FP8: tl.constexpr, SPLITS: tl.constexpr, MERGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """out[rows, HEADS V] = (W_UV latent) * sigmoid(gate). Block (i, h, m): BLOCK_V values of head h for BLOCK_M rows.

    Latents are read merged, or merged here, the same in every block of a head; one MMA over LATENT. w_uv
    [HEADS, V, LATENT] is asked for before the dependency wait.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    c = tl.arange(0, LATENT)
    w = tl.load(w_uv_ptr + (head * V + v[:, None]) * LATENT + c[None, :], eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        if RELEASE == "loads":
            tl.extra.cuda.gdc_launch_dependents()
    live = m < rows
    query = m * HEADS + head
    if MERGED:
        latent = tl.load(latent_ptr + query[:, None] * LATENT + c[None, :], mask=live[:, None], other=0.0)
    else:
        latent = _merged(partial_ptr, lse_ptr, query, live, c, most, HEADS, LATENT, SPLITS)
        if FP8:
            latent = latent * tl.load(k_scale_ptr)
    value = tl.dot(latent.to(w.dtype), tl.trans(w)).to(out_ptr.dtype.element_ty).to(tl.float32)
    at = m[:, None] * columns + GATE + head * V + v[None, :]
    gate = tl.load(proj_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    result = value / (1.0 + tl.exp(-gate))
    tl.store(
        out_ptr + m[:, None] * (HEADS * V) + head * V + v[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=live[:, None],
    )
