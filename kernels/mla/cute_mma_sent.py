"""What the launches of the MLA core tell other ranks where contexts lie over them: epochs, and words of queries to all."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..cute_streaming import read
from ..cute_waits import LOAD_WORD, count_launch, epoch_of, pause, publish_pair

LOAD_ADDRESS = "ld.global.v2.u32 {$0, $1}, [$2];"
TARGETS_AT_ONCE = 8
"""Addresses of the table that a thread has in registers together."""


@cute.jit
def begun(to: Any, block: Int32, counts: cutlass.Boolean, D: cutlass.Constexpr):
    """[first of ``to``, epoch, what the health record's claim was, counters, record], read behind the dependency wait.

    ``to``: [mailbox or table, the launch's counters, health record, ...]. Blocks that do not count take part in nothing.
    """
    if cutlass.const_expr(D is None):
        return None
    epoch = epoch_of(to[1], block if counts else Int32(0))
    (claim,) = read(LOAD_WORD, to[2], 1, [])
    return [to[0], epoch, claim, to[1], to[2]]


@cute.jit
def ended(told: Any, block: Int32, t: Int32, D: cutlass.Constexpr):
    """Count the launch; behind a barrier after :func:`begun`."""
    if cutlass.const_expr(D is not None):  # noqa: SIM102, compiled in or not, then asked at run time
        if t == 0:
            count_launch(told[3], block, told[1])


@cute.jit
def send_word(told: list, row: Int32, head: Int32, column: Int32, word: Uint32, D: cutlass.Constexpr):
    """A word of a query, from ``column`` on, to all ranks; of E4M3 values every second lane's. Nothing once a wait has given up."""
    first = column % 4 == 0 if cutlass.const_expr(D.fp8) else column >= 0
    if first & (told[2] == Uint32(0)):
        pause(D.jitter, told[1], row * 1024 + column)
        within = D.query_within(Int32(told[1] & Uint32(1)), row, head) + column * (2 if D.fp8 else 4)
        for few in cutlass.range_constexpr(0, D.size, TARGETS_AT_ONCE):
            lines = [
                read(LOAD_ADDRESS, told[0] + rank * 16, 2, [])
                for rank in range(few, min(few + TARGETS_AT_ONCE, D.size))
            ]
            for line in lines:
                to = Int64(line[1]) << 32 | Int64(line[0])
                publish_pair(to + within, word, told[1], "peer")


@cute.jit
def placed(told: list, owner: Int32):
    """(address of this rank's slot on rank ``owner``, factor of what goes there)."""
    line = read("ld.global.v4.u32 {$0, $1, $2, $3}, [$4];", told[0] + owner * 16, 4, [])
    return Int64(line[1]) << 32 | Int64(line[0]), line[2]
