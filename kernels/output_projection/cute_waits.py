"""Waits of the CuTe DSL kernels: epochs, bounded polls, and delays for tests."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute
from cutlass.cute import arch

from ..cute_streaming import read

LOAD_PACKET = (
    "{ .reg .b128 v; .reg .b64 a, b; ld.relaxed.SCOPE.global.b128 v, [$4]; mov.b128 {a, b}, v; "
    "mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b; }"
)
LOAD_PAIR = "{ .reg .b64 v; ld.relaxed.SCOPE.global.b64 v, [$2]; mov.b64 {$0, $1}, v; }"
LOAD_WORD = "ld.relaxed.gpu.global.u32 $0, [$1];"
LOAD_TARGET = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
# the health record, as in ..health: words of the claim, of the sets of missed ranks, of the limit
CLAIM_PHASE, CLAIM_SLOT, CLAIM_BLOCK, MISSED, LIMIT = 1, 2, 3, 4, 10
POLLS_A_LOOK = 1024
DEFAULT_LIMIT_NS = 10_000_000_000
PARTIAL, TOTAL, ROW = 1, 2, 3


@cute.jit
def epoch_of(counter: Int64, block: Int32):
    """This launch's epoch: one more than what the block's counter holds."""
    (count,) = read(LOAD_WORD, counter + block * 4, 1, [])
    return count + Uint32(1)


@cute.jit
def count_launch(counter: Int64, block: Int32, epoch: Uint32):
    """What the block's next launch finds. By one thread, when all warps of the block have read the counter."""
    arch.inline_ptx("st.relaxed.gpu.global.u32 [{$r0}], {$r1};", read_only_args=[counter + block * 4, epoch])


@cute.jit
def pause(JITTER: cutlass.Constexpr, epoch: Uint32, place: Int32):
    """Tests only: a delay of up to 8 microseconds, another at every place and in every launch."""
    if cutlass.const_expr(JITTER > 0):
        x = (
            (epoch * Uint32(0x9E3779B1))
            ^ (Uint32(place) * Uint32(0x85EBCA77))
            ^ Uint32(JITTER * 0xC2B2AE3D & 0xFFFFFFFF)
        )
        x = (x ^ (x >> 15)) * Uint32(0x2C1B3C6D)
        x = (x ^ (x >> 12)) * Uint32(0x297A2D39)
        arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[(x ^ (x >> 15)) & Uint32(0x1FFF)])


@cute.jit
def release(JITTER: cutlass.Constexpr, place: Int32):
    """Let the next launch start; in tests late, by the clock's whim: no counter may be read before the wait."""
    if cutlass.const_expr(JITTER > 0):
        pause(JITTER, Uint32(arch.globaltimer() >> 10), place)
    arch.griddepcontrol_launch_dependents()


@cute.jit
def once(
    at: list, COUNT: cutlass.Constexpr, STRIDE: cutlass.Constexpr, SCOPE: cutlass.Constexpr, TAG_BITS: cutlass.Constexpr,
    epoch: Uint32,
):  # fmt: skip
    """One round of polls: (four words of each rank's packets, what its epoch differs by)."""
    words, missing = [], []
    if cutlass.const_expr(len(at) == 1):
        for i in cutlass.range_constexpr(COUNT):
            words += read(LOAD_PACKET.replace("SCOPE", SCOPE), at[0] + i * STRIDE, 4, [])
        for i in cutlass.range_constexpr(COUNT):
            missing.append((words[4 * i + 3] ^ (epoch << (32 - TAG_BITS))) >> (32 - TAG_BITS))
    else:
        tags = []
        for i in cutlass.range_constexpr(COUNT):
            for one in at:
                data, tag = read(LOAD_PAIR.replace("SCOPE", SCOPE), one + i * STRIDE, 2, [])
                words.append(data)
                tags.append(tag)
        for i in cutlass.range_constexpr(COUNT):
            differs = Uint32(0)
            for tag in tags[4 * i : 4 * i + 4]:
                differs |= tag ^ epoch
            missing.append(differs)
    return words, missing


