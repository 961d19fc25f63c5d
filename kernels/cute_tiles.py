"""Weights of CuTe DSL kernels as tiles that asynchronous copies bring to shared memory; families share them.

Such copies stand in no other load's way: loads of an SM come back in the order they were asked for, and what is sent and polled would
wait behind the weights.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from .cute_streaming import EVICT_FIRST, read

RUN = 32
"""Columns of K in a tile: rows of 64 bytes, which eight lanes read from eight places of the banks."""
LOAD_FOUR = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];"


@cute.jit
def tile_copy(w: cute.Tensor, ROWS: cutlass.Constexpr):
    """Host side: (copy of a tile of ``ROWS`` rows of w, its coordinates)."""
    layout = cute.make_layout((ROWS, RUN), stride=(RUN, 1))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), w, layout, (ROWS, RUN))


@cute.jit
def tile_places(
    load: cute.CopyAtom,
    w_map: cute.Tensor,
    ring: cute.Pointer,
    block: Int32,
    ROWS: cutlass.Constexpr,
    SLOTS: cutlass.Constexpr,
):
    """(tiles of the ``block``'s rows of w in memory, a warp's slots at ``ring`` in shared memory), as :func:`ask_tile` wants them."""
    layout = cute.make_layout((ROWS, RUN, SLOTS), stride=(RUN, 1, ROWS * RUN))
    slots = cute.make_tensor(cute.recast_ptr(ring, dtype=BFloat16).align(128), layout)
    boxes = cute.local_tile(w_map, (ROWS, RUN), (block, None))
    target, source = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return source, target


@cute.jit
def ask_tile(
    load: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
    tile: Int32,
    slot: cutlass.Constexpr,
):
    """One tile on its way into a slot; the barrier ``full`` expects its bytes."""
    cute.copy(load, source[None, tile], target[None, slot], tma_bar_ptr=full, cache_policy=Int64(EVICT_FIRST))


@cute.jit
def tile_words(at: Int64, ROWS: cutlass.Constexpr):
    """A lane's operands of a tile, from the lane's own address in it: of each eight rows 512 bytes, which a warp reads in order."""
    words: list = []
    for j in cutlass.range_constexpr(ROWS // 8):
        words += read(LOAD_FOUR, at + j * 512, 4, [])
    return words
