"""Bounded polls of CuTe DSL kernels: packets of ranks, or of blocks of the own GPU; families share them.

Forms: ``bf16x7e16``, seven values and 16 bits of the epoch in one access of 16 bytes; ``b32e32``, two values and 32 bits, four
accesses of 8 bytes a lane; ``b32e32x2``, two such packets in each access of 16 bytes; ``scalars``, three words and the epoch.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from .cute_streaming import read
from .cute_waits import LOAD_PACKET, LOAD_PAIR, POLLS_A_LOOK, look


@cute.jit
def once(
    at: list, COUNT: cutlass.Constexpr, STRIDE: cutlass.Constexpr, SCOPE: cutlass.Constexpr, FORM: cutlass.Constexpr,
    epoch: Uint32,
):  # fmt: skip
    """One round of polls: (data words of each rank's packets, what its epoch differs by); a whole access of 16 bytes is
    four words, epoch and all, but for ``b32e32x2``.
    """
    words, missing = [], []
    if cutlass.const_expr(FORM in ("bf16x7e16", "scalars")):
        shift = 16 if FORM == "bf16x7e16" else 0
        for i in cutlass.range_constexpr(COUNT):
            words += read(LOAD_PACKET.replace("SCOPE", SCOPE), at[0] + i * STRIDE, 4, [])
        for i in cutlass.range_constexpr(COUNT):
            missing.append((words[4 * i + 3] ^ (epoch << shift)) >> shift)
    else:
        double = FORM == "b32e32x2"
        text, each = (LOAD_PACKET, 4) if double else (LOAD_PAIR, 2)
        tags = []
        for i in cutlass.range_constexpr(COUNT):
            for one in at:
                got = read(text.replace("SCOPE", SCOPE), one + i * STRIDE, each, [])
                words += got[0::2]
                tags += got[1::2]
        size = len(tags) // COUNT
        for i in cutlass.range_constexpr(COUNT):
            differs = Uint32(0)
            for tag in tags[size * i : size * i + size]:
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
    FORM: cutlass.Constexpr, epoch: Uint32, health: Int64, PHASE: cutlass.Constexpr, slot: Int32, block: Int32,
    BACKOFF: cutlass.Constexpr, OF_RANKS: cutlass.Constexpr = True, live: Int32 | None = None, TOGETHER: cutlass.Constexpr = False,
):  # fmt: skip
    """(words of ``COUNT`` packets, ``STRIDE`` bytes apart, once all of them carry the epoch, or after the limit;
    what is missing then: zero if nothing).

    ``at``: addresses of the first, see the forms. It is rank ``slot``'s, where ranks are waited for, and the next one the
    next rank's; or all of them are rank ``slot``'s. A round loads all of them at once; its instructions are there once, so that the
    first round brings those of all others. Every :data:`POLLS_A_LOOK` rounds a lane looks at the clock and at the health record: past the
    limit, or once anyone has given up, it ends with what it has and says whom it missed. A lane with ``live`` zero waits for
    nothing and misses nothing: it has no packets, or its instructions are run ahead of the time they are needed at (:mod:`.cute_row`).
    ``TOGETHER``: all lanes of the warp call this, and all poll until none misses anything, so that they go on as one.
    """
    each = 4 if FORM in ("bf16x7e16", "scalars") else len(at) * (2 if FORM == "b32e32x2" else 1)
    words = [Uint32(0)] * (COUNT * each)
    missing, rounds, started, waits = Uint32(0), Int32(0), Int64(0), cutlass.Boolean(True)
    while waits:
        words, differs = once(at, COUNT, STRIDE, SCOPE, FORM, epoch)
        missing = any_of(differs)
        if cutlass.const_expr(live is not None):
            missing = missing if live != Int32(0) else Uint32(0)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % POLLS_A_LOOK == 0:
            late = Uint32(0)
            for i in cutlass.range_constexpr(COUNT):
                late |= Uint32(1 << (i if OF_RANKS else 0)) << slot if differs[i] != Uint32(0) else Uint32(0)
            started, waits = look(epoch, health, started, late, PHASE, block)
        if cutlass.const_expr(TOGETHER):
            waits = arch.vote_any_sync(waits)
        if cutlass.const_expr(BACKOFF > 0):  # noqa: SIM102, compiled in or not, then asked at run time
            if waits:
                arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(BACKOFF)])
    return words, missing
