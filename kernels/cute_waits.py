"""Packets and bounded waits of CuTe DSL kernels: what blocks and ranks tell each other; families share them.

A packet is one access, data and epoch together: whoever sees the epoch has the data, so no fence orders a publish or a
poll. 16 bytes are one access only as .b128, 8 bytes as .b64. Flags are for what is stored apart: after :data:`FENCE`.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute
from cutlass.cute import arch

from .cute_streaming import read

LOAD_PACKET = (
    "{ .reg .b128 v; .reg .b64 a, b; ld.relaxed.SCOPE.global.b128 v, [$4]; mov.b128 {a, b}, v; "
    "mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b; }"
)
STORE_PACKET = (
    "{ .reg .b128 v; .reg .b64 a, b; mov.b64 a, {{$r1}, {$r2}}; mov.b64 b, {{$r3}, {$r4}}; mov.b128 v, {a, b}; "
    "st.relaxed.SCOPE.global.b128 [{$r0}], v; }"
)
LOAD_PAIR = "{ .reg .b64 v; ld.relaxed.SCOPE.global.b64 v, [$2]; mov.b64 {$0, $1}, v; }"
STORE_PAIR = "{ .reg .b64 v; mov.b64 v, {{$r1}, {$r2}}; HOW.global.b64 [{$r0}], v; }"
# the switch copies it to every rank; of 16 bytes there is none that is one access
HOW = {"peer": "st.relaxed.sys", "multicast": "multimem.st.relaxed.sys"}
LOAD_WORD, STORE_WORD = "ld.relaxed.gpu.global.u32 $0, [$1];", "st.relaxed.gpu.global.u32 [{$r0}], {$r1};"
FENCE = "fence.acq_rel.gpu;"
LOAD_TARGET = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
# the health record, as in .health: words of the claim, of the sets of missed ranks, of the limit
CLAIM_PHASE, CLAIM_SLOT, CLAIM_BLOCK, MISSED, LIMIT = 1, 2, 3, 4, 10
POLLS_A_LOOK = 1024
DEFAULT_LIMIT_NS = 10_000_000_000
PARTIAL, TOTAL, ROW = 1, 2, 3
"""Phases: ranks' partial sums, owners' sums, and blocks of the own GPU, of which no set is kept."""


@cute.jit
def epoch_of(counter: Int64, block: Int32):
    """This launch's epoch: one more than what the block's counter holds."""
    (count,) = read(LOAD_WORD, counter + block * 4, 1, [])
    return count + Uint32(1)


@cute.jit
def count_launch(counter: Int64, block: Int32, epoch: Uint32):
    """What the block's next launch finds. By one thread, when all warps of the block have read the counter."""
    arch.inline_ptx(STORE_WORD, read_only_args=[counter + block * 4, epoch])


@cute.jit
def publish(address: Int64, words: list, SCOPE: cutlass.Constexpr):
    """Store one packet of four words, to what ``SCOPE`` (``gpu`` or ``sys``) reaches."""
    arch.inline_ptx(STORE_PACKET.replace("SCOPE", SCOPE), read_only_args=[address, *words])


@cute.jit
def publish_pair(address: Int64, word: Uint32, epoch: Uint32, STORES: cutlass.Constexpr):
    """Store one packet of a word and the epoch: to an address, or through the switch to all ranks."""
    arch.inline_ptx(STORE_PAIR.replace("HOW", HOW[STORES]), read_only_args=[address, word, epoch])


@cute.jit
def raise_flag(flags: Int64, place: Int32, epoch: Uint32):
    """Word ``place`` of the flags: what this thread stored, or saw stored before a barrier, is there for blocks of the own GPU."""
    arch.inline_ptx(FENCE)
    arch.inline_ptx(STORE_WORD, read_only_args=[flags + Int64(place) * 4, epoch])


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
def look(epoch: Uint32, health: Int64, started: Int64, late: Uint32 | None, PHASE: cutlass.Constexpr, block: Int32):
    """(when the wait's first look was, whether to wait on): see .health for the record.

    ``late``: the set of ranks whose data is missing; None in kernels that wait for no rank.
    """
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
            arch.inline_ptx(STORE_WORD, read_only_args=[health + 4 * CLAIM_PHASE, Uint32(PHASE)])
            arch.inline_ptx(STORE_WORD, read_only_args=[health + 4 * CLAIM_SLOT, slot])
            arch.inline_ptx(STORE_WORD, read_only_args=[health + 4 * CLAIM_BLOCK, Uint32(block)])
    if cutlass.const_expr(late is not None):  # noqa: SIM102, compiled in or not, then asked at run time
        # a later launch misses whom the first one stopped publishing, so it adds nothing
        if not on and holder == name:
            missed = late if cutlass.const_expr(PHASE != ROW) else Uint32(0)
            at = health + 4 * (MISSED + PHASE - 1)
            arch.inline_ptx("red.relaxed.gpu.global.or.b32 [{$r0}], {$r1};", read_only_args=[at, missed])
    return first, on
