"""Consumer part of the CuTe DSL kernels: a warp takes 224 columns of a row through sum, residual, AttnRes and norm."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_mix import mix_of_saved, mixed, tell_prefix
from ..cute_packets import GROUP_BYTES, both, offsets, send
from ..cute_polls import poll
from ..cute_row import KINDS, UNITS
from ..cute_stages import stage
from ..cute_streaming import read
from ..cute_waits import LOAD_TARGET, LOAD_WORD, PARTIAL, TOTAL, pause
from .cute_parts import packed, row_words, seven, store_row_words

# a row is 32 units of 32 packets: one warp a unit, one packet a lane, and one lane for each unit's scalars
SUMS_DONE = 2


@cute.jit
def ranks_at_once(FORM: cutlass.Constexpr, WARPS: cutlass.Constexpr):
    """Ranks whose packets a lane polls in one round: of two values a packet they are 16 registers a rank, and a block
    of many warps leaves a thread few.
    """
    if cutlass.const_expr(FORM == "b32e32"):
        return 16 if WARPS <= 8 else 8 if WARPS <= 12 else 4
    return 16


@cute.jit
def weights_of(res_norm: Int64, res_proj: Int64, norm_w: Int64, packet: Int32, HIDDEN: cutlass.Constexpr):
    """Words of the AttnRes norm, the query and the norm's weight at a lane's columns; no activations, so before the wait.

    Nothing is computed of them here: a warp that waited for them would ask for its activations behind all weights.
    """
    words = []
    for one in (res_norm, res_proj, norm_w):
        words += row_words(one, Int32(0), HIDDEN, packet, True)
    return words


@cute.jit
def saved_words(
    blocks: Int64,
    row: Int32,
    packet: Int32,
    ROWS: cutlass.Constexpr,
    HIDDEN: cutlass.Constexpr,
    BLOCKS: cutlass.Constexpr,
    saved: Int32,
):
    """A lane's columns of every saved block of a row; beyond the ``saved`` that a launch has, the last one again."""
    words = []
    for i in cutlass.range_constexpr(BLOCKS):
        place = cutlass.min(Int32(i), saved - 1)
        words.append(row_words(blocks + Int64(place) * (ROWS * HIDDEN * 2), row, HIDDEN, packet, False))
    return words


@cute.jit
def ranks_sum(
    mailbox: Int64, packet: Int32, COUNT: cutlass.Constexpr, SLOT_PACKETS: cutlass.Constexpr, FORM: cutlass.Constexpr,
    AT_ONCE: cutlass.Constexpr, epoch: Uint32, health: Int64, PHASE: cutlass.Constexpr, slot: Int32, block: Int32, BACKOFF: cutlass.Constexpr,
    live: Int32 | None = None,
):  # fmt: skip
    """(FP32 sum of a lane's packets of ``COUNT`` ranks, in rank order; what was missing after the limit).

    ``packet`` counts from the start of rank ``slot``'s slot, which has ``SLOT_PACKETS`` lanes' packets, as all have.
    """
    stride = SLOT_PACKETS // 8 * GROUP_BYTES[FORM]
    values: list = []
    missing = Uint32(0)
    for first in cutlass.range_constexpr(0, COUNT, AT_ONCE):
        at = [mailbox + first * stride + offset for offset in offsets(packet, FORM)]
        count = min(AT_ONCE, COUNT - first)
        words, more = poll(
            at, count, stride, "sys", FORM, epoch, health, PHASE, slot + first, block, BACKOFF, True, live, True
        )
        missing |= more
        for i in cutlass.range_constexpr(count):
            four = words[4 * i : 4 * i + 4]
            if cutlass.const_expr(FORM == "b32e32"):
                four[3] = four[3] >> (packet % 2 * 16)
            one = seven(four)
            values = [v + w for v, w in zip(values, one, strict=True)] if first + i > 0 else one
    return values, missing


