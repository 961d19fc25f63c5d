"""Streaming part of the head's CuTe DSL kernels: a tile of the vocabulary's rows, from memory to sums in shared memory."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_streaming import EVICT_FIRST, LOAD_W, LOAD_X, multiply, read


@cute.jit
def each(text: cutlass.Constexpr, bases: list, offset: Int32, policy: list):
    """Four words from each address plus the offset."""
    words = []
    for base in bases:
        words += read(text, base + offset, 4, policy)
    return words


@cute.jit
def addresses(h: Int64, w: Int64, rows: Int32, block: Int32, warp: Int32, lane: Int32, H: cutlass.Constexpr):
    """(of a lane's weights, of its inputs) in the first step; what is not there repeats the last row, so no more traffic."""
    w_at, h_at = [], []
    for j in cutlass.range_constexpr(H.n_tiles):
        row = cutlass.min(block * H.tile + cutlass.min(H.weight_row(warp, lane, j), H.tile - 1), H.vocab - 1)
        w_at.append(w + (Int64(row) * H.hidden + H.weight_column(warp, lane)) * 2)
    for m in cutlass.range_constexpr(H.m_tiles):
        for half in cutlass.range_constexpr(H.halves):
            row, chunk = H.input_row(lane, m, half)
            column = H.input_column(warp, lane, cutlass.min(chunk, H.chunks - 1))
            h_at.append(h + Int64(cutlass.min(row, rows - 1) * H.hidden + column) * 2)
    return w_at, h_at


@cute.jit
def keep_sums(acc: list, sums: cute.Tensor, warp: Int32, lane: Int32, H: cutlass.Constexpr):
    """A warp's sums into shared memory: one part a warp and chunk, of products of equal chunks only."""
    for m in cutlass.range_constexpr(H.m_tiles):
        for j in cutlass.range_constexpr(H.n_tiles):
            for e in cutlass.range_constexpr(2 * H.halves):
                row, n, chunk, same = H.sum_place(warp, lane, m, j, e)
                if chunk == same and row < H.rows and n < H.tile:
                    sums[H.part(warp, same) * H.size + row * H.tile + n] = acc[(m * H.n_tiles + j) * 4 + e]


@cute.jit
def pair_of_parts(sums: cute.Tensor, pair: Int32, H: cutlass.Constexpr):
    """Two neighbouring outputs of a row: their parts ascending."""
    low, high = sums[2 * pair], sums[2 * pair + 1]
    for k in cutlass.range_constexpr(1, H.parts):
        low += sums[2 * pair + k * H.size]
        high += sums[2 * pair + 1 + k * H.size]
    return low, high


@cute.jit
def stream(
    h: Int64, w: Int64, sums: cute.Tensor, rows: Int32, block: Int32, warp: Int32, lane: Int32, H: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """``h[rows, hidden]`` times the tile's rows of ``w``, a sum for each warp of K and chunk, in shared memory.

    A lane loads 8 neighbouring columns of a row of w in one go, a warp ``32 chunks`` columns of ``8 / chunks`` rows: two
    MMA operands as they stand, K permuted within 32 columns, for h as for w. Each chunk is a row of its own to the
    MMA; of its products only those of equal chunks count. Weights of ``depth`` steps are asked for before the
    dependency wait. Ends with a barrier.
    """
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    w_at, h_at = addresses(h, w, rows, block, warp, lane, H)
    policy, stride, depth = Int64(EVICT_FIRST), H.width * H.warps_k * 2, min(H.depth, H.steps)
    acc = [Float32(0.0)] * (H.m_tiles * H.n_tiles * 4)
    w_in = [each(LOAD_W, w_at, s * stride, [policy]) for s in range(depth)]
    arch.griddepcontrol_wait()
    h_in = [each(LOAD_X, h_at, s * stride, []) for s in range(depth)]
    for r in cutlass.range(H.steps // depth - 1, unroll=1):
        for d in cutlass.range_constexpr(depth):
            acc = multiply(acc, w_in[d], h_in[d], H.halves)
            w_in[d] = each(LOAD_W, w_at, ((r + 1) * depth + d) * stride, [policy])
            h_in[d] = each(LOAD_X, h_at, ((r + 1) * depth + d) * stride, [])
    rest = H.steps % depth
    for d in cutlass.range_constexpr(depth):
        acc = multiply(acc, w_in[d], h_in[d], H.halves)
        if cutlass.const_expr(d < rest):
            w_in[d] = each(LOAD_W, w_at, (H.steps - rest + d) * stride, [policy])
            h_in[d] = each(LOAD_X, h_at, (H.steps - rest + d) * stride, [])
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    for d in cutlass.range_constexpr(rest):
        acc = multiply(acc, w_in[d], h_in[d], H.halves)
    keep_sums(acc, sums, warp, lane, H)
    arch.sync_threads()
