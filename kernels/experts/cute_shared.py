"""Parts of the CuTe DSL kernels of the experts: units of the shared expert, in BF16, on the ring that routed units use."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_streaming import LOAD_X, multiply, read
from .cute_parts import packets, publish, rounded, situ
from .cute_ring import refill

STORE_WORD = "st.global.u32 [{$r0}], {$r1};"


@cute.jit
def row_addresses(base: Int64, stride: cutlass.Constexpr, rows: Int32, lane: Int32, PLAN: cutlass.Constexpr):
    """Where this lane's rows of an operand lie, 8 by 8. A row that is not there repeats the last one."""
    found = []
    for m in cutlass.range_constexpr(PLAN.row_tiles):
        for h in cutlass.range_constexpr(PLAN.halves):
            found.append(base + Int64(cutlass.min(m * 16 + h * 8 + lane // 4, rows - 1)) * stride)
    return found


@cute.jit
def load_rows(addresses: list, offset: cutlass.Constexpr):
    """Four words of each row."""
    words = []
    for i in cutlass.range_constexpr(len(addresses)):
        words += read(LOAD_X, addresses[i] + offset, 4, [])
    return words


@cute.jit
def shared_first(
    ring: list, at: list, following: list, x: Int64, rows: Int32, parts: cute.Tensor, parity: Int32, warp: Int32, lane: Int32,
    PLAN: cutlass.Constexpr,
):  # fmt: skip
    """One warp's share of a unit of the first product, into shared memory; the ring, refilled."""
    x_depth, loads = PLAN.shared_x_depth, 4 * PLAN.row_tiles * PLAN.halves
    start = x + Int64(warp * (PLAN.shared_steps1 * 64) + lane % 4 * 16)
    where = row_addresses(start, 2 * PLAN.hidden, rows, lane, PLAN)
    held = []
    for e in cutlass.range_constexpr(x_depth):
        held += load_rows(where, e * 64)
    acc = [Float32(0.0)] * (4 * PLAN.row_tiles)
    for s in cutlass.range_constexpr(PLAN.shared_steps1):
        d, e = s % PLAN.depth, s % x_depth * loads
        acc = multiply(acc, ring[5 * d : 5 * d + 4], held[e : e + loads], PLAN.halves)
        ring = refill(ring, d, s + PLAN.depth, PLAN.shared_steps1, at, following, False)
        if cutlass.const_expr(s + x_depth < PLAN.shared_steps1):
            held[e : e + loads] = load_rows(where, (s + x_depth) * 64)
    for m in cutlass.range_constexpr(PLAN.row_tiles):
        for i in cutlass.range_constexpr(2 * PLAN.halves):
            row = m * 16 + i // 2 * 8 + lane // 4
            if row < PLAN.rows:
                parts[PLAN.shared_part_at(parity, warp, row, lane % 4 * 2 + i % 2)] = acc[4 * m + i]
    return ring


@cute.jit
def shared_hidden(
    unit: Int32, parts: cute.Tensor, parity: Int32, rows: Int32, lane: Int32, wide: Int64, epoch: Uint32,
    PLAN: cutlass.Constexpr, BETA: cutlass.Constexpr, LINEAR: cutlass.Constexpr,
):  # fmt: skip
    """One warp adds all warps' sums of a unit and publishes the hidden values: a packet a row."""
    for r in cutlass.range_constexpr(-(-PLAN.rows // 32)):
        row = 32 * r + lane
        if row < rows:
            sums = []
            for column in cutlass.range_constexpr(8):
                value = parts[PLAN.shared_part_at(parity, 0, row, column)]
                for w in cutlass.range_constexpr(1, PLAN.warps):
                    value += parts[PLAN.shared_part_at(parity, w, row, column)]
                sums.append(value)
            values = [situ(sums[i], sums[4 + i], BETA, LINEAR) for i in range(4)]
            publish(wide + Int64(row * PLAN.shared_first + unit) * 16, values, epoch)


@cute.jit
def shared_second(
    unit: Int32, ring: list, at: list, following: list, wide: Int64, rows: Int32, out: Int64, warp: Int32, lane: Int32,
    epoch: Uint32, health: Int64, block: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """One warp's eight columns of the shared expert's output; the ring, refilled."""
    depth, steps, loads = PLAN.shared_depth2, PLAN.shared_steps2, PLAN.row_tiles * PLAN.halves
    where = row_addresses(wide + Int64(lane % 4 * 32), 16 * PLAN.shared_first, rows, lane, PLAN)
    acc, held = [Float32(0.0)] * (4 * PLAN.row_tiles), []
    for s in cutlass.range_constexpr(steps):
        if cutlass.const_expr(s % PLAN.shared_batch == 0):
            wanted = [
                one + ((s + b) * 128 + 16 * half) for b in range(PLAN.shared_batch) for one in where for half in range(2)
            ]
            held = packets(wanted, epoch, health, block)
        d, e = s % depth, s % PLAN.shared_batch * 4 * loads
        acc = multiply(acc, ring[5 * d : 5 * d + 4], held[e : e + 4 * loads], PLAN.halves)
        ring = refill(ring, d, s + depth, steps, at, following, False)
    column = (unit * PLAN.warps + warp) * 8 + lane % 4 * 2
    for m in cutlass.range_constexpr(PLAN.row_tiles):
        for h in cutlass.range_constexpr(PLAN.halves):
            row = m * 16 + h * 8 + lane // 4
            if row < rows:
                word = rounded(acc[4 * m + 2 * h], acc[4 * m + 2 * h + 1])
                arch.inline_ptx(STORE_WORD, read_only_args=[out + (Int64(row) * PLAN.hidden + column) * 2, word])
    return ring
