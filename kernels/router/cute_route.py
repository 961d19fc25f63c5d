"""Roles of blocks in the router's CuTe DSL kernels that wait for packets: those that choose, those that copy latents."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass.cute import arch

from ..cute_numbers import as_word
from ..cute_stages import stage
from ..cute_waits import epoch_of, pause
from .cute_choice import STORE, STORE_PAIR, biases, choose, gathered, meet, pairs_of
from .cute_group import group
from .cute_words import piece, poll_twos

COPIES = 4


@cute.jit
def choose_row(
    tensors: list, row: Int32, pairs: list, held: list, local: Int32, lane: Int32, epoch: Uint32, block: Int32, memory: list,
    scaling: cutlass.Constexpr, C: cutlass.Constexpr, MAIL: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr, live: Int32 | None,
):  # fmt: skip
    """A row's logits, its choice, and the choice's ids to the block that groups; with ``live`` zero none of it but the
    instructions: nobody is waited for, nothing leaves the block.
    """
    source, _, logits, ids_out, weights, _, _, nans, _, health = tensors
    best, candidates, scores, counts, ids, barrier = memory
    parity = Int32(epoch & Uint32(1))
    words = gathered(source, row, pairs, parity, epoch, health, block, MAIL, C, BACKOFF, live)
    stage(JITTER, "heard")
    real = lane >= 0
    if cutlass.const_expr(live is not None):
        real = live != Int32(0)
    if cutlass.const_expr(MAIL):
        for i in cutlass.range_constexpr(C.pairs_a_lane):
            if (C.pair(lane, i) < C.pairs) & real:
                at = logits + (row * C.experts + 2 * pairs[i]) * 4
                arch.inline_ptx(STORE_PAIR, read_only_args=[at, words[2 * i], words[2 * i + 1]])
    place, expert, weight, odd = choose(
        words, held, pairs, local, lane, [best, candidates, scores, counts], scaling, C
    )  # fmt: skip
    if (lane < C.top_k) & real:
        entry = row * C.top_k + place
        if cutlass.const_expr(C.blocks > 1):
            arch.store_async_dsmem((ids.iterator + entry).align(4), expert, barrier.iterator, Int32(0))
        else:  # a launch without clusters knows no st.async: illegal instruction on an H200
            ids[entry] = expert
        arch.inline_ptx(STORE, read_only_args=[ids_out + entry * 4, Uint32(expert)])
        arch.inline_ptx(STORE, read_only_args=[weights + entry * 4, as_word(weight)])
    if (lane == 0) & real:
        arch.inline_ptx(STORE, read_only_args=[nans + row * 4, Uint32(odd)])
    stage(JITTER, "told")


@cute.jit
def route(
    tensors: list, rows: Int32, block: Int32, part: Int32, memory: cute.Pointer, scaling: cutlass.Constexpr, C: cutlass.Constexpr,
    MAIL: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
    REHEARSE: cutlass.Constexpr,
):  # fmt: skip
    """Block ``part`` of the cluster chooses for its rows; the first then groups all rows' choices. Returns the epoch.

    ``tensors`` are addresses: source of the logits (a mailbox if ``MAIL``), bias, logits (to be written if ``MAIL``), ids,
    weights, order, units, nans, epochs, health. Blocks of the cluster send the first the ids of their rows; that wait
    ends, because a block that gives up its own wait sends what it has all the same. ``REHEARSE``: all of it is run once for nothing
    while the logits are under way, which fetches the code.
    """
    _, bias, _, _, _, order, units, _, counter, _ = tensors
    t, _, _ = arch.thread_idx()
    threads = 32 * C.warps
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    kinds = (Uint64, Uint64, Float32, Int32, Int32, Uint32, Uint32, Uint32, Int64)
    sizes, pieces = C.sizes(), []
    for i in cutlass.range_constexpr(len(kinds)):
        pieces.append(piece(memory, sum(sizes[:i]), kinds[i], sizes[i] * 8 // kinds[i].width))
    best, candidates, scores, counts, ids, masks, starts, sums, barrier = pieces
    arrived = barrier.iterator
    local = t // C.lanes
    lane = t % C.lanes
    row = part * C.rows_a_block + local
    mine = (local < C.rows_a_block) & (row < rows)
    pairs = pairs_of(lane, C)
    held = biases(bias, pairs)
    if cutlass.const_expr(C.blocks > 1):
        if t == 0:
            arch.mbarrier_init(arrived, 1)
            arch.mbarrier_init_fence()
            if part == 0:
                arch.mbarrier_arrive_and_expect_tx(arrived, rows * (C.top_k * 4))
        arch.cluster_arrive_relaxed()
    if part == 0:
        for m in cutlass.range(t, C.chunks * 32 * C.tall, threads, unroll=1):
            masks[m] = Uint32(0)
    arch.griddepcontrol_wait()
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    stage(JITTER, "woken")
    epoch = Uint32(0)
    if cutlass.const_expr(MAIL):
        epoch = epoch_of(counter, block)
    if cutlass.const_expr(C.blocks > 1):
        arch.cluster_wait()
    stage(JITTER, "listening")
    if mine:
        pause(JITTER, epoch, block * 64 + 33 + local)
        if cutlass.const_expr(not REHEARSE):
            choose_row(
                tensors, row, pairs, held, local, lane, epoch, block, [best, candidates, scores, counts, ids, barrier], scaling, C, MAIL, BACKOFF, JITTER, None,
            )  # fmt: skip
    if cutlass.const_expr(REHEARSE):
        for live in cutlass.range(2, unroll=1):
            if mine:
                choose_row(
                    tensors, row, pairs, held, local, lane, epoch, block, [best, candidates, scores, counts, ids, barrier], scaling, C, MAIL, BACKOFF, JITTER, live,
                )  # fmt: skip
                meet(local, C)  # what the row's warps write for each other is written anew
            if part == 0:
                if cutlass.const_expr(C.blocks > 1):  # noqa: SIM102, compiled in or not, then asked at run time
                    if live != Int32(0):
                        arch.mbarrier_wait(arrived, 0)
                arch.sync_threads()
                group(ids, masks, starts, sums, order, units, rows * live, t, threads, C)
    elif part == 0:
        if cutlass.const_expr(C.blocks > 1):
            arch.mbarrier_wait(arrived, 0)
        arch.sync_threads()
        group(ids, masks, starts, sums, order, units, rows, t, threads, C)
    arch.sync_threads()
    return epoch


@cute.jit
def copy(
    mailbox: Int64, latent: Int64, counter: Int64, health: Int64, rows: Int32, block: Int32, part: Int32, C: cutlass.Constexpr,
    BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Block ``part`` of its cluster brings every ``blocks``-th thread's share of all ranks' latents into [rows, L] BF16."""
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
