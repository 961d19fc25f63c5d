"""Triton kernels: a rank's shard of router logits and latents, on tensor cores with split K, or by FMA for very few rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_router_triton_front(
    x_ptr, w_router_ptr, w_down_ptr, logits_ptr, latent_ptr, partial_ptr, arrived_ptr, rows,
    experts: tl.constexpr, latents: tl.constexpr, hidden: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """logits[rows, experts] FP32 and latent[rows, latents] BF16 = x[rows, hidden] times both weights; ``rows <= BLOCK_M``.

    The weights are one list of rows, the router's first, and the M operand of the MMA. Block (i, s) sums K tiles
    ``s*T//S`` to ``(s+1)*T//S`` ascending, but the first of them last: with ``PDL`` its weights are asked for before the
    dependency wait and stay in registers. With ``SPLIT_K > 1`` it writes FP32 to ``partial[s, BLOCK_M, outputs]``; the last
    block of a tile to arrive adds the partials in order and sets ``arrived[i]`` back to zero.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs: tl.constexpr = experts + latents
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    tiles: tl.constexpr = hidden // BLOCK_K
    first = split * tiles // SPLIT_K
    last = (split + 1) * tiles // SPLIT_K
    routes = n < experts
    inside = n[:, None] < outputs
    place = tl.where(routes, n, n - experts).to(tl.int64) * hidden
    w_row = tl.where(routes[:, None], w_router_ptr + place[:, None], w_down_ptr + place[:, None]) + k[None, :]
    x_row = x_ptr + m[None, :] * hidden + k[:, None]
    live = m[None, :] < rows
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
    to_logits = m[None, :] * experts + n[:, None]
    to_latent = m[None, :] * latents + (n[:, None] - experts)
    is_logit = live & routes[:, None]
    is_latent = live & inside & (n[:, None] >= experts)
    if SPLIT_K == 1:
        tl.store(logits_ptr + to_logits, acc, mask=is_logit)
        tl.store(latent_ptr + to_latent, acc.to(latent_ptr.dtype.element_ty), mask=is_latent)
    else:
        where = m[None, :] * outputs + n[:, None]
        keep = live & inside
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
            tl.store(logits_ptr + to_logits, total, mask=is_logit)
            tl.store(latent_ptr + to_latent, total.to(latent_ptr.dtype.element_ty), mask=is_latent)
            tl.atomic_xchg(arrived_ptr + tile, 0, sem="relaxed", scope="gpu")


@triton.jit
def k3_router_triton_fma(
    x_ptr, w_router_ptr, w_down_ptr, logits_ptr, latent_ptr, rows,
    experts: tl.constexpr, latents: tl.constexpr, hidden: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """The same for ``rows <= ROWS``, a small power of two: products per thread over K tiles ascending, one tree at the end."""
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, ROWS)
    routes = n < experts
    inside = n[:, None] < experts + latents
    place = tl.where(routes, n, n - experts).to(tl.int64) * hidden
    w_row = tl.where(routes[:, None], w_router_ptr + place[:, None], w_down_ptr + place[:, None]) + k[None, :]
    x_row = x_ptr + r[:, None] * hidden + k[None, :]
    live = r[:, None] < rows
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
    to_logits = logits_ptr + r[:, None] * experts + n[None, :]
    to_latent = latent_ptr + r[:, None] * latents + (n[None, :] - experts)
    tl.store(to_logits, total, mask=live & routes[None, :])
    is_latent = live & (n[None, :] >= experts) & (n[None, :] < experts + latents)
    tl.store(to_latent, total.to(latent_ptr.dtype.element_ty), mask=is_latent)
