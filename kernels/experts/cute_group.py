"""Part of the CuTe DSL kernels of the experts: which rows chose which expert, worked out by each block for itself."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_streaming import read
from .plan import TOKENS

LOAD_ID = "ld.global.u32 $0, [$1];"
OR_SHARED = "red.shared.or.b32 [{$r0}], {$r1};"


@cute.jit
def count_bits(word: Int32):
    """Bits that are set."""
    return arch.inline_ptx("popc.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


@cute.jit
def rank_of(table: cute.Tensor, expert: Int32, row: Int32, PLAN: cutlass.Constexpr):
    """Rows before this one that chose the expert."""
    word = table[expert]
    if cutlass.const_expr(PLAN.masks == 2):
        upper = table[PLAN.experts + expert]
        inside = (word if row < 32 else upper) & ((Int32(1) << (row % 32)) - 1)
        return count_bits(inside) + (count_bits(word) if row >= 32 else 0)
    return count_bits(word & ((Int32(1) << row) - 1))


@cute.jit
def pair_of(table: cute.Tensor, row: Int32, slot: Int32, PLAN: cutlass.Constexpr):
    """Place of a row's slot among all pairs, which are sorted by expert, then row."""
    expert = table[PLAN.ids_at + row * PLAN.top_k + slot]
    return table[PLAN.first_at + expert] + rank_of(table, expert, row, PLAN)


@cute.jit
def slots(ids: Int64, table: cute.Tensor, warp: Int32, lane: Int32, PLAN: cutlass.Constexpr):
    """The warp's own copy of a single row's experts, ids int32 [top_k]; the number of items. No barrier: no warp waits for another's read."""
    slot = cutlass.min(lane, PLAN.top_k - 1)
    (found,) = read(LOAD_ID, ids + Int64(slot) * 4, 1, [])
    table[warp * PLAN.top_k + slot] = Int32(cutlass.min(found, Uint32(PLAN.experts - 1)))
    arch.sync_warp()
    return Int32(PLAN.top_k)


@cute.jit
def group(ids: Int64, rows: Int32, table: cute.Tensor, t: Int32, PLAN: cutlass.Constexpr):
    """Fill the block's table from ids, int32 [rows, top_k]; the number of items. Ends with a barrier.

    The same in all blocks: nothing in it depends on who comes first. An id that is no expert counts as the last one.
    """
    lane, warp = t % 32, t // 32
    pairs = rows * PLAN.top_k
    for i in cutlass.range(t, PLAN.masks * PLAN.experts, PLAN.threads, unroll=1):
        table[i] = Int32(0)
    arch.sync_threads()
    for p in cutlass.range(t, pairs, PLAN.threads, unroll=1):
        (found,) = read(LOAD_ID, ids + Int64(p) * 4, 1, [])
        expert = Int32(cutlass.min(found, Uint32(PLAN.experts - 1)))
        table[PLAN.ids_at + p] = expert
        row = p // PLAN.top_k
        at = table.iterator + (row // 32 * PLAN.experts + expert)
        arch.inline_ptx(OR_SHARED, read_only_args=[at.toint(), Int32(1) << (row % 32)])
    arch.sync_threads()

    each = -(-PLAN.experts // PLAN.threads)
    counts = []
    own = Int32(0)
    for j in cutlass.range_constexpr(each):
        expert = cutlass.min(t * each + j, PLAN.experts - 1)
        count = count_bits(table[expert])
        if cutlass.const_expr(PLAN.masks == 2):
            count += count_bits(table[PLAN.experts + expert])
        count = count if t * each + j < PLAN.experts else Int32(0)
        counts.append(count)
        own += ((count + TOKENS - 1) // TOKENS << 16) + count
    upto = own
    for k in cutlass.range_constexpr(5):
        before = arch.shuffle_sync_up(upto, 1 << k, mask_and_clamp=0)
        upto += before if lane >= (1 << k) else Int32(0)
    if lane == 31:
        table[PLAN.scan_at + warp] = upto
    arch.sync_threads()
    start, total = upto - own, Int32(0)
    for w in cutlass.range_constexpr(PLAN.warps):
        part = table[PLAN.scan_at + w]
        start += part if w < warp else Int32(0)
        total += part
    for j in cutlass.range_constexpr(each):
        count = counts[j]
        if count > 0:
            expert, item, place = t * each + j, start >> 16, start & 0xFFFF
            table[PLAN.first_at + expert] = place
            done = Int32(0)
            while done < count:
                word = PLAN.item_word(expert, place + done, cutlass.min(count - done, TOKENS))
                table[PLAN.items_at + item] = word
                item += 1
                done += TOKENS
        start += ((count + TOKENS - 1) // TOKENS << 16) + count
    arch.sync_threads()
    for p in cutlass.range(t, pairs, PLAN.threads, unroll=1):
        row = p // PLAN.top_k
        table[PLAN.rows_at + pair_of(table, row, p % PLAN.top_k, PLAN)] = row
    arch.sync_threads()
    return total >> 16
