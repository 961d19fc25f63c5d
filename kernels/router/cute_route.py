"""Roles of blocks in the router's CuTe DSL kernels that wait for packets: those that choose, those that copy latents."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass.cute import arch

from ..cute_numbers import as_word
from ..cute_stages import stage
from ..cute_waits import epoch_of, pause
from .cute_choice import STORE, STORE_PAIR, biases, choose, gathered, pairs_of
from .cute_words import piece, poll_twos

COPIES = 4


@cute.jit
def choose_row(
    tensors: list, row: Int32, pairs: list, held: list, local: Int32, warp: Int32, lane: Int32, epoch: Uint32, block: Int32,
    memory: list, scaling: cutlass.Constexpr, C: cutlass.Constexpr, MAIL: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    JITTER: cutlass.Constexpr,
):  # fmt: skip
    """A row's logits and its choice."""
    source, _, logits, ids, weights, nans, _, health = tensors
    parity = Int32(epoch & Uint32(1))
    words = gathered(source, row, pairs, parity, epoch, health, block, MAIL, C, BACKOFF)
    stage(JITTER, "heard")
    if cutlass.const_expr(MAIL):
        for i in cutlass.range_constexpr(C.pairs_a_lane):
            if C.pair(lane, i) < C.pairs:
                at = logits + (row * C.experts + 2 * pairs[i]) * 4
                arch.inline_ptx(STORE_PAIR, read_only_args=[at, words[2 * i], words[2 * i + 1]])
    place, expert, weight, odd = choose(words, held, pairs, local, warp, lane, memory, scaling, C, JITTER)
    if lane < C.top_k:
        entry = row * C.top_k + place
        arch.inline_ptx(STORE, read_only_args=[ids + entry * 4, Uint32(expert)])
        arch.inline_ptx(STORE, read_only_args=[weights + entry * 4, as_word(weight)])
    if lane == 0:
        arch.inline_ptx(STORE, read_only_args=[nans + row * 4, Uint32(odd)])
    stage(JITTER, "told")


@cute.jit
def route(
    tensors: list, rows: Int32, block: Int32, part: Int32, memory: cute.Pointer, scaling: cutlass.Constexpr, C: cutlass.Constexpr,
    MAIL: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Block ``part`` of those that choose does so for its rows. Returns the epoch.

    ``tensors`` are addresses: source of the logits (a mailbox if ``MAIL``), bias, logits (to be written if ``MAIL``), ids,
    weights, nans, epochs, health.
    """
    bias, counter = tensors[1], tensors[6]
    t, _, _ = arch.thread_idx()
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    kinds = (Uint64, Uint64, Float32, Int32)
    sizes, pieces = C.sizes(), []
    for i in cutlass.range_constexpr(len(kinds)):
        pieces.append(piece(memory, sum(sizes[:i]), kinds[i], sizes[i] * 8 // kinds[i].width))
    # one value a warp, and the compiler knows: by a lane's own it would bring the warp together anew before each shuffle
    warp = arch.make_warp_uniform(arch.warp_idx())
    local, lane = Int32(0), t
    if cutlass.const_expr(C.rows_a_block > 1):
        local, warp = warp // C.warps_a_row, warp % C.warps_a_row
        lane = 32 * warp + t % 32
    row = part * C.rows_a_block + local
    mine = (local < C.rows_a_block) & (row < rows)
    pairs = pairs_of(lane, C)
    held = biases(bias, pairs)
    arch.griddepcontrol_wait()
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    stage(JITTER, "woken")
    epoch = Uint32(0)
    if cutlass.const_expr(MAIL):
        epoch = epoch_of(counter, block)
    stage(JITTER, "listening")
    if mine:
        pause(JITTER, epoch, block * 64 + 33 + local)
        choose_row(
            tensors, row, pairs, held, local, warp, lane, epoch, block, pieces, scaling, C, MAIL, BACKOFF, JITTER
        )  # fmt: skip
    arch.sync_threads()
    return epoch


@cute.jit
def copy(
    mailbox: Int64, latent: Int64, counter: Int64, health: Int64, rows: Int32, block: Int32, part: Int32, C: cutlass.Constexpr,
    BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Block ``part`` of those that copy brings every ``blocks``-th thread's share of all ranks' latents into [rows, L] BF16."""
    B = C.board
    t, _, _ = arch.thread_idx()
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    arch.griddepcontrol_wait()
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    stage(JITTER, "woken")
    epoch = epoch_of(counter, block)
    parity = Int32(epoch & Uint32(1))
    a_rank, threads = B.latents // 4, 32 * C.warps * C.blocks
    a_row = a_rank * B.ranks
    items = rows * a_row
    pause(JITTER, epoch, block * 64 + 32)
    for first in cutlass.range(part * (32 * C.warps) + t, items, threads * COPIES, unroll=1):
        at, slots, to = [], [], []
        for i in cutlass.range_constexpr(COPIES):
            item = cutlass.min(first + i * threads, items - 1)
            row, rank = item // a_row, item % a_row // a_rank
            word = item % a_rank * 2
            at.append(mailbox + Int64(rank * B.slot_bytes + B.within(parity, row, B.logits + word)))
            slots.append(rank)
            to.append(latent + ((row * B.ranks + rank) * B.latents + word * 2) * 2)
        words = poll_twos(at, slots, epoch, health, block, BACKOFF)
        for i in cutlass.range_constexpr(COPIES):
            arch.inline_ptx(STORE_PAIR, read_only_args=[to[i], words[2 * i], words[2 * i + 1]])
    arch.sync_threads()
    return epoch
