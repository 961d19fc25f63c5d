"""Parts of the TMA kernels that are the same with wgmma and with tcgen05: barriers, producer warps, how a cluster meets."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Int16, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""L2 policies: weights are read once, x by every cluster."""


@cute.jit
def tma_loads(w: cute.Tensor, x: cute.Tensor, TILES: cutlass.Constexpr):
    """Host side: (copy of w, its coordinates, copy of x, its coordinates). x goes to all places of a cluster in one copy."""
    one, many = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
    made = []
    for matrix, height, copy in ((w, TILES.tile_rows, one), (x, TILES.n, many if TILES.multicast > 1 else one)):
        rows = cute.make_layout((height, 64), stride=(64, 1))
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, rows)
        made += cpasync.make_tiled_tma_atom(copy, matrix, layout, (height, 64))
    return made


@cute.jit
def rings(ring: cute.Pointer, TILES: cutlass.Constexpr):
    """The stages of w and of x in shared memory, 128-byte swizzled: [rows, 64, boxes, stages] each."""
    made = []
    for start, rows, height in ((0, TILES.tile_rows, TILES.w_rows), (TILES.x_offset, TILES.n, TILES.n)):
        swizzled = cute.recast_ptr(ring + start, cute.make_swizzle(3, 4, 3), dtype=BFloat16)
        box = height * 64
        layout = cute.make_layout((rows, 64, TILES.boxes, TILES.stages), stride=(64, 1, box, TILES.boxes * box))
        made.append(cute.make_tensor(swizzled, layout))
    return made


@cute.jit
def boxes_of(
    load: cute.CopyAtom, matrix: cute.Tensor, ring: cute.Tensor, HEIGHT: cutlass.Constexpr, block: Int32
):  # fmt: skip
    """(source, target) of a matrix' copies: source[None, column box], target[None, box of a stage, stage]."""
    boxes = cute.local_tile(matrix, (HEIGHT, 64), (block, None))
    target, source = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return source, target


