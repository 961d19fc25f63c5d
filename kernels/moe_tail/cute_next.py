"""Finishing part of the tail's CuTe DSL kernel: a row's columns of all ranks, residual, the next AttnRes and norm."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_mix import mix_of_saved, mixed, tell_prefix, values_of
from ..cute_numbers import rounded
from ..cute_polls import poll
from ..cute_row import LOAD_OWN, OWN_BLOCK, STORE_OWN, row_of_block
from ..cute_stages import stage
from ..cute_streaming import LOAD_X, read
from ..cute_waits import epoch_of, pause, release

LOAD_WEIGHT = "ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
STORE_EIGHT = "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
COLUMNS = 16
# a phase of the health record: behind the sums that a rank may have missed
RANKS_COLUMNS = 4


@cute.jit
def sixteen(text: cutlass.Constexpr, at: Int64):
    """Sixteen neighbouring BF16 values, in eight words."""
    return read(text, at, 4, []) + read(text, at + 16, 4, [])


@cute.jit
def sixteen_near(at: Int32):
    """The same from shared memory."""
    return read(LOAD_OWN, Int64(at), 4, []) + read(LOAD_OWN, Int64(at + 16), 4, [])


@cute.jit
def folded_query(kept_at: Int32):
    """AttnRes norm times query at a lane's columns, from the words that it kept."""
    gamma, query = values_of(sixteen_near(kept_at), COLUMNS), values_of(sixteen_near(kept_at + 32), COLUMNS)
    return [g * q for g, q in zip(gamma, query, strict=True)]


@cute.jit
def store_sixteen(at: Int64, words: list):
    """The reverse."""
    for i in cutlass.range_constexpr(2):
        arch.inline_ptx(STORE_EIGHT, read_only_args=[at + 16 * i, *words[4 * i : 4 * i + 4]])


@cute.jit
def in_words(values: list):
    """FP32 values rounded, two a word."""
    return [rounded(values[i], values[i + 1]) for i in range(0, len(values), 2)]


