"""Parts of the CuTe DSL kernel of the experts: units of the routed second product, and the weighted sum of what they publish."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import as_float
from ..cute_streaming import read
from .cute_group import pair_of
from .cute_mxfp8 import hidden_words
from .cute_parts import item_of, load_packets, publish_four, settled, step
from .cute_ring import refill, second_of
from .layout import ACTIVATION_EXPONENT, WEIGHT_EXPONENT

UNSCALE = 2.0 ** -(WEIGHT_EXPONENT + ACTIVATION_EXPONENT)
ACTIVATION = 2.0**ACTIVATION_EXPONENT
LOAD_WEIGHT = "ld.global.u32 $0, [$1];"


@cute.jit
def lane_hidden(
    unit: Int32, ends: list, table: cute.Tensor, hidden: Int64, warp: Int32, lane: Int32, PLAN: cutlass.Constexpr
):  # fmt: skip
    """Address of this lane's hidden values of a unit of the routed second product; of the last unit where there is no such."""
    number = second_of(cutlass.max(cutlass.min(unit, ends[3] - 1), ends[2]), ends, PLAN)
    _, place, count = item_of(table, number // PLAN.chunks, warp, PLAN)
    pair = place + cutlass.min(lane // 4, count - 1)
    return hidden + Int64(PLAN.hidden_at(pair, 0, lane % 4, 0)) * 16


@cute.jit
def batch_of(base: Int64, PLAN: cutlass.Constexpr):
    """Addresses of the packets of so many groups as a warp holds at once."""
    return [base + PLAN.hidden_at(0, b // 2, 0, b % 2) * 16 for b in range(2 * PLAN.batch)]


@cute.jit
def ask(
    unit: Int32, ends: list, table: cute.Tensor, hidden: Int64, t: Int32, warp: Int32, PLAN: cutlass.Constexpr
):  # fmt: skip
    """This thread's packets of a unit's hidden values, whatever epoch they carry; of the last unit where there is no such."""
    number = second_of(cutlass.max(cutlass.min(unit, ends[3] - 1), ends[2]), ends, PLAN)
    _, place, count = item_of(table, number // PLAN.chunks, warp, PLAN)
    words = []
    for k in cutlass.range_constexpr(PLAN.stashed_each):
        packet = cutlass.min(t + k * PLAN.threads, count * PLAN.hidden_packets - 1)
        words += load_packets([hidden + Int64(place * PLAN.hidden_packets + packet) * 16])
    return words


@cute.jit
def stash(
    place: Int32, count: Int32, sent: list, parity: Int32, table: cute.Tensor, hidden: Int64, t: Int32, epoch: Uint32, health: Int64,
    block: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """Take the hidden values of an item into the block's table. Ends with a barrier.

    ``sent`` is what :func:`ask` found before; a single row asks here. Two parities: some warps take the next item's, while others
    still multiply these; they are done before the barrier behind it.
    """
    for k in cutlass.range_constexpr(PLAN.stashed_each):
        packet = t + k * PLAN.threads
        if packet < count * PLAN.hidden_packets:
            wanted = [hidden + Int64(place * PLAN.hidden_packets + packet) * 16]
            words = load_packets(wanted) if cutlass.const_expr(PLAN.single) else sent[4 * k : 4 * k + 4]
            got = settled(words, wanted, 2, epoch, health, block)
            row = Int32(0) if cutlass.const_expr(PLAN.single) else packet // PLAN.hidden_packets
            for i in cutlass.range_constexpr(2):
                table[PLAN.stashed_at(parity, row, packet - row * PLAN.hidden_packets) + i] = Int32(got[i])
    arch.sync_threads()


@cute.jit
def publish_outputs(acc: list, S: cutlass.Constexpr, place: Int32, count: Int32, task: Int32, outputs: Int64, lane: Int32, epoch: Uint32, PLAN: cutlass.Constexpr):  # fmt: skip
    """A task's 32 output columns, for the rows that are there; ``S``: its last step."""
    token, quad = lane // 4, lane % 4
    for i in cutlass.range_constexpr(2):
        if 2 * quad + i < count:
            where = PLAN.output_at(place + 2 * quad + i, (task + S // PLAN.groups2) * 8 + token)
            publish_four(outputs + Int64(where) * 16, [acc[2 * k + i] * UNSCALE for k in range(4)], epoch)


@cute.jit
def second_stashed(
    ring: list, at: list, following: list, parity: Int32, table: cute.Tensor, place: Int32, count: Int32, task: Int32, outputs: Int64,
    lane: Int32, epoch: Uint32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """A warp's tasks of a unit with hidden values of the block's table; the ring, refilled. A row that is not there repeats the last one."""
    row = Int32(0) if cutlass.const_expr(PLAN.single) else cutlass.min(lane // 4, count - 1)
    acc = [Float32(0.0)] * 8
    for s in cutlass.range_constexpr(PLAN.steps2):
        d, g = 5 * (s % PLAN.depth2), s % PLAN.groups2
        words = PLAN.stashed_at(parity, row, PLAN.hidden_at(0, g, lane % 4, 0))
        if cutlass.const_expr(g == 0):
            acc = [Float32(0.0)] * 8
        acc = step(ring[d : d + 4], ring[d + 4], [Uint32(table[words + i]) for i in range(4)], acc)
        ring = refill(ring, s % PLAN.depth2, s + PLAN.depth2, PLAN.steps2, at, following, True)
        if cutlass.const_expr(g == PLAN.groups2 - 1):
            publish_outputs(acc, s, place, count, task, outputs, lane, epoch, PLAN)
    return ring


@cute.jit
def second_sent(
    ring: list, at: list, following: list, sent: list, near: Int64, then: Int64, place: Int32, count: Int32, task: Int32, outputs: Int64,
    lane: Int32, epoch: Uint32, health: Int64, block: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """A warp's tasks of a unit with hidden values that it takes for itself; (the ring, refilled, the next unit's first packets).

    Packets are asked for one batch ahead: while the one before is multiplied, they come, or are seen to be late.
    """
    acc, values = [Float32(0.0)] * 8, []
    for s in cutlass.range_constexpr(PLAN.steps2):
        d, g = 5 * (s % PLAN.depth2), s % PLAN.groups2
        if cutlass.const_expr(g % PLAN.batch == 0):
            here = batch_of(near + PLAN.hidden_at(0, g, 0, 0) * 16, PLAN)
            if cutlass.const_expr(PLAN.hidden_rounding == ""):
                values = settled(sent, here, 2, epoch, health, block)
            else:
                sent = settled(sent, here, 3, epoch, health, block)
                values = hidden_words(sent, ACTIVATION, PLAN.hidden_rounding == "ceil")
            if cutlass.const_expr(s + PLAN.batch < PLAN.steps2):
                later = near + PLAN.hidden_at(0, (g + PLAN.batch) % PLAN.groups2, 0, 0) * 16
                sent = load_packets(batch_of(later, PLAN))
            else:
                sent = load_packets(batch_of(then, PLAN))
        if cutlass.const_expr(g == 0):
            acc = [Float32(0.0)] * 8
        h = g % PLAN.batch * 4
        acc = step(ring[d : d + 4], ring[d + 4], values[h : h + 4], acc)
        ring = refill(ring, s % PLAN.depth2, s + PLAN.depth2, PLAN.steps2, at, following, True)
        if cutlass.const_expr(g == PLAN.groups2 - 1):
            publish_outputs(acc, s, place, count, task, outputs, lane, epoch, PLAN)
    return ring, sent


@cute.jit
def weighted_sum(
    row: Int32, packet: Int32, outputs: Int64, weights: Int64, table: cute.Tensor, lane: Int32, epoch: Uint32,
    health: Int64, block: Int32, earnest: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """Four columns of a row: its experts' outputs times their weights, slots ascending; few rows' slots all in one round."""
    slot = cutlass.min(lane, PLAN.top_k - 1)
    mine = slot
    if cutlass.const_expr(not PLAN.single):
        mine = pair_of(table, row, slot, PLAN)
    factor = as_float(read(LOAD_WEIGHT, weights + Int64(row * PLAN.top_k + slot) * 4, 1, [])[0])
    sums = [Float32(0.0)] * 4
    each = PLAN.summed
    for k0 in cutlass.range_constexpr(0, PLAN.top_k, each):
        slots = range(k0, min(k0 + each, PLAN.top_k))
        if cutlass.const_expr(PLAN.single):
            wanted = [outputs + Int64(packet) * 16 + k * PLAN.row_packets * 16 for k in slots]
        else:
            wanted = [outputs + Int64(PLAN.output_at(arch.shuffle_sync(mine, k), packet)) * 16 for k in slots]
        got = settled(load_packets(wanted), wanted, 2, epoch, health, block, earnest)
        for k in cutlass.range_constexpr(len(wanted)):
            weight = arch.shuffle_sync(factor, k0 + k)
            for i in cutlass.range_constexpr(4):
                word = got[2 * k + i // 2]
                value = as_float(word << 16 if cutlass.const_expr(i % 2 == 0) else word & Uint32(0xFFFF0000))
                sums[i] = sums[i] + weight * value
    return sums
