"""A block's slices of what belongs to a row, brought to shared memory by one copy each; part of cute_apart and cute_split."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_streaming import read
from .cute_parts import columns_of, seven

COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
LOAD_PAIR, LOAD_LAST = "ld.shared.u32 $0, [$1];", "{ .reg .b16 h; ld.shared.u16 h, [$1]; cvt.u32.u16 $0, h; }"
# places: the AttnRes norm, the query, the norm's weight, the old residual, the saved blocks
RES_NORM, RES_PROJ, NORM, OLD, FIRST = 0, 1, 2, 3, 4
SLICES = 12


@cute.jit
def copy_slice(
    source: Int64, slices: cute.Pointer, place: cutlass.Constexpr, BYTES: cutlass.Constexpr, bar: cute.Pointer
):
    """One slice on its way."""
    at = Int32(slices.toint()) + place * BYTES
    arch.inline_ptx(COPY, read_only_args=[at, source, Int32(BYTES), Int32(bar.toint())])


@cute.jit
def ask_slices(
    weights: list, prefix: Int64, blocks: Int64, row: Int32, start: Int32, rows: Int32, saved: Int32, early: Int32,
    slices: cute.Pointer, bar: cute.Pointer,
    ROWS: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, BYTES: cutlass.Constexpr,
):  # fmt: skip
    """All copies of a block whose columns begin at ``start``; by one thread. Weights come ahead of the dependency wait, the rest
    too if it is ``early``. Nothing where the launch has no such row.

    The first ``saved`` blocks count; beyond them the last one comes again.
    """
    arch.mbarrier_init(bar, 1)
    arch.mbarrier_init_fence()
    if row < rows:
        count = 3 + SAVED + (0 if RESTART else 1)
        arch.mbarrier_arrive_and_expect_tx(bar, count * BYTES)
        for place in cutlass.range_constexpr(3):
            copy_slice(weights[place] + Int64(start) * 2, slices, place, BYTES, bar)
        if early == Int32(0):
            arch.griddepcontrol_wait()
        at = (Int64(row) * HIDDEN + start) * 2
        for i in cutlass.range_constexpr(SAVED):
            block = cutlass.min(Int32(i), saved - 1)
            copy_slice(blocks + Int64(block) * (ROWS * HIDDEN * 2) + at, slices, FIRST + i, BYTES, bar)
        if cutlass.const_expr(not RESTART):
            copy_slice(prefix + at, slices, OLD, BYTES, bar)


@cute.jit
def slice_words(slices: cute.Pointer, place: cutlass.Constexpr, packet: Int32, BYTES: cutlass.Constexpr):
    """Words of a packet of the block's, as :func:`.cute_parts.row_words` has them."""
    pair, last = columns_of(packet)
    base = Int64(slices.toint()) + place * BYTES
    words = []
    for word in cutlass.range_constexpr(3):
        words += read(LOAD_PAIR, base + pair * 2 + 32 * word, 1, [])
    return words + read(LOAD_LAST, base + last * 2, 1, [])


@cute.jit
def unit_of(
    slices: cute.Pointer, packet: Int32, SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, BYTES: cutlass.Constexpr
):  # fmt: skip
    """(words of the old residual, of the saved blocks, AttnRes norm times query, the norm's weight) at a packet of the block's."""
    old = [Uint32(0)] * 4
    sources = [slice_words(slices, FIRST + i, packet, BYTES) for i in range(SAVED)]
    if cutlass.const_expr(not RESTART):
        old = slice_words(slices, OLD, packet, BYTES)
    scale = seven(slice_words(slices, RES_NORM, packet, BYTES))
    query = seven(slice_words(slices, RES_PROJ, packet, BYTES))
    folded = [g * q for g, q in zip(scale, query, strict=True)]
    return old, sources, folded, seven(slice_words(slices, NORM, packet, BYTES))
