"""Bounded polls of the tail's CuTe DSL kernel, whose warps poll together."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from .. import cute_polls
from ..cute_polls import any_of, once
from ..cute_waits import look


@cute.jit
def poll(
    at: list, COUNT: cutlass.Constexpr, STRIDE: cutlass.Constexpr, SCOPE: cutlass.Constexpr,
    FORM: cutlass.Constexpr, epoch: Uint32, health: Int64, PHASE: cutlass.Constexpr, slot: Int32, block: Int32,
    BACKOFF: cutlass.Constexpr, OF_RANKS: cutlass.Constexpr, asks: cutlass.Boolean,
):  # fmt: skip
    """What :func:`..cute_polls.poll` does and gives back where a warp polls together, its first round apart from the others.

    All lanes of the warp call this; those that do not ``ask`` wait for nothing, and nothing is missing of theirs.

    With one loop for all rounds threads that hold weights in registers had some of them on the stack. None are held there now, and
    one loop would fit.
    """
    words, each = once(at, COUNT, STRIDE, SCOPE, FORM, epoch)
    missing = any_of(each) if asks else Uint32(0)
    rounds, started = Int32(0), Int64(0)
    waits = missing != Uint32(0)
    # as one: a shuffle behind a loop that lanes leave one by one takes a slow way
    while arch.vote_any_sync(waits):
        if cutlass.const_expr(BACKOFF > 0):
            arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(BACKOFF)])
        words, each = once(at, COUNT, STRIDE, SCOPE, FORM, epoch)
        missing = any_of(each) if asks else Uint32(0)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % cute_polls.POLLS_A_LOOK == 0:
            late = Uint32(0)
            for i in cutlass.range_constexpr(COUNT):
                late |= Uint32(1 << (i if OF_RANKS else 0)) << slot if each[i] != Uint32(0) else Uint32(0)
            started, waits = look(epoch, health, started, late, PHASE, block)
    return words, missing
