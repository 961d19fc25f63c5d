"""CuTe DSL kernel for Blackwell: weights and x by TMA through a ring, tcgen05 MMA, K split over a cluster."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.experimental.primitives as prim
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute import arch, nvgpu
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from .cute_tma_parts import (
    boxes_of,
    feed,
    first_weights,
    greet,
    init_full,
    init_others,
    leave,
    left,
    meet,
    rings,
    tma_loads,
)
from .cute_tma_sums import add_and_store, pull, push


@cute.kernel
def k3_attention_projection_cute_tcgen05(
    w_load: cute.CopyAtom, w: cute.Tensor, x_load: cute.CopyAtom, x: cute.Tensor, out: cute.Tensor, rows: Int32,
    TILES: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; weights are the MMA's M, token rows its N.

    Block (rank, tile) sums K tiles ``first(rank)`` to ``first(rank + 1)`` in ascending order from ``start`` on, 16
    columns an MMA; the ranks of a tile are added in ascending order. ``rows`` is at most the row count compiled for; the
    tensor map of x ends there, so that rows beyond it are zeros. Warps: the consumers, which empty tensor memory (four
    for each 128 weight rows), the producer of w, that of x, the one that issues MMAs.
    """
    t, _, _ = arch.thread_idx()
    rank, tile, _ = arch.block_idx()
    warp = arch.make_warp_uniform(arch.warp_idx())
    CONSUMERS, STAGES, BOXES, N = TILES.consumers, TILES.stages, TILES.boxes, TILES.n
    ISSUER = CONSUMERS + TILES.producers
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    smem = SmemAllocator()
    ring = smem.allocate_array(BFloat16, TILES.ring_bytes // 2, byte_alignment=1024)
    full = smem.allocate_array(Int64, TILES.barriers + 1)
    empty, x_empty, finished, arrived = (full + i for i in (STAGES, TILES.x_empty, TILES.finished, TILES.arrived))
    columns = cute.recast_ptr(full + TILES.barriers, dtype=Int32)
    incoming = cute.recast_ptr(ring, dtype=Float32)
    if cutlass.const_expr(TILES.incoming_bytes > 0):
        incoming = smem.allocate_array(Float32, TILES.incoming_bytes // 4, byte_alignment=16)
    w_ring, x_ring = rings(ring, TILES)
    w_source, w_target = boxes_of(w_load, w, w_ring, TILES.tile_rows, tile)
    x_source, x_target = boxes_of(x_load, x, x_ring, N, Int32(0))
    first, last, place = TILES.first(rank), TILES.first(rank + 1), TILES.place(tile)
    span = (first, last, TILES.start(first, last, tile))
    if warp == CONSUMERS:
        cpasync.prefetch_descriptor(w_load)
        init_full(full, TILES)
        greet(TILES)
        first_weights(w_load, w_source, w_target, full, span, TILES)
    else:
        if warp == 0:
            cpasync.prefetch_descriptor(x_load)
            init_others(full, rank, 1, True, TILES)
        greet(TILES)
    if warp == ISSUER:
        arch.alloc_tmem(TILES.tmem_columns, columns)
        arch.relinquish_tmem_alloc_permit()
    arch.sync_threads()
    if cutlass.const_expr(TILES.multicast > 1):
        meet(TILES)
    # every warp waits: all of them store, and no block may end before its predecessors have
    arch.griddepcontrol_wait()
    w_copies, x_copies = (w_load, w_source, w_target), (x_load, x_source, x_target)
    if warp == CONSUMERS:
        feed(w_copies, x_copies, full, span, rank, place, True, TILES.producers == 1, TILES)
        if cutlass.const_expr(RELEASE == "loads"):
            arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(TILES.producers == 2):  # noqa: SIM102, compiled in or not, then asked at run time
        if warp == CONSUMERS + 1:
            feed(w_copies, x_copies, full, span, rank, place, False, True, TILES)
    major = nvgpu.OperandMajorMode.K
    mma = cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(
            BFloat16, Float32, (128, N, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, major, major
        )
    )
    BLOCKS = TILES.mma_tile // 128
    held = arch.retrieve_tmem_ptr(Float32, 16, columns)
    acc = cute.make_tensor(held, mma.make_fragment_C(mma.partition_shape_C((TILES.mma_tile, N))).layout)
    if warp == ISSUER:
        steps = (4, BOXES)
        w_tile = cute.make_tensor(
            w_ring.iterator,
            cute.make_layout(
                ((128, 16), BLOCKS, steps, STAGES),
                stride=((64, 1), 128 * 64, (16, TILES.w_rows * 64), BOXES * TILES.w_rows * 64),
            ),
        )
        x_tile = cute.make_tensor(
            x_ring.iterator,
            cute.make_layout(((N, 16), 1, steps, STAGES), stride=((64, 1), 0, (16, N * 64), BOXES * N * 64)),
        )
        w_part, x_part = mma.make_fragment_A(w_tile), mma.make_fragment_B(x_tile)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        stage, phase = Int32(0), Int32(0)
        for step in cutlass.range(first, last, unroll=1):
            arch.mbarrier_wait(full + stage, phase)
            for k in cutlass.range_constexpr(TILES.k_tile // 16):
                cute.gemm(mma, acc, w_part[None, None, k, stage], x_part[None, None, k, stage], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with arch.elect_one():
                tcgen05.commit(empty + stage)
                if cutlass.const_expr(TILES.multicast > 1):  # noqa: SIM102
                    # only what the sender waits for: it may have ended otherwise
                    if step + STAGES < last:
                        sender = TILES.peer(rank, TILES.sender(stage))
                        tcgen05.commit(x_empty + stage, Int32(1) << sender)
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
        if cutlass.const_expr(TILES.reduce == "pull"):
            cute.autovec_copy(words, target)
        else:
            if cutlass.const_expr(TILES.multicast == 1):
                meet(TILES)
            taken = share.partition_D(cute.make_identity_tensor(((128, N), 1, 1)))
            places = [(warp // 4 * 128 + taken[i][0][0], taken[i][0][1]) for i in range(4 * TILES.register_groups)]
            if warp < TILES.live_warps:
                push(words, incoming, arrived, t, rank, tile, TILES)
            leave(TILES)
            if warp < TILES.live_warps:
                add_and_store(words, places, incoming, arrived, out, rows, t, rank, tile, TILES)
    if cutlass.const_expr(TILES.reduce == "pull"):
        leave(TILES)
        pull(partial, out, rows, t, rank, tile, TILES)
    elif warp >= CONSUMERS:
        if cutlass.const_expr(TILES.multicast == 1):
            meet(TILES)
        leave(TILES)
    arch.sync_threads()
    if warp == ISSUER:
        prim.tcgen05_fence("after_thread_sync")
        arch.dealloc_tmem(held, TILES.tmem_columns)
    left(TILES)


k3_attention_projection_cute_tcgen05.set_name_prefix(
    "k3_attention_projection_cute_tcgen05", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    TILES: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: clusters of ``split`` x ``multicast`` blocks, ``split`` for each ``tile_rows`` rows of w."""
    w_load, w_map, x_load, x_map = tma_loads(w, x, TILES)
    k3_attention_projection_cute_tcgen05(w_load, w_map, x_load, x_map, out, rows, TILES, RELEASE).launch(
        grid=[TILES.split, TILES.grid_tiles, 1], block=[TILES.threads, 1, 1], cluster=[TILES.split, TILES.multicast, 1],
        smem=TILES.shared_bytes, stream=stream, use_pdl=True,
    )  # fmt: skip
