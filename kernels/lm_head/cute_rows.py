"""CuTe DSL kernel: rows of an embedding table that is sharded by vocabulary, from the rank that holds each to all ranks."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_polls import poll
from ..cute_streaming import read
from ..cute_waits import LOAD_TARGET, LOAD_WORD, PARTIAL, count_launch, epoch_of, pause, publish

LOAD_TOKEN, LOAD_FOUR = "ld.global.u32 $0, [$1];", "ld.global.v2.u32 {$0, $1}, [$2];"
STORE_FOUR = "st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};"
ONE, NANS = 0x3F803F80, 0x7FC07FC0


@cute.jit
def address_of(target: list):
    """Where a line of the table of targets points."""
    return Int64(target[1]) << 32 | Int64(target[0])


@cute.jit
def send_four(
    targets: Int64, within: Int32, own: list, theirs: list, owner: Int32, mine: cutlass.Boolean, may: cutlass.Boolean,
    epoch: Uint32, E: cutlass.Constexpr,
):  # fmt: skip
    """Four values of a row to every rank, by the rank that holds it; a slot whose factor is not one plays another rank."""
    for rank in cutlass.range_constexpr(E.ranks):
        target = read(LOAD_TARGET, targets + rank * 16, 4, [])
        other = target[2] != Uint32(ONE)
        sends = (owner == rank) if other else mine
        first = theirs[0] if other else own[0]
        second = theirs[1] if other else own[1]
        if sends & may:
            publish(address_of(target) + within, [first, epoch, second, epoch], "sys")


@cute.kernel
def k3_lm_head_cute_rows_embed(
    tokens: cute.Tensor, table: cute.Tensor, peers: cute.Tensor, x: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor,
    epochs: cute.Tensor, health: cute.Tensor, rows: Int32, rank: Int32, E: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """x[rows, hidden] = row tokens[i] of all ranks' tables, one after the other; a thread takes four values of one row.

    A token outside the vocabulary gives a row of NaN. Each rank also publishes a beacon in every launch, and waits for all of
    them: so nobody publishes into a place that another rank has yet to read, whoever owns the rows.
    """
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    arch.griddepcontrol_wait()
    row, index = block // E.parts, block % E.parts * E.threads + t
    counter, record, boxes = epochs.iterator.toint(), health.iterator.toint(), mailbox.iterator.toint()
    epoch = epoch_of(counter, block)
    (claim,) = read(LOAD_WORD, record, 1, [])
    live, place = cutlass.min(row, rows - 1), cutlass.min(index, E.packets - 1)
    (word,) = read(LOAD_TOKEN, tokens.iterator.toint() + Int64(live) * 4, 1, [])
    beacon = read(LOAD_TARGET, targets.iterator.toint() + cutlass.min(t, E.ranks - 1) * 16, 4, [])
    theirs = read(LOAD_FOUR, peers.iterator.toint() + (Int64(live) * E.hidden + place * 4) * 2, 2, [])
    inside = word < Uint32(E.ranks * E.vocab)
    token = Int32(word) if inside else Int32(0)
    owner = token // E.vocab
    mine = inside & (owner == rank)
    local = token - rank * E.vocab if mine else Int32(0)
    own = read(LOAD_FOUR, table.iterator.toint() + (Int64(local) * E.hidden + place * 4) * 2, 2, [])
    parity = Int32(epoch & Uint32(1))
    there = (index < E.packets) & (row < rows)
    may = inside & there & (claim == Uint32(0))
    pause(JITTER, epoch, block * 64)
    if (block == 0) & (t < E.ranks) & (claim == Uint32(0)):
        publish(address_of(beacon) + E.beacon(parity), [Uint32(0), Uint32(0), Uint32(0), epoch], "sys")
    within = E.within(parity, row, place)
    send_four(targets.iterator.toint(), within, own, theirs, owner, mine, may, epoch, E)
    first, second = own[0], own[1]
    if there & inside & (owner != rank):
        at = boxes + (Int64(owner) * E.slot_bytes + within)
        found, _ = poll([at], 1, 0, "sys", "b32e32x2", epoch, record, PARTIAL, owner, block, BACKOFF)
        first, second = found[0], found[1]
    first = first if inside else Uint32(NANS)
    second = second if inside else Uint32(NANS)
    if there:
        to = x.iterator.toint() + (Int64(row) * E.hidden + index * 4) * 2
        arch.inline_ptx(STORE_FOUR, read_only_args=[to, first, second])
    if (block == 0) & (t < E.ranks):
        at = boxes + (Int64(t) * E.slot_bytes + E.beacon(parity))
        poll([at], 1, 0, "sys", "scalars", epoch, record, PARTIAL, t, block, BACKOFF)
    arch.sync_threads()
    if t == 0:  # all warps have read the counter
        count_launch(counter, block, epoch)


k3_lm_head_cute_rows_embed.set_name_prefix(
    "k3_lm_head_cute_rows_embed", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    tokens: cute.Tensor, table: cute.Tensor, peers: cute.Tensor, x: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor,
    epochs: cute.Tensor, health: cute.Tensor, rows: Int32, rank: Int32, E: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: some blocks a row."""
    k3_lm_head_cute_rows_embed(
        tokens, table, peers, x, mailbox, targets, epochs, health, rows, rank, E, RELEASE, BACKOFF, JITTER
    ).launch(grid=[E.blocks, 1, 1], block=[E.threads, 1, 1], stream=stream)