@cute.jit
def init_full(full: cute.Pointer, TILES: cutlass.Constexpr):
    """First producer warp: the barriers that its own copies need. One arrival, its own, and the bytes of a stage."""
    with arch.elect_one():
        for stage in cutlass.range_constexpr(TILES.stages):
            arch.mbarrier_init(full + stage, 1)
    arch.mbarrier_init_fence()
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def init_others(
    full: cute.Pointer, rank: Int32, RELEASES: cutlass.Constexpr, FINISHED: cutlass.Constexpr,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """Another warp, beside the first copies: ``RELEASES`` arrivals of a block free a stage."""
    with arch.elect_one():
        for stage in cutlass.range_constexpr(TILES.stages):
            arch.mbarrier_init(full + TILES.stages + stage, RELEASES)
            if cutlass.const_expr(TILES.multicast > 1):
                arch.mbarrier_init(full + TILES.x_empty + stage, RELEASES * TILES.multicast)
        if cutlass.const_expr(FINISHED):
            arch.mbarrier_init(full + TILES.finished, 1)
        if cutlass.const_expr(TILES.reduce == "push" and TILES.split > 1):
            arch.mbarrier_init(full + TILES.arrived, 1)
            arch.mbarrier_arrive_and_expect_tx(full + TILES.arrived, TILES.pushed_bytes(rank))
    arch.mbarrier_init_fence()
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def greet(TILES: cutlass.Constexpr):
    """All threads, once the barriers of the block are initialised: ``mbarrier_init_fence`` made them visible to the cluster."""
    if cutlass.const_expr(TILES.greets):
        arch.cluster_arrive_relaxed()


@cute.jit
def meet(TILES: cutlass.Constexpr):
    """All threads, before any of them touches a peer: the peers' barriers are there."""
    if cutlass.const_expr(TILES.greets):
        arch.cluster_wait()


@cute.jit
def leave(TILES: cutlass.Constexpr):
    """All threads, when they have written the last to their peers."""
    if cutlass.const_expr(TILES.greets and not TILES.pulls):
        arch.cluster_arrive_relaxed()


@cute.jit
def left(TILES: cutlass.Constexpr):
    """All threads, at the end: no block ends while its copies, sums or arrivals are on their way to a peer."""
    if cutlass.const_expr(TILES.greets and not TILES.pulls):
        arch.cluster_wait()


@cute.jit
def next_tile(k: Int32, first: Int32, last: Int32, TILES: cutlass.Constexpr):
    """The K tile after ``k``."""
    k += 1
    if cutlass.const_expr(TILES.k_start == "spread"):  # noqa: SIM102, compiled in or not, then asked at run time
        if k == last:
            k = first
    return k


@cute.jit
def copy_w(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, k: Int32, stage: Int32,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """The weights of one stage, and the count of all bytes that will arrive in it."""
    with arch.elect_one():
        arch.mbarrier_arrive_and_expect_tx(full + stage, TILES.expected_bytes)
    for box in cutlass.range_constexpr(TILES.boxes):
        cute.copy(
            load, source[None, k * TILES.boxes + box], target[None, box, stage],
            tma_bar_ptr=full + stage, cache_policy=Int64(EVICT_FIRST),
        )  # fmt: skip


@cute.jit
def copy_x(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, k: Int32, stage: Int32,
    mask: Int16, TILES: cutlass.Constexpr,
):  # fmt: skip
    """One stage of x, to this block or to all blocks of ``mask``, in each of which it counts for the same barrier."""
    for box in cutlass.range_constexpr(TILES.boxes):
        place, column = target[None, box, stage], source[None, k * TILES.boxes + box]
        if cutlass.const_expr(TILES.multicast > 1):
            cute.copy(load, column, place, tma_bar_ptr=full + stage, mcast_mask=mask, cache_policy=Int64(EVICT_LAST))
        else:
            cute.copy(load, column, place, tma_bar_ptr=full + stage, cache_policy=Int64(EVICT_LAST))


@cute.jit
def first_weights(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, span: tuple[Int32, Int32, Int32],
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """First producer warp: the weights of the first stages. They depend on no kernel before this one, and on no peer."""
    first, last, k = span
    for stage in cutlass.range_constexpr(TILES.stages):
        copy_w(load, source, target, full, k, stage, TILES)
        k = next_tile(k, first, last, TILES)


@cute.jit
def feed(
    w: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor], x: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor],
    full: cute.Pointer, span: tuple[Int32, Int32, Int32], rank: Int32, place: Int32,
    W: cutlass.Constexpr, X: cutlass.Constexpr, TILES: cutlass.Constexpr,
):  # fmt: skip
    """A producer warp behind the dependency wait: x of the first stages, then each stage that gets free.

    ``W``, ``X``: whether it loads weights, and x. ``w``, ``x``: load, source, target. ``span``: first K tile of the
    block, end, start. x of a stage is sent by one block of the cluster, when all of them have used the last one.
    """
    w_load, w_source, w_target = w
    x_load, x_source, x_target = x
    first, last, k = span
    empty, x_empty = full + TILES.stages, full + TILES.x_empty
    mask = (Int32(TILES.places_mask) << rank).to(Int16)
    for stage in cutlass.range_constexpr(TILES.stages):
        if cutlass.const_expr(X):  # noqa: SIM102
            if place == TILES.sender(stage):
                copy_x(x_load, x_source, x_target, full, k, stage, mask, TILES)
        k = next_tile(k, first, last, TILES)
    stage, phase = Int32(0), Int32(0)
    for _ in cutlass.range(first + TILES.stages, last, unroll=1):
        if cutlass.const_expr(W):
            arch.mbarrier_wait(empty + stage, phase)
            copy_w(w_load, w_source, w_target, full, k, stage, TILES)
        if cutlass.const_expr(X):  # noqa: SIM102
            if place == TILES.sender(stage):
                if cutlass.const_expr(TILES.multicast > 1 or not W):
                    arch.mbarrier_wait(x_empty + stage, phase)
                copy_x(x_load, x_source, x_target, full, k, stage, mask, TILES)
        k = next_tile(k, first, last, TILES)
        stage += 1
        if stage == TILES.stages:
            stage = Int32(0)
            phase ^= 1
