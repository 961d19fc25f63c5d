"""CuTe DSL kernel for Blackwell: weights and x by TMA through a ring, tcgen05 MMA, K split over a cluster."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.experimental.primitives as prim
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute import arch, nvgpu
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from .cute_tma_parts import boxes_of, first_weights, reduce_and_store, the_rest


@cute.kernel
def k3_attention_projection_cute_tcgen05(
    w_load: cute.CopyAtom, w: cute.Tensor, x_load: cute.CopyAtom, x: cute.Tensor, out: cute.Tensor, rows: Int32,
    TILES: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; weights are the MMA's M, token rows its N.

    Block (rank, tile) sums K tiles ``first(rank)`` to ``first(rank + 1)`` in ascending order, 16 columns an MMA;
    the blocks of a cluster are added in ascending rank. ``rows`` is at most the row count compiled for; the tensor
    map of x ends there, so that rows beyond it are zeros. Warps: the consumers, which empty tensor memory (four for
    each 128 weight rows), the producer, the one that issues MMAs.
    """
    t, _, _ = arch.thread_idx()
    rank, tile, _ = arch.block_idx()
    warp = arch.make_warp_uniform(arch.warp_idx())
    CONSUMERS, STAGES, BOXES, N = TILES.consumers, TILES.stages, TILES.boxes, TILES.n
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    smem = SmemAllocator()
    ring = smem.allocate_array(BFloat16, TILES.ring_bytes // 2, byte_alignment=1024)
    full = smem.allocate_array(Int64, TILES.barriers + 1)
    empty, finished = full + STAGES, full + 2 * STAGES
    columns = cute.recast_ptr(full + TILES.barriers, dtype=Int32)
    swizzled = cute.recast_ptr(ring, cute.make_swizzle(3, 4, 3), dtype=BFloat16)
    swizzled_x = cute.recast_ptr(ring + TILES.x_offset, cute.make_swizzle(3, 4, 3), dtype=BFloat16)
    w_box, x_box = TILES.w_rows * 64, N * 64
    w_ring = cute.make_tensor(
        swizzled, cute.make_layout((TILES.tile_rows, 64, BOXES, STAGES), stride=(64, 1, w_box, BOXES * w_box))
    )
    x_ring = cute.make_tensor(
        swizzled_x, cute.make_layout((N, 64, BOXES, STAGES), stride=(64, 1, x_box, BOXES * x_box))
    )
    w_source, w_target = boxes_of(w_load, w, w_ring, TILES.tile_rows, tile)
    x_source, x_target = boxes_of(x_load, x, x_ring, N, Int32(0))
    first, last = TILES.first(rank), TILES.first(rank + 1)
    if warp == CONSUMERS:
        cpasync.prefetch_descriptor(w_load)
        cpasync.prefetch_descriptor(x_load)
        with arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                arch.mbarrier_init(full + stage, 1)
                arch.mbarrier_init(empty + stage, 1)
            arch.mbarrier_init(finished, 1)
        arch.mbarrier_init_fence()
        arch.fence_proxy("async.shared", space="cta")
        first_weights(w_load, w_source, w_target, full, first, TILES)
    if warp == CONSUMERS + 1:
        arch.alloc_tmem(TILES.tmem_columns, columns)
        arch.relinquish_tmem_alloc_permit()
    arch.sync_threads()
    # every warp waits: all of them store, and no block may end before its predecessors have
    arch.griddepcontrol_wait()
    if warp == CONSUMERS:
        the_rest(w_load, w_source, w_target, x_load, x_source, x_target, full, empty, first, last, TILES)
        if cutlass.const_expr(RELEASE == "loads"):
            arch.griddepcontrol_launch_dependents()
    major = nvgpu.OperandMajorMode.K
    mma = cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(
            BFloat16, Float32, (128, N, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, major, major
        )
    )
    BLOCKS = TILES.mma_tile // 128
    held = arch.retrieve_tmem_ptr(Float32, 16, columns)
    acc = cute.make_tensor(held, mma.make_fragment_C(mma.partition_shape_C((TILES.mma_tile, N))).layout)
    if warp == CONSUMERS + 1:
        steps = (4, BOXES)
        w_tile = cute.make_tensor(
            swizzled,
            cute.make_layout(
                ((128, 16), BLOCKS, steps, STAGES), stride=((64, 1), 128 * 64, (16, w_box), BOXES * w_box)
            ),
        )
        x_tile = cute.make_tensor(
            swizzled_x,
            cute.make_layout(((N, 16), 1, steps, STAGES), stride=((64, 1), 0, (16, x_box), BOXES * x_box)),
        )
        w_part, x_part = mma.make_fragment_A(w_tile), mma.make_fragment_B(x_tile)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(first, last, unroll=1):
            arch.mbarrier_wait(full + stage, phase)
            for k in cutlass.range_constexpr(TILES.k_tile // 16):
                cute.gemm(mma, acc, w_part[None, None, k, stage], x_part[None, None, k, stage], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with arch.elect_one():
                tcgen05.commit(empty + stage)
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1
        with arch.elect_one():
            tcgen05.commit(finished)
    partial = cute.recast_ptr(ring, dtype=Float32)
    if warp < CONSUMERS:
        # all copies have arrived and all MMAs have read them: the sums take the ring's place
        arch.mbarrier_wait(finished, 0)
        prim.tcgen05_fence("after_thread_sync")
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x16), Float32)
        one = mma.make_fragment_C(mma.partition_shape_C((128, N))).layout
        block = cute.make_tensor(acc[None, warp // 4, 0].iterator, one)
        take = tcgen05.make_tmem_copy(load, block)
        share = take.get_slice(t % 128)
        sums = cute.make_tensor(
            partial + warp // 4 * 128, cute.make_layout(((128, N), 1, 1), stride=((1, TILES.pitch), 0, 0))
        )
        target = share.partition_D(sums)
        words = cute.make_rmem_tensor(target.shape, Float32)
        cute.copy(take, share.partition_S(block), words)
        arch.fence_view_async_tmem_load()
        prim.tcgen05_fence("before_thread_sync")
        cute.autovec_copy(words, target)
    if cutlass.const_expr(TILES.split > 1):
        arch.cluster_arrive()
        arch.cluster_wait()
    else:
        arch.sync_threads()
    if warp == CONSUMERS + 1:
        prim.tcgen05_fence("after_thread_sync")
        arch.dealloc_tmem(held, TILES.tmem_columns)
    reduce_and_store(partial, out, rows, t, rank, tile, TILES)
    if cutlass.const_expr(TILES.split > 1):
        # no block ends while another still reads its sums
        arch.cluster_arrive_relaxed()
        arch.cluster_wait()


k3_attention_projection_cute_tcgen05.set_name_prefix(
    "k3_attention_projection_cute_tcgen05", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    TILES: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: a cluster of ``split`` blocks for each ``tile_rows`` rows of w."""
    swizzle, copy = cute.make_swizzle(3, 4, 3), cpasync.CopyBulkTensorTileG2SOp()
    heights = (TILES.tile_rows, TILES.n)
    w_layout, x_layout = [
        cute.make_composed_layout(swizzle, 0, cute.make_layout((height, 64), stride=(64, 1))) for height in heights
    ]
    w_load, w_map = cpasync.make_tiled_tma_atom(copy, w, w_layout, (TILES.tile_rows, 64))
    x_load, x_map = cpasync.make_tiled_tma_atom(copy, x, x_layout, (TILES.n, 64))
    k3_attention_projection_cute_tcgen05(w_load, w_map, x_load, x_map, out, rows, TILES, RELEASE).launch(
        grid=[TILES.split, TILES.tiles, 1], block=[TILES.threads, 1, 1], cluster=[TILES.split, 1, 1],
        smem=TILES.shared_bytes, stream=stream, use_pdl=True,
    )  # fmt: skip
