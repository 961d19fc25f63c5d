"""Summing part of the tail's CuTe DSL kernel: a block's latents of all ranks, and the shared expert's columns that it owns."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import as_word, high, low, rounded, sum_lanes
from ..cute_polls import poll
from ..cute_streaming import read
from ..cute_waits import LOAD_TARGET, PARTIAL, TOTAL, pause
from .cute_send import send_quad

STORE_ONE = "st.shared.u32 [{$r0}], {$r1};"
LOAD_TWO = "ld.shared.v2.u32 {$0, $1}, [$2];"
STORE_TWO = "st.shared.v2.u32 [{$r0}], {{$r1}, {$r2}};"


@cute.jit
def ranks_quad(
    box: Int64, within: Int32, COLUMNS: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, epoch: Uint32, health: Int64,
    block: Int32, BACKOFF: cutlass.Constexpr, T: cutlass.Constexpr, asks: cutlass.Boolean,
):  # fmt: skip
    """All lanes of a warp, for those that ``ask``: (sum of four columns over the ranks, in rank order in FP32, rounded: two words; what was missing after the limit)."""
    sums: list = []
    missing, stride = Uint32(0), T.slot_bytes(COLUMNS)
    for first in cutlass.range_constexpr(0, T.tp, AT_ONCE):
        count = min(AT_ONCE, T.tp - first)
        at = [box + (first * stride + within)]
        words, more = poll(
            at,
            count,
            stride,
            "sys",
            "b32e32x2",
            epoch,
            health,
            PARTIAL,
            Int32(first),
            block,
            BACKOFF,
            True,
            Int32(asks),
            True,
        )
        missing |= more
        for i in cutlass.range_constexpr(count):
            one = [low(words[2 * i]), high(words[2 * i]), low(words[2 * i + 1]), high(words[2 * i + 1])]
            sums = [v + w for v, w in zip(sums, one, strict=True)] if first + i > 0 else one
    return [rounded(sums[0], sums[1]), rounded(sums[2], sums[3])], missing


@cute.jit
def own_latents(
    latents: Int64, totals_to: Int64, number: Int32, rows: Int32, lane: Int32, epoch: Uint32, claim: Uint32, health: Int64,
    block: Int32,
    AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, T: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Two shots: sum the latents that this rank owns, a quad a lane, and send the sums to all ranks.

    As many lanes make the same sum as there are ranks, each for one: stores to all of them one after the other would take longer
    than the sum.
    A lane whose wait gave up sends nothing, nor does a launch that begins with a claimed record.
    """
    quads = T.shard_latents // 4
    there = T.live_passes(rows) * T.pass_rows
    # asked for before the wait: behind it a trip to memory would follow
    _, rank = T.total_task(number, lane)
    line = read(LOAD_TARGET, totals_to + rank * 16, 4, [])
    for task in cutlass.range(number, T.total_tasks(there), T.making * 16, unroll=1):
        place, _ = T.total_task(task, lane)
        asks = place < there * quads
        place = cutlass.min(place, there * quads - 1)
        within = T.within(T.shard_latents, Int32(epoch & Uint32(1)), place // quads, place % quads * 4)
        pause(JITTER, epoch, block * 64 + 44)
        words, more = ranks_quad(
            latents, within, T.shard_latents, AT_ONCE, epoch, health, block, BACKOFF, T, asks
        )  # fmt: skip
        pause(JITTER, epoch, block * 64 + 45)
        if asks and (more | claim) == Uint32(0):
            send_quad(line, within, words, epoch)


@cute.jit
def keep_normed(words: list, gamma_at: Int32, x_at: Int32, row: Int32, place: Int32, T: cutlass.Constexpr):
    """Four latents times the norm's weight into shared memory, each product rounded; the sum of their squares."""
    square, values = Float32(0.0), []
    gamma = read(LOAD_TWO, Int64(gamma_at), 2, [])
    for i in cutlass.range_constexpr(2):
        a, b = low(words[i]), high(words[i])
        square += a * a
        square += b * b
        values.append(rounded(a * low(gamma[i]), b * high(gamma[i])))
    arch.inline_ptx(STORE_TWO, read_only_args=[x_at + (row * T.x_words + place * 2) * 4, *values])
    return square


@cute.jit
def sum_latents(
    box: Int64, gamma_at: Int32, x_at: Int32, squares_at: Int32, row0: Int32, part: Int32, warp: Int32, lane: Int32, epoch: Uint32,
    claim: Uint32, health: Int64, block: Int32,
    AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, T: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """A pass's latents of this block: normed but for the row's factor, and their squares, into shared memory.

    Behind the squares lies, a word a warp, whether a wait gave up, now or before this launch.
    """
    parity, late = Int32(epoch & Uint32(1)), claim
    pause(JITTER, epoch, block * 64 + warp)
    for first in cutlass.range_constexpr(0, T.rounds, T.rounds_at_once):
        row, place, there = T.quad(first, warp, lane)
        # lanes that have none ask with the others for the first one's
        row, near = (row, place) if there else (Int32(0), Int32(0))
        column = part * T.span + near * 4
        if cutlass.const_expr(T.two_shot):
            # one owner's sums of several rounds in flight at once
            owner = column // T.shard_latents
            first_at = (
                box
                + owner * T.slot_bytes(T.shard_latents)
                + T.within(T.shard_latents, parity, row0 + row, column % T.shard_latents)
            )
            polled, more = poll(
                [first_at], T.rounds_at_once, T.beside * T.shard_latents * 4, "sys", "b32e32x2", epoch, health, TOTAL,
                owner, block, BACKOFF, False, Int32(there), True,
            )  # fmt: skip
        else:
            polled, more = ranks_quad(
                box, T.within(T.latent, parity, row0 + row, column), T.latent, AT_ONCE, epoch, health, block, BACKOFF, T, there
            )  # fmt: skip
        late |= more
        for turn in cutlass.range_constexpr(T.rounds_at_once):
            row, _, there = T.quad(first + turn, warp, lane)
            square = Float32(0.0)
            if there:
                square = keep_normed(polled[2 * turn : 2 * turn + 2], gamma_at, x_at, row, place, T)
            (square,) = sum_lanes([square])
            if lane == 0 and row < T.pass_rows and warp < T.beside * T.row_warps:
                at = squares_at + (row * T.row_warps + warp % T.row_warps) * 4
                arch.inline_ptx(STORE_ONE, read_only_args=[at, as_word(square)])
    anyone = arch.vote_ballot_sync(late != Uint32(0))
    if lane == 0:
        at = squares_at + (T.pass_rows * T.row_warps + warp) * 4
        arch.inline_ptx(STORE_ONE, read_only_args=[at, Uint32(anyone)])


@cute.jit
def sum_share(
    box: Int64, shares_at: Int32, row0: Int32, first_column: Int32, place: Int32, epoch: Uint32, health: Int64, block: Int32,
    AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, T: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """The shared expert's sums of the block's own columns into shared memory, a quad a lane of two warps.

    Behind them lie four words: the first two say of either warp whether a wait gave up.
    """
    row, quad = place // T.quads_own, place % T.quads_own
    pause(JITTER, epoch, block * 64 + 46)
    asks = row < T.pass_rows
    within = T.within(
        T.shard, Int32(epoch & Uint32(1)), row0 + cutlass.min(row, T.pass_rows - 1), first_column + quad * 4
    )
    words, late = ranks_quad(box, within, T.shard, AT_ONCE, epoch, health, block, BACKOFF, T, asks)
    if asks:
        arch.inline_ptx(STORE_TWO, read_only_args=[shares_at + place * 8, *words])
    anyone = arch.vote_ballot_sync(late != Uint32(0))
    if place % 32 == 0:
        at = shares_at + (T.pass_rows * T.own // 2 + place // 32) * 4
        arch.inline_ptx(STORE_ONE, read_only_args=[at, Uint32(anyone)])
