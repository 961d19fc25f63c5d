"""CuTe DSL kernels of the MLA core: query and new cache rows, attention on warp-level tensor cores, merge and head values."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import EXP2, LOG2E, unary
from ..cute_stages import stage
from ..cute_streaming import read
from .cute_mma_front import front
from .cute_mma_parts import LOAD_WORD, copy_keys, copy_queries, shared_float
from .cute_mma_tiles import keep_weights, leave, more_sums, scores_of, seen_only, tell_highest
from .cute_mma_value import value


@cute.jit
def address_of(tensor: Any):
    """Of a tensor that may be missing."""
    return None if cutlass.const_expr(tensor is None) else tensor.iterator.toint()


@cute.kernel
def k3_mla_cute_mma_query(
    proj: cute.Tensor, q_a_norm: cute.Tensor, kv_a_norm: cute.Tensor, q_b: cute.Tensor, w_uk: cute.Tensor, k_scale: Any,
    table: cute.Tensor, context: cute.Tensor, query: cute.Tensor, cache: cute.Tensor, rows: Int32,
    F: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """Absorbed queries [rows, heads, latent + rope] in the cache's dtype, and the cache's new rows."""
    block, _, _ = arch.block_idx()
    shared = SmemAllocator().allocate_array(Int32, F.front_bytes // 4, byte_alignment=128).toint()
    front(
        proj.iterator.toint(), q_a_norm.iterator.toint(), kv_a_norm.iterator.toint(), q_b.iterator.toint(),
        w_uk.iterator.toint(), address_of(k_scale), table.iterator.toint(), context.iterator.toint(),
        query.iterator.toint(), cache.iterator.toint(), rows, block, shared, F, RELEASE, None, None,
    )  # fmt: skip


@cute.kernel
def k3_mla_cute_mma_value(
    partial: cute.Tensor, lse: cute.Tensor, w_uv: cute.Tensor, proj: cute.Tensor, out: cute.Tensor, k_scale: Any, rows: Int32,
    F: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, heads * v] from the parts: merged, through W_UV, gated."""
    block, _, _ = arch.block_idx()
    shared = SmemAllocator().allocate_array(Int32, F.value_bytes // 4, byte_alignment=128).toint()
    value(
        partial.iterator.toint(), lse.iterator.toint(), w_uv.iterator.toint(), proj.iterator.toint(), out.iterator.toint(),
        address_of(k_scale), rows, block, shared, F, RELEASE, None, None,
    )  # fmt: skip


@cute.kernel
def k3_mla_cute_mma_attend(
    query: cute.Tensor, cache: cute.Tensor, k_scale: Any, table: cute.Tensor, context: cute.Tensor,
    partial: cute.Tensor, lse: cute.Tensor, rows: Int32,
    A: cutlass.Constexpr, SCALE: cutlass.Constexpr, EARLY: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """Part s of a request: partial[s, query, latent] FP32, normalised, and lse[s, query], base 2, of its sum of weights.

    Tiles ascending with a running maximum over the whole tile. A part without tokens, or a query that sees none of
    them, leaves minus infinity and no sums.

    ``EARLY``: keys of tokens before the step are asked for ahead of the dependency wait, and so are table and context.
    The launch before this one must then release only behind its own wait: all it did not write itself is there.
    """
    stage(A.build, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    split, group_of = block % A.splits, block // A.splits
    request, first_query = group_of // A.groups, group_of % A.groups * A.queries
    pages, keys_at = table.iterator.toint(), cache.iterator.toint()
    shared = SmemAllocator().allocate_array(Int32, A.shared_bytes // 4, byte_alignment=128).toint()
    live_rows = cutlass.min(rows - request * A.q_len, A.q_len)
    before, first, last = Int32(0), Int32(0), Int32(0)
    if cutlass.const_expr(EARLY):  # noqa: SIM102, compiled in or not, then asked at run time
        if live_rows > 0:
            before, first, last = bounds(context.iterator.toint(), request, live_rows, split, A)
            begin(keys_at, pages, shared, request, first, last, before, t, True, A)
    arch.griddepcontrol_wait()
    stage(A.build, "woken")
    if live_rows > 0:
        if cutlass.const_expr(not EARLY):
            before, first, last = bounds(context.iterator.toint(), request, live_rows, split, A)
        live = cutlass.min(live_rows * A.heads - first_query, A.queries)
        at_query = request * A.q_len * A.heads + first_query
        copy_queries(query.iterator.toint(), shared + A.query_at, at_query, live, t, 256, A)
        begin(keys_at, pages, shared, request, first, last, before if cutlass.const_expr(EARLY) else first, t, False, A)
        if cutlass.const_expr(RELEASE == "loads"):
            arch.griddepcontrol_launch_dependents()
        stage(A.build, "asked")
        part_of(
            keys_at, k_scale, pages, partial, lse, shared, request, before, first, last, live, at_query, split, first_query,
            t, lane, warp, A, SCALE, None, None,
        )  # fmt: skip


@cute.jit
def bounds(context: Int64, request: Int32, live_rows: Int32, split: Int32, A: cutlass.Constexpr):
    """(tokens before the step, first token of the part, the one behind its last)."""
    (held,) = read(LOAD_WORD, context + Int64(request) * 4, 1, [])
    before = Int32(held)
    tokens = before + live_rows
    first = split * A.part(tokens)
    return before, first, cutlass.min(first + A.part(tokens), tokens)


@cute.jit
def begin(
    keys_at: Int64, pages: Int64, shared: Int32, request: Int32, first: Int32, last: Int32, old: Int32, t: Int32,
    EARLY: cutlass.Constexpr, A: cutlass.Constexpr,
):  # fmt: skip
    """Copies of the first tiles: early those that lie whole below token ``old``, then the others, a group a tile.

    The first group holds whatever was asked for early.
    """
    for s in cutlass.range_constexpr(A.stages - 1):
        start = first + s * A.tile
        whole = start + A.tile <= old
        due = whole if cutlass.const_expr(EARLY) else not whole
        if (start < last) & due:
            copy_keys(keys_at, pages, shared + s * A.stage_bytes, request, start, last, t, A)
        if cutlass.const_expr(not EARLY):
            arch.cp_async_commit_group()


@cute.jit
def part_of(
    keys_at: Int64, k_scale: Any, pages: Int64, partial: cute.Tensor, lse: cute.Tensor, shared: Int32, request: Int32, before: Int32, first: Int32, last: Int32, live: Int32, at_query: Int32, split: Int32,
    first_query: Int32, t: Int32, lane: Int32, warp: Int32, A: cutlass.Constexpr, SCALE: cutlass.Constexpr, rank: Int32 | None,
    D: cutlass.Constexpr,
):  # fmt: skip
    """All tiles of one part, and what they leave. ``before`` counts tokens on all ranks, ``first`` and ``last`` those held here."""
    group, quad = lane // 4, lane % 4
    wm, wn = warp % A.warps_m, warp // A.warps_m
    scale = Float32(SCALE * LOG2E)
    if cutlass.const_expr(A.fp8):
        scale = scale * k_scale[0]
    KIND = "f16" if A.fp8 else "bf16"
    sees = []
    for n in cutlass.range_constexpr(A.n_own):
        for e in cutlass.range_constexpr(2):
            own = before + (first_query + (wn * A.n_own + n) * 8 + quad * 2 + e) // A.heads
            sees.append(own if cutlass.const_expr(D is None) else D.held(own + 1, rank) - 1)
    highest = [Float32(-Float32.inf)] * (2 * A.n_tiles)
    weight_sums = [Float32(0.0)] * (2 * A.n_own)
    acc = [Float32(0.0)] * (4 * A.m_sums * A.n_tiles)
    tiles = (last - first + A.tile - 1) // A.tile
    for i in cutlass.range(cutlass.max(tiles, 0), unroll=1):
        arch.cp_async_wait_group(A.stages - 2)
        arch.sync_threads()
        start = first + i * A.tile
        ahead = start + (A.stages - 1) * A.tile
        if ahead < last:
            copy_keys(
                keys_at, pages, shared + (i + A.stages - 1) % A.stages * A.stage_bytes, request, ahead, last, t, A
            )
        arch.cp_async_commit_group()
        keys = shared + i % A.stages * A.stage_bytes
        scores = [Float32(0.0)] * (4 * A.m_own * A.n_own)
        if wn < A.warps_n:
            scores = scores_of(keys, shared, wm, wn, lane, A, KIND)
            scores = seen_only(scores, sees, start + wm * A.m_own * 16 + group, last, scale, A)
            tell_highest(scores, shared + A.highest_at, wm, wn, lane, A)
        arch.sync_threads()
        shrink, base, raised = [], [], []
        for n in cutlass.range_constexpr(A.n_tiles):
            for e in cutlass.range_constexpr(2):
                top = highest[2 * n + e]
                for m in cutlass.range_constexpr(A.warps_m):
                    at = shared + A.highest_at + (m * A.queries + n * 8 + quad * 2 + e) * 4
                    top = arch.fmax(top, shared_float(at))
                # a query that sees none of these tokens nor any before them: nothing to subtract, and nothing added
                least = top if top > Float32(-Float32.inf) else Float32(0.0)
                shrink.append(unary(EXP2, highest[2 * n + e] - least))
                base.append(least)
                raised.append(top)
        highest = raised
        acc = [one * shrink[c // 4 % A.n_tiles * 2 + c % 2] for c, one in enumerate(acc)]
        if wn < A.warps_n:
            weight_sums = keep_weights(scores, base, shrink, weight_sums, shared + A.weights_at, wm, wn, lane, A)
        arch.sync_threads()
        acc = more_sums(acc, keys + warp * A.latents * A.item, shared + A.weights_at, lane, A, KIND)
    arch.cp_async_wait_group(0)
    arch.sync_threads()
    stage(A.build, "product")
    leave(partial, lse, acc, highest, weight_sums, shared, wm, wn, live, split * A.slot + at_query, t, lane, warp, A)
    stage(A.build, "finished")


k3_mla_cute_mma_query.set_name_prefix("k3_mla_cute_mma_query", remove_cutlass_symbol=True, keep_mangled_name=False)
k3_mla_cute_mma_attend.set_name_prefix("k3_mla_cute_mma_attend", remove_cutlass_symbol=True, keep_mangled_name=False)
k3_mla_cute_mma_value.set_name_prefix("k3_mla_cute_mma_value", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_query(
    proj: cute.Tensor, q_a_norm: cute.Tensor, kv_a_norm: cute.Tensor, q_b: cute.Tensor, w_uk: cute.Tensor, k_scale: Any,
    table: cute.Tensor, context: cute.Tensor, query: cute.Tensor, cache: cute.Tensor, rows: Int32,
    F: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster for each head and 16 rows, and clusters that insert."""
    k3_mla_cute_mma_query(
        proj, q_a_norm, kv_a_norm, q_b, w_uk, k_scale, table, context, query, cache, rows, F, RELEASE
    ).launch(grid=[F.head_blocks + F.insert_blocks, 1, 1], block=[256, 1, 1], cluster=[F.cluster, 1, 1], stream=stream)


@cute.jit
def launch_attend(
    query: cute.Tensor, cache: cute.Tensor, k_scale: Any, table: cute.Tensor, context: cute.Tensor, partial: cute.Tensor,
    lse: cute.Tensor, rows: Int32,
    A: cutlass.Constexpr, SCALE: cutlass.Constexpr, EARLY: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block for each part and group of queries of a request."""
    k3_mla_cute_mma_attend(query, cache, k_scale, table, context, partial, lse, rows, A, SCALE, EARLY, RELEASE).launch(
        grid=[A.blocks, 1, 1], block=[256, 1, 1], stream=stream
    )


@cute.jit
def launch_value(
    partial: cute.Tensor, lse: cute.Tensor, w_uv: cute.Tensor, proj: cute.Tensor, out: cute.Tensor, k_scale: Any, rows: Int32,
    F: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster for each head and 16 rows."""
    k3_mla_cute_mma_value(partial, lse, w_uv, proj, out, k_scale, rows, F, RELEASE).launch(
        grid=[F.head_blocks, 1, 1], block=[256, 1, 1], cluster=[F.cluster, 1, 1], stream=stream
    )
