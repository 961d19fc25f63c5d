"""Grouping part of the router's CuTe DSL kernels: all rows' choices sorted by expert, by one block."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from .choice_layout import UNIT_ROWS, UNIT_START
from .cute_choice import STORE


@cute.jit
def sum_before(count: Uint32, below: Uint32, BITS: cutlass.Constexpr):
    """Sum of the counts, of so many bits, of the warp's lanes in ``below``: votes bit by bit, which need no chain of shuffles."""
    total = Uint32(0)
    for bit in cutlass.range_constexpr(BITS):
        votes = Uint32(arch.vote_ballot_sync((count >> bit) & Uint32(1) != Uint32(0)))
        total += Uint32(arch.popc(votes & below)) << bit
    return total


@cute.jit
def rows_of(masks: cute.Tensor, expert: Int32, C: cutlass.Constexpr):
    """Tokens that chose an expert, counted."""
    count = arch.popc(Uint32(masks[expert * C.tall]))
    if cutlass.const_expr(C.tall == 2):
        count += arch.popc(Uint32(masks[expert * 2 + 1]))
    return Uint32(count)


@cute.jit
def group(
    ids: cute.Tensor,
    masks: cute.Tensor,
    starts: cute.Tensor,
    sums: cute.Tensor,
    order: Int64,
    units: Int64,
    rows: Int32,
    t: Int32,
    THREADS: cutlass.Constexpr,
    C: cutlass.Constexpr,
):
    """All threads of a block, with ``masks`` zeroed and ``ids`` [rows][top_k] there: see :func:`.exact.group`.

    An expert's tokens are the bits of its mask, so places in the order follow from counts of bits.
    """
    lane, warp, warps = t % 32, t // 32, THREADS // 32
    live = rows * C.top_k
    for e in cutlass.range(t, live, THREADS, unroll=1):
        row = e // C.top_k
        at = masks.iterator + (ids[e] * C.tall + row // 32)
        arch.atomic_or(at, Uint32(1) << Uint32(row % 32), sem="relaxed", scope="cta")
    arch.sync_threads()
    # tokens in the low half of a word, experts in the high one
    below = (Uint32(1) << Uint32(lane)) - Uint32(1)
    for c in cutlass.range(warp, C.chunks, warps, unroll=1):
        tokens = rows_of(masks, c * 32 + lane, C)
        votes = Uint32(arch.vote_ballot_sync(tokens != Uint32(0)))
        before = sum_before(tokens, below, C.board.rows.bit_length()) | Uint32(arch.popc(votes & below)) << 16
        starts[c * 32 + lane] = before
        if lane == 31:
            sums[c] = before + (tokens | (Uint32(0x10000) if tokens != Uint32(0) else Uint32(0)))
    arch.sync_threads()
    sum_here = Uint32(0)
    if lane < C.chunks:
        sum_here = Uint32(sums[lane])
    every = Int32(Uint32(arch.warp_redux_sync(sum_here, "add")) >> 16)
    for c in cutlass.range(warp, C.chunks, warps, unroll=1):
        tokens = rows_of(masks, c * 32 + lane, C)
        before = Uint32(arch.warp_redux_sync(sum_here if lane < c else Uint32(0), "add")) + Uint32(
            starts[c * 32 + lane]
        )
        first = before & Uint32(0xFFFF)
        starts[c * 32 + lane] = first
        if tokens != Uint32(0):
            unit = Uint32(c * 32 + lane) | first << UNIT_START | (tokens - Uint32(1)) << UNIT_ROWS
            arch.inline_ptx(STORE, read_only_args=[units + Int64(before >> 16) * 4, unit])
    for e in cutlass.range(every + t, live, THREADS, unroll=1):
        arch.inline_ptx(STORE, read_only_args=[units + e * 4, Uint32(0xFFFFFFFF)])
    arch.sync_threads()
    for e in cutlass.range(t, live, THREADS, unroll=1):
        row = e // C.top_k
        at = ids[e] * C.tall
        below = (Uint32(1) << Uint32(row % 32)) - Uint32(1)
        place = Uint32(starts[ids[e]])
        if cutlass.const_expr(C.tall == 2):
            upper = row >= 32
            whole = Uint32(masks[at]) if upper else Uint32(masks[at]) & below
            rest = Uint32(masks[at + 1]) & below if upper else Uint32(0)
            place += Uint32(arch.popc(whole)) + Uint32(arch.popc(rest))
        else:
            place += Uint32(arch.popc(Uint32(masks[at]) & below))
        arch.inline_ptx(STORE, read_only_args=[order + Int64(place) * 4, Uint32(e)])
