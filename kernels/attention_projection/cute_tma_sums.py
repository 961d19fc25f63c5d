"""How the TMA kernels add the sums of a cluster's blocks and store them: by reading peers, or by writing to the owner."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T


@cute.jit
def peer_sums(partial: cute.Pointer, offset: Int32, peer: Int32):
    """Four neighbouring partial sums of a block of the cluster: [4] FP32."""
    # an instruction with side effects: it stays between the cluster barriers
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [(partial.toint() + offset * 4).ir_value(), peer.ir_value()],
        "{ .reg .u32 a; mapa.shared::cluster.u32 a, $4, $5; ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [a]; }",
        "=f,=f,=f,=f,r,r",
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(T.f32(), words, [i])) for i in range(4)]


@cute.jit
def pull_and_store(
    partial: cute.Pointer, out: cute.Tensor, rows: Int32, thread: Int32, rank: Int32, tile: Int32,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """All threads: this block's share of the tile, summed over its ranks in ascending order, rounded once, stored.

    ``partial`` holds [n, pitch] FP32 sums in each block of the cluster.
    """
    OUTPUTS, ROWS_A_TILE = TILES.outputs, TILES.tile_rows
    for turn in cutlass.range_constexpr(TILES.turns):
        group = TILES.group(turn, rank, thread)
        row, within = TILES.at(group)
        output = tile * ROWS_A_TILE + within
        if row < rows and output < OUTPUTS:
            total = cute.make_rmem_tensor(4, Float32)
            offset = row * TILES.pitch + within
            for source in cutlass.range_constexpr(TILES.split):
                words = peer_sums(partial, offset, TILES.peer(Int32(source), TILES.place(tile)))
                for i in cutlass.range_constexpr(4):
                    if cutlass.const_expr(source == 0):
                        total[i] = words[i]
                    else:
                        total[i] += words[i]
            if cutlass.const_expr(ROWS_A_TILE % 4 == 0 and OUTPUTS % 4 == 0):
                rounded = cute.make_rmem_tensor(4, BFloat16)
                rounded.store(total.load().to(BFloat16))
                cute.autovec_copy(rounded, cute.zipped_divide(out, (1, 4))[(0, None), (row, output // 4)])
            else:
                for i in cutlass.range_constexpr(4):
                    if within + i < ROWS_A_TILE and output + i < OUTPUTS:
                        out[row, output + i] = total[i].to(BFloat16)


@cute.jit
def pull(
    partial: cute.Pointer, out: cute.Tensor, rows: Int32, thread: Int32, rank: Int32, tile: Int32,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """:func:`pull_and_store`, once all blocks of the tile have put down their sums, and before any of them ends."""
    if cutlass.const_expr(TILES.split > 1):
        arch.cluster_arrive()
        arch.cluster_wait()
    else:
        arch.sync_threads()
    pull_and_store(partial, out, rows, thread, rank, tile, TILES)
    if cutlass.const_expr(TILES.split > 1):
        # no block ends while another still reads its sums
        arch.cluster_arrive_relaxed()
        arch.cluster_wait()


@cute.jit
def push(
    sums: cute.Tensor, incoming: cute.Pointer, arrived: cute.Pointer, thread: Int32, rank: Int32, tile: Int32,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """Live consumer warps, once the block has met its peers: send them the sums that they own, [4 x register groups] FP32.

    A group of four registers has one owner and the same thread in all ranks, so that nothing is rearranged.
    """
    bits = cute.recast_tensor(sums, Int32)
    for group in cutlass.range_constexpr(TILES.register_groups if TILES.split > 1 else 0):
        owner = TILES.owner(group)
        if rank != owner:
            target = cute.recast_ptr(incoming + TILES.slot(group, rank, thread), dtype=Int32).align(16)
            words = (bits[4 * group], bits[4 * group + 1], bits[4 * group + 2], bits[4 * group + 3])
            arch.store_async_dsmem(target, words, arrived, TILES.peer(owner, TILES.place(tile)))


@cute.jit
def add_and_store(
    sums: cute.Tensor, places: cute.Tensor, incoming: cute.Pointer, arrived: cute.Pointer, out: cute.Tensor,
    rows: Int32, thread: Int32, rank: Int32, tile: Int32, TILES: cutlass.Constexpr,
):  # fmt: skip
    """Live consumer warps: add the own sums and the pushed ones, ranks ascending, in FP32; one rounding, the store.

    Args:
        sums: [4 x register groups] FP32 of this thread.
        places: their (weight row within the tile, token row).
        incoming: see ``TmaTiles.slot``; FP32.
        arrived: barrier of the bytes in ``incoming``.
    """
    if cutlass.const_expr(TILES.split > 1):
        arch.mbarrier_wait(arrived, 0)
    for group in cutlass.range_constexpr(TILES.register_groups):
        owner = TILES.owner(group)
        if rank == owner:
            total = cute.make_rmem_tensor(4, Float32)
            for source in cutlass.range_constexpr(TILES.split):
                words = cute.make_rmem_tensor(4, Float32)
                if cutlass.const_expr(source == owner):
                    for i in cutlass.range_constexpr(4):
                        words[i] = sums[4 * group + i]
                else:
                    slot = (incoming + TILES.slot(group, source, thread)).align(16)
                    cute.autovec_copy(cute.make_tensor(slot, cute.make_layout(4)), words)
                for i in cutlass.range_constexpr(4):
                    if cutlass.const_expr(source == 0):
                        total[i] = words[i]
                    else:
                        total[i] += words[i]
            for i in cutlass.range_constexpr(4):
                within, row = places[4 * group + i]
                output = tile * TILES.tile_rows + within
                if row < rows and within < TILES.tile_rows and output < TILES.outputs:
                    out[row, output] = total[i].to(BFloat16)
