"""CuTe DSL kernel for Hopper: weights and x by TMA through a ring, wgmma, K split over a cluster."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute import arch, nvgpu
from cutlass.cute.nvgpu import cpasync, warpgroup
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
def k3_attention_projection_cute_wgmma(
    w_load: cute.CopyAtom, w: cute.Tensor, x_load: cute.CopyAtom, x: cute.Tensor, out: cute.Tensor, rows: Int32,
    TILES: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; weights are the MMA's M, token rows its N.

    Block (rank, tile) sums K tiles ``first(rank)`` to ``first(rank + 1)`` in ascending order from ``start`` on, 16
    columns an MMA; the ranks of a tile are added in ascending order. ``rows`` is at most the row count compiled for; the
    tensor map of x ends there, so that rows beyond it are zeros. Warps: the consumers, the producer of w, that of x.
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
    incoming = cute.recast_ptr(ring, dtype=Float32)
    if cutlass.const_expr(TILES.incoming_bytes > 0):
        incoming = smem.allocate_array(Float32, TILES.incoming_bytes // 4, byte_alignment=16)
    empty, x_empty, arrived = full + STAGES, full + TILES.x_empty, full + TILES.arrived
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
            init_others(full, rank, CONSUMERS, False, TILES)
        greet(TILES)
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
    partial = cute.recast_ptr(ring, dtype=Float32)
    if warp < CONSUMERS:
        major = nvgpu.OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, N, 16), warpgroup.OperandSource.SMEM, major, major)
        mma = cute.make_tiled_mma(op, (CONSUMERS // 4, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, True)
        share = mma.get_slice(t)
        w_tile = cute.make_tensor(
            w_ring.iterator,
            cute.make_layout(
                (TILES.mma_tile, (64, BOXES), STAGES), stride=(64, (1, TILES.w_rows * 64), BOXES * TILES.w_rows * 64)
            ),
        )
        x_tile = cute.make_tensor(
            x_ring.iterator, cute.make_layout((N, (64, BOXES), STAGES), stride=(64, (1, N * 64), BOXES * N * 64))
        )
        w_part = mma.make_fragment_A(share.partition_A(w_tile))
        x_part = mma.make_fragment_B(share.partition_B(x_tile))
        sums = share.partition_C(
            cute.make_tensor(partial, cute.make_layout((TILES.mma_tile, N), stride=(1, TILES.pitch)))
        )
        acc = cute.make_rmem_tensor(sums.shape, Float32)
        acc.fill(0.0)
        stage, phase = Int32(0), Int32(0)
        for step in cutlass.range(first, last, unroll=1):
            arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(TILES.k_tile // 16):
                cute.gemm(mma, acc, w_part[None, None, k, stage], x_part[None, None, k, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            with arch.elect_one():
                arch.mbarrier_arrive(empty + stage)
                if cutlass.const_expr(TILES.multicast > 1):  # noqa: SIM102
                    # only what the sender waits for: it may have ended otherwise
                    if step + STAGES < last:
                        arch.mbarrier_arrive(x_empty + stage, TILES.peer(rank, TILES.sender(stage)))
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1
        if cutlass.const_expr(TILES.reduce == "pull"):
            # the sums take the ring's place once no warp reads it any more
            arch.barrier(barrier_id=1, number_of_threads=32 * CONSUMERS)
            cute.autovec_copy(acc, sums)
        else:
            places = share.partition_C(cute.make_identity_tensor((TILES.mma_tile, N)))
            if cutlass.const_expr(TILES.multicast == 1):
                meet(TILES)
            if warp < TILES.live_warps:
                push(acc, incoming, arrived, t, rank, tile, TILES)
            leave(TILES)
            if warp < TILES.live_warps:
                add_and_store(acc, places, incoming, arrived, out, rows, t, rank, tile, TILES)
    if cutlass.const_expr(TILES.reduce == "pull"):
        leave(TILES)
        pull(partial, out, rows, t, rank, tile, TILES)
    elif warp >= CONSUMERS:
        if cutlass.const_expr(TILES.multicast == 1):
            meet(TILES)
        leave(TILES)
    left(TILES)


k3_attention_projection_cute_wgmma.set_name_prefix(
    "k3_attention_projection_cute_wgmma", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    TILES: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: clusters of ``split`` x ``multicast`` blocks, ``split`` for each ``tile_rows`` rows of w."""
    w_load, w_map, x_load, x_map = tma_loads(w, x, TILES)
    k3_attention_projection_cute_wgmma(w_load, w_map, x_load, x_map, out, rows, TILES, RELEASE).launch(
        grid=[TILES.split, TILES.grid_tiles, 1], block=[TILES.threads, 1, 1], cluster=[TILES.split, TILES.multicast, 1],
        smem=TILES.shared_bytes, stream=stream, use_pdl=True,
    )  # fmt: skip
