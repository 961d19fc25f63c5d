"""CuTe DSL tensor-core kernel: W streamed from memory straight into MMA registers, in whole lines."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_streaming import EVICT_FIRST, LOAD_W, LOAD_X, multiply, read
from .common import power_of_two

LOAD_PEER = "ld.shared::cluster.f32 {$w0}, [{$r0}];"


@cute.jit
def load(text: cutlass.Constexpr, pointers: list, offset: cutlass.Int32, policy: list):
    """Four words from each pointer."""
    words = []
    for i in cutlass.range_constexpr(len(pointers)):
        words += read(text, (pointers[i] + offset).toint(), 4, policy)
    return words


@cute.kernel
def k3_attention_projection_cute_mma_stream(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, TILE: cutlass.Constexpr, SPLIT: cutlass.Constexpr, CHUNKS: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, WARPS_N: cutlass.Constexpr, WARPS_K: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; ``rows <= ROWS``.

    Cluster i owns w rows ``i * TILE`` onwards, its block r the r-th part of K, warp (wk, wn) of that every
    ``WARPS_K``-th block of ``CHUNKS * 32`` columns from wk on. A lane loads 8 neighbouring columns of a w row
    in one go, a warp one block of columns of ``8 // CHUNKS`` rows. The MMA sees each chunk of 32 columns as a
    row of its own, of x and of w; of its products only those of equal chunks count. So a wide contiguous load
    is an MMA operand as it stands. Within 32 columns K is permuted, for x and w alike.
    Sums: MMAs of a (warp, chunk) ascending, then these by wk and chunk ascending, then r ascending.
    """
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    outputs, hidden = cute.size(w, mode=[0]), cute.size(w, mode=[1])
    threads = 32 * WARPS_N * WARPS_K
    tokens = power_of_two(ROWS)
    per_tile = 8 // CHUNKS
    n_tiles = -(-TILE // (per_tile * WARPS_N))
    a_rows = CHUNKS * tokens
    m_tiles, halves = -(-a_rows // 16), 1 if a_rows <= 8 else 2
    width = 32 * CHUNKS
    steps = hidden // (width * SPLIT * WARPS_K)
    depth = min(DEPTH, steps)
    stride = width * WARPS_K
    n0, rank = block // SPLIT * TILE, block % SPLIT
    wn, wk = warp % WARPS_N, warp // WARPS_N
    group, quad = lane // 4, lane % 4
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()

    # rows that are not there repeat the last one: the same address, so no more traffic
    start = rank * (hidden // SPLIT) + wk * width + quad * 8
    w_at, x_at = [], []
    for j in cutlass.range_constexpr(n_tiles):
        row = cutlass.min(n0 + cutlass.min((wn * n_tiles + j) * per_tile + group // CHUNKS, TILE - 1), outputs - 1)
        w_at.append(w.iterator + (Int64(row) * hidden + start + group % CHUNKS * 32))
    for m in cutlass.range_constexpr(m_tiles):
        for h in cutlass.range_constexpr(halves):
            a = m * 16 + h * 8 + group
            x_at.append(
                x.iterator
                + (cutlass.min(a % tokens, rows - 1) * hidden + start + cutlass.min(a // tokens, CHUNKS - 1) * 32)
            )

    policy = Int64(EVICT_FIRST)
    acc = [Float32(0.0)] * (m_tiles * n_tiles * 4)
    w_in = [load(LOAD_W, w_at, s * stride, [policy]) for s in range(depth)]
    arch.griddepcontrol_wait()
    x_in = [load(LOAD_X, x_at, s * stride, []) for s in range(depth)]
    for r in cutlass.range(steps // depth - 1, unroll=1):
        for d in cutlass.range_constexpr(depth):
            acc = multiply(acc, w_in[d], x_in[d], halves)
            w_in[d] = load(LOAD_W, w_at, ((r + 1) * depth + d) * stride, [policy])
            x_in[d] = load(LOAD_X, x_at, ((r + 1) * depth + d) * stride, [])
    rest = steps % depth
    for d in cutlass.range_constexpr(depth):
        acc = multiply(acc, w_in[d], x_in[d], halves)
        if cutlass.const_expr(d < rest):
            w_in[d] = load(LOAD_W, w_at, (steps - rest + d) * stride, [policy])
            x_in[d] = load(LOAD_X, x_at, (steps - rest + d) * stride, [])
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    for d in cutlass.range_constexpr(rest):
        acc = multiply(acc, w_in[d], x_in[d], halves)

    # the products of equal chunks: one part a warp and chunk
    parts, size = WARPS_K * CHUNKS, ROWS * TILE
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(parts * size), byte_alignment=16)
    for m in cutlass.range_constexpr(m_tiles):
        for j in cutlass.range_constexpr(n_tiles):
            for e in cutlass.range_constexpr(2 * halves):
                a, column = m * 16 + e // 2 * 8 + group, quad * 2 + e % 2
                row, n = a % tokens, (wn * n_tiles + j) * per_tile + column // CHUNKS
                chunk = column % CHUNKS
                if a // tokens == chunk and row < ROWS and n < TILE:
                    sums[(wk * CHUNKS + chunk) * size + row * TILE + n] = acc[(m * n_tiles + j) * 4 + e]
    arch.sync_threads()
    elements = rows * TILE
    if cutlass.const_expr(SPLIT > 1):
        for e in cutlass.range(t, elements, threads, unroll=1):
            total = sums[e]
            for k in cutlass.range_constexpr(1, parts):
                total += sums[e + k * size]
            sums[e] = total
        arch.cluster_arrive()
        arch.cluster_wait()
        share = -(-size // SPLIT)
        for e in cutlass.range(rank * share + t, cutlass.min(elements, (rank + 1) * share), threads, unroll=1):
            got = []
            for r in cutlass.range_constexpr(SPLIT):
                at = arch.map_dsmem_ptr(sums.iterator, r) + e
                got.append(arch.inline_ptx(LOAD_PEER, write_only_types=[Float32], read_only_args=[at]))
            total = got[0]
            for r in cutlass.range_constexpr(1, SPLIT):
                total += got[r]
            if n0 + e % TILE < outputs:
                out[e // TILE, n0 + e % TILE] = total.to(BFloat16)
        # nobody leaves while a peer still reads his sums
        arch.cluster_arrive_relaxed()
        arch.cluster_wait()
    else:
        for e in cutlass.range(t, elements, threads, unroll=1):
            total = sums[e]
            for k in cutlass.range_constexpr(1, parts):
                total += sums[e + k * size]
            if n0 + e % TILE < outputs:
                out[e // TILE, n0 + e % TILE] = total.to(BFloat16)


k3_attention_projection_cute_mma_stream.set_name_prefix(
    "k3_attention_projection_cute_mma_stream", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, TILE: cutlass.Constexpr, SPLIT: cutlass.Constexpr, CHUNKS: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, WARPS_N: cutlass.Constexpr, WARPS_K: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster per ``TILE`` rows of w."""
    blocks = -(-cute.size(w, mode=[0]) // TILE) * SPLIT
    k3_attention_projection_cute_mma_stream(
        x, w, out, rows, ROWS, TILE, SPLIT, CHUNKS, DEPTH, WARPS_N, WARPS_K, RELEASE
    ).launch(grid=[blocks, 1, 1], block=[32 * WARPS_N * WARPS_K, 1, 1], cluster=[SPLIT, 1, 1], stream=stream)
