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
def asked(
    latent: Int64, share: Int64, latents_to: Int64, shares_to: Int64, task: Int32, rows: Int32, lane: Int32,
    T: cutlass.Constexpr,
):  # fmt: skip
    """(two words of a lane, lines of whom they go to, row, column of the slot, whether latents, whether there is such a task).

    A row of a pass that is not live repeats the last one.
    """
    there = T.live_passes(rows) * T.pass_rows
    of_latents = T.latent_tasks(there)
    is_latent, exists = task < of_latents, task < T.tasks(there)
    row, column, group = T.latent_task(task)
    other_row, other_column = T.share_task(task - of_latents)
    row = row if is_latent else other_row
    row = row if exists else Int32(0)
    column = (column if is_latent else other_column) + lane * 4
    column = column if exists else lane * 4
    source, width = cutlass.min(row, rows - 1), T.latent if is_latent else T.hidden
    at = (latent if is_latent else share) + (Int64(source) * width + column) * 2
    words = read(LOAD_QUAD, at, 2, [])
    share_owner = column // T.shard
    if cutlass.const_expr(T.two_shot):
        latent_owner = column // T.shard_latents
        lines = [(latents_to + latent_owner * 16) if is_latent else (shares_to + share_owner * 16)]
        column = column - (latent_owner * T.shard_latents if is_latent else share_owner * T.shard)
    else:
        lines = [(latents_to + group * 16) if is_latent else (shares_to + share_owner * 16)]
        for i in cutlass.range_constexpr(1, T.ranks_each):
            lines.append(latents_to + (group + i * T.rank_groups) * 16)
        column = column if is_latent else column - share_owner * T.shard
    return words, [read(LOAD_TARGET, line, 4, []) for line in lines], row, column, is_latent, exists


@cute.jit
def send(
    latent: Int64, share: Int64, latents_to: Int64, shares_to: Int64, number: Int32, rows: Int32, lane: Int32, epoch: Uint32,
    claim: Uint32, block: Int32,
    T: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """What warp ``number`` of the making blocks sends: latents first. Nothing once a wait has given up."""
    warps = T.making * 16
    width = T.shard_latents if cutlass.const_expr(T.two_shot) else T.latent
    for first in cutlass.range(0, T.turns, T.tasks_ahead, unroll=1):
        found = [
            asked(latent, share, latents_to, shares_to, number + (first + i) * warps, rows, lane, T)
            for i in range(min(T.tasks_ahead, T.turns))
        ]
        pause(JITTER, epoch, block * 64 + 40 + first)
        for words, lines, row, column, is_latent, exists in found:
            parity = Int32(epoch & Uint32(1))
            within = T.within(width if is_latent else Int32(T.shard), parity, row, column)
            if exists and claim == Uint32(0):
                send_quad(lines[0], within, words, epoch)
                if is_latent:
                    for line in lines[1:]:
                        send_quad(line, within, words, epoch)