@cute.jit
def any_of(missing: list):
    """Whether one of the epochs differs, as a number that is not zero."""
    found = missing[0]
    for one in missing[1:]:
        found |= one
    return found


@cute.jit
def poll(
    at: list, COUNT: cutlass.Constexpr, STRIDE: cutlass.Constexpr, SCOPE: cutlass.Constexpr,
    TAG_BITS: cutlass.Constexpr, epoch: Uint32, health: Int64, PHASE: cutlass.Constexpr, slot: Int32, block: Int32,
    BACKOFF: cutlass.Constexpr,
):  # fmt: skip
    """(words of ``COUNT`` packets, ``STRIDE`` bytes apart, once all of them carry the epoch, or after the limit;
    what is missing then: zero if nothing).

    ``at``: addresses of the first, one of 16 bytes or four of 8. It is rank ``slot``'s, where ranks are waited for. A round
    loads all of them at once. Every :data:`POLLS_A_LOOK` rounds a lane looks at the clock and at the health record: past the
    limit, or once anyone has given up, it ends with what it has and says whom it missed.
    """
    words, each = once(at, COUNT, STRIDE, SCOPE, TAG_BITS, epoch)
    missing = any_of(each)
    rounds, started = Int32(0), Int64(0)
    waits = missing != Uint32(0)
    while waits:
        if cutlass.const_expr(BACKOFF > 0):
            arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(BACKOFF)])
        words, each = once(at, COUNT, STRIDE, SCOPE, TAG_BITS, epoch)
        missing = any_of(each)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % POLLS_A_LOOK == 0:
            late = Uint32(0)
            for i in cutlass.range_constexpr(COUNT):
                late |= Uint32(1 << i) << slot if each[i] != Uint32(0) else Uint32(0)
            started, waits = look(epoch, health, started, late, PHASE, block)
    return words, missing


@cute.jit
def look(epoch: Uint32, health: Int64, started: Int64, late: Uint32, PHASE: cutlass.Constexpr, block: Int32):
    """(when the wait's first look was, whether to wait on): see ..health for the record."""
    now = arch.globaltimer()
    first = started if started != Int64(0) else now
    (claimed,) = read(LOAD_WORD, health, 1, [])
    (below,) = read(LOAD_WORD, health + 4 * LIMIT, 1, [])
    (above,) = read(LOAD_WORD, health + 4 * LIMIT + 4, 1, [])
    limit = Int64(Uint64(above)) << 32 | Int64(Uint64(below))
    limit = limit if limit != Int64(0) else Int64(DEFAULT_LIMIT_NS)
    on, holder = claimed == Uint32(0), claimed
    name = epoch if epoch != Uint32(0) else Uint32(1)
    if on and now - first > limit:
        on = False
        won = arch.inline_ptx(
            "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], {$r1}, {$r2};", write_only_types=[Uint32],
            read_only_args=[health, Uint32(0), name],
        )  # fmt: skip
        holder = won if won != Uint32(0) else name
        if won == Uint32(0):
            slot = Uint32(0)
            if cutlass.const_expr(PHASE != ROW):
                slot = Uint32(arch.popc((late & (Uint32(0) - late)) - Uint32(1)))
            put = "st.relaxed.gpu.global.u32 [{$r0}], {$r1};"
            arch.inline_ptx(put, read_only_args=[health + 4 * CLAIM_PHASE, Uint32(PHASE)])
            arch.inline_ptx(put, read_only_args=[health + 4 * CLAIM_SLOT, slot])
            arch.inline_ptx(put, read_only_args=[health + 4 * CLAIM_BLOCK, Uint32(block)])
    # a later launch misses whom the first one stopped publishing, so it adds nothing
    if not on and holder == name:
        missed = late if cutlass.const_expr(PHASE != ROW) else Uint32(0)
        at = health + 4 * (MISSED + PHASE - 1)
        arch.inline_ptx("red.relaxed.gpu.global.or.b32 [{$r0}], {$r1};", read_only_args=[at, missed])
    return first, on