@cute.jit
def end_row(
    prefix_out: Int64, next_input: Int64, delta_at: Int64, owner: Int32, given: list, kept_at: Int32, row_at: list, unit: Int32,
    lane: Int32, epoch: Uint32, health: Int64, block: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """From the ranks' columns to both outputs, at a lane's addresses.

    ``given``: words of the residual before; the saved blocks' mix, its weights' sum and largest score.
    """
    old, mix, total, largest = given
    four = [delta_at + 16 * i for i in range(4)]
    folded = folded_query(kept_at)
    delta, _ = poll(
        four, 1, 0, "sys", "b32e32x2", epoch, health, RANKS_COLUMNS, owner, block, BACKOFF, TOGETHER=True
    )  # fmt: skip
    stage(JITTER, "heard")
    before, change = values_of(old, COLUMNS), values_of(delta, COLUMNS)
    new = in_words([a + b for a, b in zip(before, change, strict=True)])
    p = values_of(new, COLUMNS)
    tell_prefix(p, mix, folded, row_at, unit, lane, epoch, block, OWN_BLOCK, JITTER)
    stage(JITTER, "told")
    store_sixteen(prefix_out, new)
    norm = values_of(sixteen_near(kept_at + 64), COLUMNS)
    out = mixed(
        p, mix, total, largest, norm, row_at, lane, epoch, health, block, T.hidden, T.saved, EPS, BACKOFF, OWN_BLOCK
    )  # fmt: skip
    store_sixteen(next_input, in_words(out))


@cute.jit
def saved_mix(
    blocks: Int64, fresh: list, kept_at: Int32, row_at: list, saved: Int32, unit: Int32, lane: Int32, epoch: Uint32,
    health: Int64, block: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """(mix of the saved blocks at a lane's columns, its weights' sum, the largest score); ``blocks``: the first one's address there.

    ``fresh``: words of a lane's weights, kept once the saved blocks are asked for.
    """
    sources = []
    for i in cutlass.range_constexpr(T.saved):
        one = cutlass.min(Int32(i), saved - 1)
        sources.append(sixteen(LOAD_X, blocks + Int64(one) * (T.rows * T.hidden * 2)))
    for i in cutlass.range_constexpr(len(fresh) // 4):
        arch.inline_ptx(STORE_OWN, read_only_args=[kept_at + 16 * i, *fresh[4 * i : 4 * i + 4]])
    return mix_of_saved(
        sources, saved, folded_query(kept_at), row_at, unit, lane, epoch, health, block, T.hidden, EPS, OWN_BLOCK, JITTER
    )  # fmt: skip


@cute.jit
def finish_row(
    prefix: Int64, blocks: Int64, prefix_out: Int64, next_input: Int64, deltas: Int64, fresh: list, kept_at: Int32,
    row_at: list, row: Int32, saved: Int32, unit: Int32, lane: Int32, epoch: Uint32, health: Int64, block: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """One warp's 512 columns of a row."""
    column = unit * 512 + lane * COLUMNS
    at = (Int64(row) * T.hidden + column) * 2
    mix, total, largest = saved_mix(
        blocks + at, fresh, kept_at, row_at, saved, unit, lane, epoch, health, block, T, EPS, JITTER
    )  # fmt: skip
    old = sixteen(LOAD_X, prefix + at)
    owner = column // T.shard
    place = owner * T.slot_bytes(T.shard) + T.within(T.shard, Int32(epoch & Uint32(1)), row, column % T.shard)
    stage(JITTER, "listening")
    pause(JITTER, epoch, block * 64 + 33 + unit)
    end_row(
        prefix_out + at, next_input + at, deltas + place, owner, [old, mix, total, largest], kept_at, row_at, unit, lane, epoch,
        health, block, T, EPS, BACKOFF, JITTER,
    )  # fmt: skip


@cute.jit
def finish_rows(
    tensors: list, memory: cute.Pointer, rows: Int32, saved: Int32, block: Int32, t: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    JITTER: cutlass.Constexpr,
):  # fmt: skip
    """All of a finishing block, but for its counter: rows ``block``, ``block + finishing`` and so on.

    ``tensors``: addresses of prefix, blocks, res_norm, res_proj, norm_w, prefix_out, next_input, the mailbox deltas, the
    counters and the health record. Returns the epoch.
    """
    prefix, blocks, res_norm, res_proj, norm_w, prefix_out, next_input, deltas, counter, health = tensors
    lane = t % 32
    unit = arch.make_warp_uniform(arch.warp_idx())
    row_at = row_of_block(t, 512, T.units)
    if cutlass.const_expr(RELEASE == "entry"):
        release(JITTER, block * 64 + 16 + unit)
    at = Int64(cutlass.min(unit, T.units - 1) * 512 + lane * COLUMNS) * 2
    gamma, query, norm = (sixteen(LOAD_WEIGHT, one + at) for one in (res_norm, res_proj, norm_w))
    if cutlass.const_expr(RELEASE == "loads"):
        release(JITTER, block * 64 + 16 + unit)
    arch.sync_threads()
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")
    epoch = epoch_of(counter, block)
    # weights go to each lane's own place, out of the way of the saved blocks' words, but after these are asked for
    kept_at, fresh = memory.toint() + t * 96, [*gamma, *query, *norm]
    first = block - T.making
    takes = (unit < T.units) & (first < rows)
    if takes:
        finish_row(
            prefix, blocks, prefix_out, next_input, deltas, fresh, kept_at, row_at, first, saved, unit, lane, epoch, health,
            block, T, EPS, BACKOFF, JITTER,
        )  # fmt: skip
    if cutlass.const_expr(T.finishing < T.rows):  # noqa: SIM102, compiled in or not, then asked at run time
        if takes:
            for row in cutlass.range(first + T.finishing, rows, T.finishing, unroll=1):
                finish_row(
                    prefix, blocks, prefix_out, next_input, deltas, [], kept_at, row_at, row, saved, unit, lane, epoch,
                    health, block, T, EPS, BACKOFF, JITTER,
                )  # fmt: skip
    arch.sync_threads()
    return epoch
