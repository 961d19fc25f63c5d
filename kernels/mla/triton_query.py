"""Triton kernels: query norm and up-projection beside the insertion of the new cache rows; then the absorption."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(value):
    """The nearest E4M3 value, ties to even, saturated: the conversion after it has nothing left to round, whoever does it."""
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # 2^20 quanta of 2^-3 and half as many again: the sum keeps whole quanta, those of 2^-6 below it
    whole = tl.maximum(power, 0.015625) * 1572864.0
    return (value + whole) - whole


@triton.jit
def k3_mla_triton_query(
    proj_ptr, q_a_norm_ptr, kv_a_norm_ptr, q_b_ptr, k_scale_ptr, table_ptr, context_ptr, q_ptr, cache_ptr, rows,
    eps, columns: tl.constexpr, LORA: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, outputs: tl.constexpr,
    Q_LEN: tl.constexpr, PAGE: tl.constexpr, pages: tl.constexpr, FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """q[rows, outputs] = rms_norm(proj[:, :LORA]) q_b[outputs, LORA]^T, and cache rows of the new tokens.

    Blocks (m, i) with i below the number of output tiles make BLOCK_N outputs of BLOCK_M rows, K tiles ascending but for the
    first, whose weights are asked for before the dependency wait and multiplied last. The others of row tile 0 insert one
    token's row each: ``[rms_norm(latent) | key]``, divided by the scale and saturated where the cache is E4M3.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    tiles: tl.constexpr = (outputs + BLOCK_N - 1) // BLOCK_N
    n = place * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n[:, None] < outputs  # in no block that inserts: those load no weights
    w_row = q_b_ptr + n.to(tl.int64)[:, None] * LORA + k[None, :]
    w_first = tl.load(w_row, mask=inside, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    if place < tiles:
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        live = m[None, :] < rows
        x_row = proj_ptr + m[None, :] * columns + k[:, None]
        squares = tl.zeros((BLOCK_K, BLOCK_M), dtype=tl.float32)
        for start in tl.static_range(0, LORA, BLOCK_K):
            x = tl.load(x_row + start, mask=live, other=0.0).to(tl.float32)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, axis=0) / LORA + eps)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in range(BLOCK_K, LORA, BLOCK_K):
            w = tl.load(w_row + start, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_row + start, mask=live, other=0.0).to(tl.float32)
            g = tl.load(q_a_norm_ptr + start + k).to(tl.float32)
            acc = tl.dot(w, (x * factor[None, :] * g[:, None]).to(w.dtype), acc)
        if PDL and RELEASE == "loads":
            tl.extra.cuda.gdc_launch_dependents()
        x = tl.load(x_row, mask=live, other=0.0).to(tl.float32)
        g = tl.load(q_a_norm_ptr + k).to(tl.float32)
        acc = tl.dot(w_first, (x * factor[None, :] * g[:, None]).to(w_first.dtype), acc)
        to = q_ptr + m[None, :] * outputs + n[:, None]
        tl.store(to, acc.to(q_ptr.dtype.element_ty), mask=live & inside)
    else:
        row = place - tiles
        if (row < rows) & (tl.program_id(1) == 0):
            c = tl.arange(0, LATENT)
            p = tl.arange(0, ROPE)
            position = tl.load(context_ptr + row // Q_LEN) + row % Q_LEN
            page = tl.load(table_ptr + (row // Q_LEN) * pages + position // PAGE).to(tl.int64)
            to = cache_ptr + (page * PAGE + position % PAGE) * (LATENT + ROPE)
            x = tl.load(proj_ptr + row * columns + LORA + c).to(tl.float32)
            g = tl.load(kv_a_norm_ptr + c).to(tl.float32)
            latent = x * tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + eps) * g
            key = tl.load(proj_ptr + row * columns + LORA + LATENT + p)
            if FP8:
                # the row is BF16 before it is E4M3
                scale = tl.load(k_scale_ptr)
                latent = _e4m3(latent.to(proj_ptr.dtype.element_ty).to(tl.float32) / scale)
                tl.store(to + c, latent.to(cache_ptr.dtype.element_ty))
                tl.store(to + LATENT + p, _e4m3(key.to(tl.float32) / scale).to(cache_ptr.dtype.element_ty))
            else:
                tl.store(to + c, latent.to(cache_ptr.dtype.element_ty))
                tl.store(to + LATENT + p, key)
        if PDL and RELEASE == "loads":
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def k3_mla_triton_absorb(
    q_ptr, w_uk_ptr, query_ptr, rows,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """query[rows, HEADS, LATENT + ROPE] = [q_nope w_uk | q_pe] of each head, E4M3 where the cache is.

    Block (i, h, m): BLOCK_C columns of head h for BLOCK_M rows, one MMA over NOPE; blocks i = 0 copy the rest. w_uk
    [HEADS, NOPE, LATENT] is asked for before the dependency wait.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = tl.arange(0, NOPE)
    p = tl.arange(0, ROPE)
    width: tl.constexpr = LATENT + ROPE
    w = tl.load(w_uk_ptr + (head * NOPE + d[:, None]) * LATENT + c[None, :], eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        if RELEASE == "loads":
            tl.extra.cuda.gdc_launch_dependents()
    live = m[:, None] < rows
    q_row = q_ptr + (m[:, None] * HEADS + head) * (NOPE + ROPE)
    to = query_ptr + (m[:, None] * HEADS + head) * width
    q = tl.load(q_row + d[None, :], mask=live, other=0.0)
    absorbed = tl.dot(q, w)
    if FP8:
        absorbed = _e4m3(absorbed.to(q.dtype).to(tl.float32))
    tl.store(to + c[None, :], absorbed.to(query_ptr.dtype.element_ty), mask=live)
    if tl.program_id(0) == 0:
        shared = tl.load(q_row + NOPE + p[None, :], mask=live, other=0.0)
        if FP8:
            shared = _e4m3(shared.to(tl.float32)).to(query_ptr.dtype.element_ty)
        tl.store(to + LATENT + p[None, :], shared, mask=live)
