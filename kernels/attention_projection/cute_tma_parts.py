"""Parts of the TMA kernels that are the same with wgmma and with tcgen05: the producer warp, and the reduction."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""L2 policies: weights are read once, x by every cluster."""


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
def first_weights(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, first: Int32,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """Producer warp: the weights of the first stages. They depend on no kernel before this one."""
    for stage in cutlass.range_constexpr(TILES.stages):
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full + stage, TILES.expected_bytes)
        for box in cutlass.range_constexpr(TILES.boxes):
            cute.copy(
                load, source[None, (first + stage) * TILES.boxes + box], target[None, box, stage],
                tma_bar_ptr=full + stage, cache_policy=Int64(EVICT_FIRST),
            )  # fmt: skip


@cute.jit
def the_rest(
    w_load: cute.CopyAtom, w_source: cute.Tensor, w_target: cute.Tensor,
    x_load: cute.CopyAtom, x_source: cute.Tensor, x_target: cute.Tensor,
    full: cute.Pointer, empty: cute.Pointer, first: Int32, last: Int32, TILES: cutlass.Constexpr,
):  # fmt: skip
    """Producer warp, behind the dependency wait: x of the first stages, then both for each stage that gets free."""
    for stage in cutlass.range_constexpr(TILES.stages):
        for box in cutlass.range_constexpr(TILES.boxes):
            cute.copy(
                x_load, x_source[None, (first + stage) * TILES.boxes + box], x_target[None, box, stage],
                tma_bar_ptr=full + stage, cache_policy=Int64(EVICT_LAST),
            )  # fmt: skip
    stage, phase = Int32(0), Int32(0)
    for step in cutlass.range(first + TILES.stages, last, unroll=1):
        arch.mbarrier_wait(empty + stage, phase)
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full + stage, TILES.expected_bytes)
        for box in cutlass.range_constexpr(TILES.boxes):
            column = step * TILES.boxes + box
            cute.copy(
                w_load, w_source[None, column], w_target[None, box, stage],
                tma_bar_ptr=full + stage, cache_policy=Int64(EVICT_FIRST),
            )  # fmt: skip
            cute.copy(
                x_load, x_source[None, column], x_target[None, box, stage],
                tma_bar_ptr=full + stage, cache_policy=Int64(EVICT_LAST),
            )  # fmt: skip
        stage += 1
        if stage == TILES.stages:
            stage = Int32(0)
            phase ^= 1


@cute.jit
def peer_sums(partial: cute.Pointer, offset: Int32, rank: Int32):
    """Four neighbouring partial sums of a block of the cluster: [4] FP32."""
    # an instruction with side effects: it stays between the cluster barriers
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [(partial.toint() + offset * 4).ir_value(), rank.ir_value()],
        "{ .reg .u32 a; mapa.shared::cluster.u32 a, $4, $5; ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [a]; }",
        "=f,=f,=f,=f,r,r",
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(T.f32(), words, [i])) for i in range(4)]


@cute.jit
def reduce_and_store(
    partial: cute.Pointer, out: cute.Tensor, rows: Int32, thread: Int32, rank: Int32, tile: Int32,
    TILES: cutlass.Constexpr,
):  # fmt: skip
    """This block's share of the tile: sums over the cluster's blocks in ascending order, one rounding, the store.

    ``partial`` holds [n, pitch] FP32 sums in each block of the cluster.
    """
    OUTPUTS, ROWS_A_TILE = TILES.outputs, TILES.tile_rows
    for turn in cutlass.range_constexpr(TILES.turns):
        group = TILES.group(turn, rank, thread)
        row, within = TILES.place(group)
        output = tile * ROWS_A_TILE + within
        if row < rows and output < OUTPUTS:
            total = cute.make_rmem_tensor(4, Float32)
            offset = row * TILES.pitch + within
            for peer in cutlass.range_constexpr(TILES.split):
                words = peer_sums(partial, offset, Int32(peer))
                for i in cutlass.range_constexpr(4):
                    if cutlass.const_expr(peer == 0):
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