@cute.jit
def own_columns(
    mailbox: Int64, targets: Int64, number: Int32, lane: Int32, epoch: Uint32, health: Int64, block: Int32,
    ROWS: cutlass.Constexpr, TP: cutlass.Constexpr, SHARD: cutlass.Constexpr, FORM: cutlass.Constexpr,
    AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Two-shot: sum the partials of this rank's columns, 32 packets a warp, and send the sums to all ranks.

    A warp whose wait gave up sends nothing, nor does a launch that begins with a claimed record.
    """
    if number < ROWS * SHARD // 32:
        parity = Int32(epoch & Uint32(1))
        packet = parity * ROWS * SHARD + number * 32 + lane
        (claim,) = read(LOAD_WORD, health, 1, [])
        pause(JITTER, epoch, block * 64 + 37 + number)
        values, missing = ranks_sum(
            mailbox, packet, TP, 2 * ROWS * SHARD, FORM, AT_ONCE, epoch, health, PARTIAL, Int32(0), block, BACKOFF
        )
        total = packed(values)
        if cutlass.const_expr(FORM == "b32e32"):
            total[3] = both(total[3], arch.shuffle_sync_bfly(total[3], 1))
        pause(JITTER, epoch, block * 64 + 38 + number)
        for rank in cutlass.range_constexpr(TP):
            target = read(LOAD_TARGET, targets + rank * 16, 4, [])
            address = Int64(target[1]) << 32 | Int64(target[0])
            if missing | claim == Uint32(0):
                send(address, packet, total, target[2], epoch, FORM)


@cute.jit
def store_live(base: Int64, row: Int32, HIDDEN: cutlass.Constexpr, packet: Int32, words: list, live: Int32 | None):
    """A lane's columns of a row, unless this is a rehearsal."""
    if cutlass.const_expr(live is None):
        store_row_words(base, row, HIDDEN, packet, words)
    else:
        if live != Int32(0):
            store_row_words(base, row, HIDDEN, packet, words)


@cute.jit
def finish(
    mailbox: Int64, old: list, mix: list, total: Float32, largest: Float32, folded: list, norm: list, row_at: list,
    unit: Int32, lane: Int32, row: Int32, epoch: Uint32, health: Int64, block: Int32, prefix_out: Int64, mlp_input: Int64,
    ROWS: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr, SHARD: cutlass.Constexpr, SAVED: cutlass.Constexpr,
    RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr, FORM: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    CLUSTER: cutlass.Constexpr, JITTER: cutlass.Constexpr, live: Int32 | None = None,
):  # fmt: skip
    """From all ranks' packets to the two outputs; with ``SHARD`` packets a rank owns, from the owners' sums.

    Sum over ranks in rank order in FP32, rounded; plus the old prefix, rounded; the mix and the norm in FP32, rounded
    once. With ``live`` zero nobody is waited for and nothing told or stored: a rehearsal, which brings the code.
    """
    packet = unit * 32 + lane
    parity = Int32(epoch & Uint32(1))
    stage(JITTER, "listening")
    pause(JITTER, epoch, block * 64 + 33 + unit)
    if cutlass.const_expr(SHARD > 0):
        owner = packet // SHARD
        place = ((2 * owner + parity) * ROWS + row) * SHARD + packet % SHARD
        values, _ = ranks_sum(
            mailbox, place, 1, 2 * ROWS * SHARD, FORM, 1, epoch, health, TOTAL, owner, block, BACKOFF, live
        )
    else:
        place = (parity * ROWS + row) * (HIDDEN // 7) + packet
        values, _ = ranks_sum(
            mailbox,
            place,
            TP,
            2 * ROWS * (HIDDEN // 7),
            FORM,
            AT_ONCE,
            epoch,
            health,
            PARTIAL,
            Int32(0),
            block,
            BACKOFF,
            live,
        )
    stage(JITTER, "heard")
    new = packed(values)
    if cutlass.const_expr(not RESTART):
        new = packed([before + delta for before, delta in zip(seven(old), seven(new), strict=True)])
    p = seven(new)
    tell_prefix(p, mix, folded, row_at, unit, lane, epoch, block, CLUSTER, JITTER, live)
    stage(JITTER, "sent")
    out = mixed(
        p, mix, total, largest, norm, row_at, lane, epoch, health, block, HIDDEN, SAVED, EPS, BACKOFF, CLUSTER, live
    )  # fmt: skip
    # not before: what the row's other warps told is asked for behind whatever this one has stored
    store_live(prefix_out, row, HIDDEN, packet, new, live)
    store_live(mlp_input, row, HIDDEN, packet, packed(out), live)


@cute.jit
def take_unit(
    tensors: list, weights: list, number: Int32, lane: Int32, rows: Int32, saved: Int32, epoch: Uint32, block: Int32,
    ROWS: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr, SHARD: cutlass.Constexpr, SAVED: cutlass.Constexpr,
    RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr, FORM: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    WAIT_FOR: cutlass.Constexpr, JITTER: cutlass.Constexpr, REHEARSE: cutlass.Constexpr = False,
):  # fmt: skip
    """Unit ``number`` (row by row) from its activations to the outputs; nothing where the launch has no such row.

    ``tensors`` are addresses: prefix, blocks, prefix_out, mlp_input, mailbox, scalars, health; ``weights``: words of
    :func:`weights_of`. ``WAIT_FOR`` threads, if not zero, meet behind the dependency wait, which comes here whether or not it
    came before, and then the packets are polled. ``REHEARSE``, of such: what comes after it is run once before it for nothing: a warp
    that has nothing else to do has its instructions fetched when it needs them.
    """
    prefix, blocks, prefix_out, mlp_input, mailbox, scalars, health = tensors
    row, unit = number // UNITS, number % UNITS
    packet = unit * 32 + lane
    if row < rows:
        old = [Uint32(0)] * 4
        sources = saved_words(blocks, row, packet, ROWS, HIDDEN, SAVED, saved)
        if cutlass.const_expr(not RESTART):
            old = row_words(prefix, row, HIDDEN, packet, False)
        # from here on what was asked for is waited for
        folded = [g * q for g, q in zip(seven(weights[:4]), seven(weights[4:8]), strict=True)]
        norm = seven(weights[8:])
        here = [scalars + Int64(row) * (KINDS * UNITS * 16)]
        mix, total, largest = mix_of_saved(
            sources, saved, folded, here, unit, lane, epoch, health, block, HIDDEN, EPS, 1, JITTER
        )
        stage(JITTER, "asked")
        if cutlass.const_expr(WAIT_FOR > 0):
            arch.griddepcontrol_wait()
        if cutlass.const_expr(REHEARSE):
            # behind the dependency wait: code fetched ahead of it was not there after it, on an H200
            for live in cutlass.range(2, unroll=1):
                if live != Int32(0):
                    arch.barrier(barrier_id=SUMS_DONE, number_of_threads=WAIT_FOR)
                finish(
                    mailbox, old, mix, total, largest, folded, norm, here, unit, lane, row, epoch, health, block, prefix_out,
                    mlp_input, ROWS, HIDDEN, TP, SHARD, SAVED, RESTART, EPS, FORM, AT_ONCE, BACKOFF, 1, JITTER, live,
                )  # fmt: skip
        else:
            if cutlass.const_expr(WAIT_FOR > 0):
                arch.barrier(barrier_id=SUMS_DONE, number_of_threads=WAIT_FOR)
            finish(
                mailbox, old, mix, total, largest, folded, norm, here, unit, lane, row, epoch, health, block, prefix_out,
                mlp_input, ROWS, HIDDEN, TP, SHARD, SAVED, RESTART, EPS, FORM, AT_ONCE, BACKOFF, 1, JITTER,
            )  # fmt: skip
    else:
        if cutlass.const_expr(WAIT_FOR > 0):
            arch.griddepcontrol_wait()
            arch.barrier(barrier_id=SUMS_DONE, number_of_threads=WAIT_FOR)
