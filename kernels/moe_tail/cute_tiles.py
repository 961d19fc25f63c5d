"""Weights of the tail's CuTe DSL kernel: tiles that asynchronous copies bring to shared memory, and their host side."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

from ..cute_streaming import EVICT_FIRST, read
from .layout import RUN, TILE, TILE_BYTES

LOAD_FOUR = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];"


@cute.jit
def tile_copy(w: cute.Tensor):
    """Host side: (copy of a tile of w, its coordinates)."""
    layout = cute.make_layout((TILE, RUN), stride=(RUN, 1))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), w, layout, (TILE, RUN))


@cute.jit
def ask_tiles(
    load: cute.CopyAtom, w_map: cute.Tensor, ring: cute.Pointer, full: cute.Pointer, cluster: Int32, part: Int32, warp: Int32,
    T: cutlass.Constexpr,
):  # fmt: skip
    """All tiles of a warp on their way: for each of its runs of latents the cluster's columns, rows of 64 bytes.

    They stand in no other load's way: loads of an SM come back in the order they were asked for, and what is sent and polled
    would wait behind the weights. Nothing is ever written there again. The warp's barrier ``full`` has been set up, by a lane of its own.
    """
    tiles = cute.make_layout((TILE, RUN, T.chunks_each), stride=(RUN, 1, TILE * RUN))
    mine = cute.make_tensor(
        cute.recast_ptr(ring + warp * (T.chunks_each * TILE_BYTES // 4), dtype=BFloat16).align(128), tiles
    )
    boxes = cute.local_tile(w_map, (TILE, RUN), (cluster, None))
    target, source = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(mine, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    with arch.elect_one():
        arch.mbarrier_arrive_and_expect_tx(full, T.chunks_each * TILE_BYTES)
    for c in cutlass.range_constexpr(T.chunks_each):
        tile = part * T.chunks + c * T.warps_k + warp
        cute.copy(load, source[None, tile], target[None, c], tma_bar_ptr=full, cache_policy=Int64(EVICT_FIRST))


@cute.jit
def tile_words(tiles_at: Int32, c: cutlass.Constexpr, warp: Int32, lane: Int32, T: cutlass.Constexpr):
    """A lane's operands of the warp's run ``c``: of eight tiles of eight columns, each 512 bytes that a warp reads in order."""
    at = Int64(tiles_at + (warp * T.chunks_each + c) * TILE_BYTES + lane * 16)
    words: list = []
    for j in cutlass.range_constexpr(TILE // 8):
        words += read(LOAD_FOUR, at + j * 512, 4, [])
    return words
