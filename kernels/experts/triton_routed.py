"""Triton kernels: routed MXFP4 experts, a pair of row and expert at a time, dequantised from the held layout in registers."""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDES: tl.constexpr = tl.constexpr(0x01C001C0)
SIGNS: tl.constexpr = tl.constexpr(0x80008000 - (1 << 32))
LEFT: tl.constexpr = tl.constexpr(0x0C180C18)
UNSCALE: tl.constexpr = tl.constexpr(2.0**14)


@triton.jit
def tanh(value):
    """A series near zero, where the other form loses its digits."""
    square = value * value
    series = value * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.0625, series, 1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0))


@triton.jit
def situ(gate, up, BETA: tl.constexpr, LINEAR: tl.constexpr):
    """See :func:`k3lab.kernels.numerics.situ`."""
    return BETA * tanh(gate / BETA) / (1.0 + tl.exp(-gate)) * (LINEAR * tanh(up / LINEAR))


@triton.jit
def dot_pair(word, low, high):
    """The two codes of an operand word, as FP16 times 2^14, times two activations."""
    half = ((word & MAGNITUDES) << 3) | (word & SIGNS)
    first = (half & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    second = ((half >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first * low + second * high


@triton.jit
def rotated(word):
    """By ten bits to the left."""
    return (word << 10) | ((word >> 22) & 0x3FF)


@triton.jit
def dot_rows(first, second, x0, x1, x2, x3, x4, x5, x6, x7):
    """(row g, row g + 8) of one tile: the eight operands of two words, see :func:`.layout.operands`."""
    both = (first & LEFT) | ((second << 2) & ~LEFT)
    last = (both << 28) | ((both >> 4) & 0x0FFFFFFF)
    even = dot_pair(first, x0, x1) + dot_pair(rotated(first), x2, x3)
    even += dot_pair(second << 6, x4, x5) + dot_pair(both << 2, x6, x7)
    odd = dot_pair(first << 6, x0, x1) + dot_pair(second, x2, x3)
    odd += dot_pair(rotated(second), x4, x5) + dot_pair(last, x6, x7)
    return even, odd


@triton.jit
def rows_of_lanes(acc):
    """[groups, 32 lanes] summed to [8 rows]."""
    return tl.sum(tl.reshape(tl.sum(acc, 0), (8, 4)), 1)


@triton.jit
def block_rows(x_ptr, w_ptr, scale_ptr, first, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """32 rows of a product, [8] each: tile 0 row g, row g + 8, tile 1 row g, row g + 8. Groups in steps, ascending."""
    lane = tl.arange(0, 32)
    a = tl.zeros((STEP, 32), tl.float32)
    b = tl.zeros((STEP, 32), tl.float32)
    c = tl.zeros((STEP, 32), tl.float32)
    d = tl.zeros((STEP, 32), tl.float32)
    for start in range(0, GROUPS, STEP):
        group = start + tl.arange(0, STEP)
        inside = (group < GROUPS)[:, None] & (lane >= 0)[None, :]
        block = (first + group).to(tl.int64)
        at = block[:, None, None] * 128 + lane[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        words = tl.load(w_ptr + at, mask=(group < GROUPS)[:, None, None], other=0, eviction_policy="evict_first")
        even, odd = tl.split(tl.reshape(words, (STEP, 32, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        scale = tl.load(scale_ptr + block[:, None] * 8 + lane[None, :] // 4, mask=inside, other=0)
        x_at = x_ptr + group[:, None] * 32 + lane[None, :] % 4 * 8
        x0 = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(x_at + 1, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + 2, mask=inside, other=0.0).to(tl.float32)
        x3 = tl.load(x_at + 3, mask=inside, other=0.0).to(tl.float32)
        x4 = tl.load(x_at + 4, mask=inside, other=0.0).to(tl.float32)
        x5 = tl.load(x_at + 5, mask=inside, other=0.0).to(tl.float32)
        x6 = tl.load(x_at + 6, mask=inside, other=0.0).to(tl.float32)
        x7 = tl.load(x_at + 7, mask=inside, other=0.0).to(tl.float32)
        s0, s1 = dot_rows(w0, w1, x0, x1, x2, x3, x4, x5, x6, x7)
        s2, s3 = dot_rows(w2, w3, x0, x1, x2, x3, x4, x5, x6, x7)
        a += s0 * ((scale & 0xFF) << 23).to(tl.float32, bitcast=True)
        b += s1 * (((scale >> 8) & 0xFF) << 23).to(tl.float32, bitcast=True)
        c += s2 * (((scale >> 16) & 0xFF) << 23).to(tl.float32, bitcast=True)
        d += s3 * (((scale >> 24) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return (
        rows_of_lanes(a) * UNSCALE,
        rows_of_lanes(b) * UNSCALE,
        rows_of_lanes(c) * UNSCALE,
        rows_of_lanes(d) * UNSCALE,
    )


@triton.jit
def k3_experts_triton_first(
    latent_ptr, ids_ptr, w13_ptr, scale_ptr, hidden_ptr, rows,
    LATENT: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, STEP: tl.constexpr, BETA: tl.constexpr,
    LINEAR: tl.constexpr,
):  # fmt: skip
    """hidden[pair, inner]: block (t, p) makes columns 16 t to 16 t + 15 of pair p."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    if pair < rows * TOP_K:
        expert = tl.load(ids_ptr + pair)
        first = (expert * (INNER // 16) + tile) * (LATENT // 32)
        x = latent_ptr + pair // TOP_K * LATENT
        g0, g1, u0, u1 = block_rows(x, w13_ptr, scale_ptr, first, LATENT // 32, STEP)
        where = hidden_ptr + pair * INNER + tile * 16 + tl.arange(0, 8)
        tl.store(where, situ(g0, u0, BETA, LINEAR).to(hidden_ptr.dtype.element_ty))
        tl.store(where + 8, situ(g1, u1, BETA, LINEAR).to(hidden_ptr.dtype.element_ty))


@triton.jit
def k3_experts_triton_second(
    hidden_ptr, ids_ptr, w2_ptr, scale_ptr, output_ptr, rows,
    LATENT: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """output[pair, latent]: block (t, p) makes columns 32 t to 32 t + 31 of pair p."""
    task, pair = tl.program_id(0), tl.program_id(1)
    if pair < rows * TOP_K:
        expert = tl.load(ids_ptr + pair)
        first = (expert * (LATENT // 32) + task) * (INNER // 32)
        a, b, c, d = block_rows(hidden_ptr + pair * INNER, w2_ptr, scale_ptr, first, INNER // 32, STEP)
        where = output_ptr + pair * LATENT + task * 32 + tl.arange(0, 8) * 4
        tl.store(where, a.to(output_ptr.dtype.element_ty))
        tl.store(where + 1, b.to(output_ptr.dtype.element_ty))
        tl.store(where + 2, c.to(output_ptr.dtype.element_ty))
        tl.store(where + 3, d.to(output_ptr.dtype.element_ty))


@triton.jit
def k3_experts_triton_sum(
    output_ptr, weights_ptr, out_ptr, rows, LATENT: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """out[row, latent]: experts' outputs times their weights, slots ascending."""
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    if row < rows:
        inside = column < LATENT
        total = tl.zeros((BLOCK,), tl.float32)
        for slot in range(TOP_K):
            pair = row * TOP_K + slot
            weight = tl.load(weights_ptr + pair)
            total += weight * tl.load(output_ptr + pair * LATENT + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * LATENT + column, total.to(out_ptr.dtype.element_ty), mask=inside)
