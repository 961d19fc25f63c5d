"""Sending part of the tail's CuTe DSL kernel: partial latents and the shared expert's partials to those who add them up."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..cute_packets import times
from ..cute_streaming import read
from ..cute_waits import LOAD_TARGET, pause, publish

LOAD_QUAD = "ld.global.v2.u32 {$0, $1}, [$2];"


@cute.jit
def address_of(line: list):
    """Where a line of a table of targets points."""
    return Int64(line[1]) << 32 | Int64(line[0])


@cute.jit
def send_quad(line: list, within: Int32, words: list, epoch: Uint32):
    """Four BF16 values times the line's factor, as two packets in one access."""
    first, second = times(words[0], line[2]), times(words[1], line[2])
    publish(address_of(line) + within, [first, epoch, second, epoch], "sys")


@cute.jit
def planned(
    latent: Int64, share: Int64, latents_to: Int64, shares_to: Int64, task: Int32, rows: Int32, lane: Int32,
    T: cutlass.Constexpr,
):  # fmt: skip
    """What a lane does of a task, all of it arithmetic: (address of its four values, of the line of whom they go to, of the first
    line of the others that latents go to, byte in the slot in launches of even number and in the others, whether latents, whether
    there is such a task).

    A row of a pass that is not live repeats the last one.
    """
    there = T.live_passes(rows) * T.pass_rows
    of_latents = T.latent_tasks(there)
    is_latent, exists = task < of_latents, task < T.tasks(there)
    at, line, more, even, odd = latent, latents_to, latents_to, Int32(0), Int32(0)
    if is_latent:
        row, first, group = T.latent_task(task)
        column = first + lane * 4
        at = latent + (Int64(cutlass.min(row, rows - 1)) * T.latent + column) * 2
        if cutlass.const_expr(T.two_shot):
            owner = column // T.shard_latents
            width, within, whom = T.shard_latents, column - owner * T.shard_latents, owner
        else:
            width, within, whom = T.latent, column, group
        line = latents_to + whom * 16
        more = line
        even, odd = T.within(width, 0, row, within), T.within(width, 1, row, within)
    elif exists:
        row, first = T.share_task(task - of_latents)
        column = first + lane * 4
        at = share + (Int64(cutlass.min(row, rows - 1)) * T.hidden + column) * 2
        owner = column // T.shard
        line = shares_to + owner * 16
        even = T.within(T.shard, 0, row, column - owner * T.shard)
        odd = T.within(T.shard, 1, row, column - owner * T.shard)
    return at, line, more, even, odd, is_latent, exists


@cute.jit
def asked(plan: list, T: cutlass.Constexpr):
    """A lane's four values in two words, and the lines of whom they go to; of the shared expert's the first line alone counts."""
    words = read(LOAD_QUAD, plan[0], 2, [])
    lines = [read(LOAD_TARGET, plan[1], 4, [])]
    for i in cutlass.range_constexpr(1, T.ranks_each):
        lines.append(read(LOAD_TARGET, plan[2] + i * (T.rank_groups * 16), 4, []))
    return words, lines


@cute.jit
def send_planned(
    plans: list, epoch: Uint32, claim: Uint32, block: Int32, T: cutlass.Constexpr, JITTER: cutlass.Constexpr
):  # fmt: skip
    """Everything that is read for some tasks asked for together; then sent. Nothing once a wait has given up."""
    found = [asked(plan, T) for plan in plans]
    pause(JITTER, epoch, block * 64 + 40)
    for i in cutlass.range_constexpr(len(plans)):
        words, lines = found[i]
        _, _, _, even, odd, is_latent, exists = plans[i]
        within = odd if epoch & Uint32(1) != Uint32(0) else even
        if exists and claim == Uint32(0):
            send_quad(lines[0], within, words, epoch)
            if is_latent:
                for line in lines[1:]:
                    send_quad(line, within, words, epoch)
