"""Parts of the CuTe DSL kernels of the experts: units of the shared expert, in BF16, on the ring that routed units use."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import rounded
from ..cute_streaming import LOAD_X, multiply, read
from ..cute_waits import raise_flag
from .cute_parts import four, situ
from .cute_ring import refill

STORE_WORD, STORE_PAIR = "st.global.u32 [{$r0}], {$r1};", "st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};"


@cute.jit
def live_addresses(base: Int64, STRIDE: cutlass.Constexpr, lane: Int32, rows: Int32, PLAN: cutlass.Constexpr):
    """Where this lane's rows of the caller's operand lie, 8 by 8; beyond those that are live the last one again."""
    eights = range(PLAN.row_tiles * PLAN.halves)
    return [base + Int64(cutlass.min(8 * eight + lane // 4, rows - 1)) * STRIDE for eight in eights]


@cute.jit
def row_addresses(base: Int64, STRIDE: cutlass.Constexpr, lane: Int32, PLAN: cutlass.Constexpr):
    """Where this lane's rows of the own operand lie, 8 by 8: as many as were compiled for, the last one again beyond.

    Rows that are not live are there too, and no row of an MMA enters into another.
    """
    first = base + Int64(lane // 4) * STRIDE
    found = []
    for eight in cutlass.range_constexpr(PLAN.row_tiles * PLAN.halves):
        last = PLAN.rows - 1 - 8 * eight
        if cutlass.const_expr(last >= 7):
            found.append(first + 8 * eight * STRIDE)
        else:
            found.append(base + Int64(8 * eight + cutlass.min(lane // 4, last)) * STRIDE)
    return found


@cute.jit
def load_rows(addresses: list, OFFSET: cutlass.Constexpr):
    """Four words of each row."""
    words = []
    for i in cutlass.range_constexpr(len(addresses)):
        words += read(LOAD_X, addresses[i] + OFFSET, 4, [])
    return words


@cute.jit
def product(
    ring: list, at: list, following: list, where: list,
    STEPS: cutlass.Constexpr, DEPTH: cutlass.Constexpr, X_DEPTH: cutlass.Constexpr, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """(sums of a warp's steps of one unit, the ring, refilled): all rows by eight columns."""
    loads, held = 4 * len(where), []
    for e in cutlass.range_constexpr(X_DEPTH):
        held += load_rows(where, e * 64)
    acc = [Float32(0.0)] * (4 * PLAN.row_tiles)
    for s in cutlass.range_constexpr(STEPS):
        d, e = s % DEPTH, s % X_DEPTH * loads
        acc = multiply(acc, ring[5 * d : 5 * d + 4], held[e : e + loads], PLAN.halves)
        ring = refill(ring, d, s + DEPTH, STEPS, at, following, False)
        if cutlass.const_expr(s + X_DEPTH < STEPS):
            held[e : e + loads] = load_rows(where, (s + X_DEPTH) * 64)
    return acc, ring


@cute.jit
def shared_first(
    ring: list, at: list, following: list, x: Int64, rows: Int32, parts: cute.Tensor, parity: Int32, warp: Int32,
    lane: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """One warp's share of a unit of the first product, into shared memory; the ring, refilled."""
    start = x + Int64(warp * (PLAN.shared_steps1 * 64) + lane % 4 * 16)
    where = live_addresses(start, 2 * PLAN.hidden, lane, rows, PLAN)
    acc, ring = product(
        ring, at, following, where, PLAN.shared_steps1, PLAN.depth, PLAN.shared_x_depth(PLAN.shared_steps1), PLAN
    )
    for m in cutlass.range_constexpr(PLAN.row_tiles):
        for i in cutlass.range_constexpr(2 * PLAN.halves):
            row = m * 16 + i // 2 * 8 + lane // 4
            if row < PLAN.rows:
                parts[PLAN.shared_part_at(parity, warp, row, lane % 4 * 2 + i % 2)] = acc[4 * m + i]
    return ring


@cute.jit
def shared_hidden(
    unit: Int32, parts: cute.Tensor, parity: Int32, turn: Int32, warp: Int32, lane: Int32, wide: Int64, done: Int64, epoch: Uint32,
    PLAN: cutlass.Constexpr, BETA: cutlass.Constexpr, LINEAR: cutlass.Constexpr,
):  # fmt: skip
    """Add all warps' sums of a unit, store the hidden values and say so, live rows or not: a warp for eight rows."""
    for k in cutlass.range_constexpr(-(-PLAN.eights // PLAN.warps)):
        eight = (warp + turn) % PLAN.warps + k * PLAN.warps
        if eight < PLAN.eights:
            row = 8 * eight + lane // 4
            within = cutlass.min(row, PLAN.rows - 1)
            both = []
            for half in cutlass.range_constexpr(2):
                value = parts[PLAN.shared_part_at(parity, 0, within, 4 * half + lane % 4)]
                for w in cutlass.range_constexpr(1, PLAN.warps):
                    value += parts[PLAN.shared_part_at(parity, w, within, 4 * half + lane % 4)]
                both.append(value)
            values = four(situ(both[0], both[1], BETA, LINEAR), lane)
            if lane % 4 == 0 and row < PLAN.rows:
                words = [rounded(values[0], values[1]), rounded(values[2], values[3])]
                arch.inline_ptx(STORE_PAIR, read_only_args=[wide + Int64(row * PLAN.shared_first + unit) * 8, *words])
            arch.sync_warp()
            if lane == 0:
                raise_flag(done, eight * PLAN.shared_first + unit, epoch)


@cute.jit
def shared_second(
    unit: Int32, ring: list, at: list, following: list, wide: Int64, rows: Int32, out: Int64, warp: Int32, lane: Int32,
    PLAN: cutlass.Constexpr,
):  # fmt: skip
    """One warp's eight columns of the shared expert's output; the ring, refilled."""
    where = row_addresses(wide + Int64(lane % 4 * 16), 2 * PLAN.wide, lane, PLAN)
    acc, ring = product(
        ring, at, following, where, PLAN.shared_steps2, PLAN.shared_depth2, PLAN.shared_x_depth(PLAN.shared_steps2), PLAN
    )  # fmt: skip
    column = (unit * PLAN.warps + warp) * 8 + lane % 4 * 2
    for m in cutlass.range_constexpr(PLAN.row_tiles):
        for h in cutlass.range_constexpr(PLAN.halves):
            row = m * 16 + h * 8 + lane // 4
            if row < rows:
                word = rounded(acc[4 * m + 2 * h], acc[4 * m + 2 * h + 1])
                arch.inline_ptx(STORE_WORD, read_only_args=[out + (Int64(row) * PLAN.hidden + column) * 2, word])
    return ring
