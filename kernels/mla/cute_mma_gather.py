"""What other ranks tell the launches of the MLA core where contexts lie over them: queries of all heads, rows of the own ones."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import EXP2, as_float, high, low, rounded, unary
from ..cute_polls import any_of, once, poll
from ..cute_waits import PARTIAL, POLLS_A_LOOK, look, pause
from .cute_mma_front import PEER, STORE_PEER
from .cute_mma_parts import STORE_FLOAT, matrices, shared_float, widened

QUERIES = 5
"""Phase of the health record: ranks' queries."""
TOGETHER = 3
"""Queries that a warp polls in one round."""
AT_ONCE = 4
"""Ranks whose rows a thread polls in one round; with eight a word went to the stack."""
STORE_TWO, LOAD_WORD = "st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", "ld.shared.b32 $0, [$1];"


@cute.jit
def a_round(at: list, epoch: Uint32):
    """(data words, what each query's epochs differ by) of one round of polls."""
    words, missing = [], []
    for one in at:
        got, differs = once(one, 1, 0, "sys", "b32e32x2", epoch)
        words += got
        missing += differs
    return words, missing


@cute.jit
def poll_queries(at: list, ranks: list, epoch: Uint32, health: Int64, block: Int32):
    """Words of several queries, each of a rank of its own, once all of them carry the epoch, or after the limit.

    ``at``: addresses of each query's accesses. Bounded as :func:`~..cute_polls.poll` is.
    """
    words, each = a_round(at, epoch)
    missing = any_of(each)
    rounds, started = Int32(0), Int64(0)
    waits = missing != Uint32(0)
    while waits:
        words, each = a_round(at, epoch)
        missing = any_of(each)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % POLLS_A_LOOK == 0:
            late = Uint32(0)
            for i in cutlass.range_constexpr(len(at)):
                late |= Uint32(1) << ranks[i] if each[i] != Uint32(0) else Uint32(0)
            started, waits = look(epoch, health, started, late, QUERIES, block)
    return words


@cute.jit
def ask_queries(
    told: list, shared: Int32, request: Int32, first_query: Int32, live: Int32, block: Int32, lane: Int32, warp: Int32,
    A: cutlass.Constexpr, D: cutlass.Constexpr,
):  # fmt: skip
    """A block's queries of all ranks' heads into shared memory, as :func:`.cute_mma_parts.copy_queries` has them.

    ``told``: of :func:`.cute_mma_sent.begun`, with the mailbox. Those from ``live`` on are zeros.
    """
    accesses = D.query_words // 2
    each = -(-accesses // 32)
    parity = Int32(told[1] & Uint32(1))
    pause(D.jitter, told[1], block * 64 + warp)
    for first in cutlass.range_constexpr(0, A.queries // 8, TOGETHER):
        count = min(TOGETHER, A.queries // 8 - first)
        at, ranks = [], []
        for i in cutlass.range_constexpr(count):
            column = (first + i) * 8 + warp
            # what does not count repeats the request's first query
            pair = first_query + column if column < live else Int32(0)
            row, head = request * A.q_len + pair // A.heads, pair % A.heads
            rank = head // D.heads
            base = told[0] + (Int64(rank) * D.query_slot + D.query_within(parity, row, head % D.heads))
            at.append([base + cutlass.min(lane + 32 * k, accesses - 1) * 16 for k in range(each)])
            ranks.append(rank)
        words = poll_queries(at, ranks, told[1], told[4], block)
        for i in cutlass.range_constexpr(count):
            column = (first + i) * 8 + warp
            for k in cutlass.range_constexpr(each):
                place = lane + 32 * k
                found = words[2 * (i * each + k) : 2 * (i * each + k) + 2]
                two = [word if column < live else Uint32(0) for word in found]
                if place < accesses:
                    keep_words(shared + A.query_at + column * A.query_pitch, place, two, A)


@cute.jit
def keep_words(to: Int32, place: Int32, two: list, A: cutlass.Constexpr):
    """Two neighbouring words of a query where its operands are read; E4M3 codes in the order of :func:`.cute_mma_parts.copy_queries`."""
    if cutlass.const_expr(A.fp8):
        wide = [widened(word) for word in two]
        at = to + place // 2 * 32 + place % 2 * 8
        for half in cutlass.range_constexpr(2):
            arch.inline_ptx(STORE_TWO, read_only_args=[at + 16 * half, wide[0][half], wide[1][half]])
    else:
        arch.inline_ptx(STORE_TWO, read_only_args=[to + place * 8, *two])


@cute.jit
def gather(
    told: list, live: Int32, first_row: Int32, head: Int32, part: Int32, shared: Int32, block: Int32, t: Int32,
    F: cutlass.Constexpr, D: cutlass.Constexpr,
):  # fmt: skip
    """A block's share of the latents of all ranks' rows of its head, and their logarithms, into shared memory."""
    parity = Int32(told[1] & Uint32(1))
    place = t % F.lanes
    pause(D.jitter, told[1], block * 64 + t // 32)
    for turn in cutlass.range_constexpr(F.rank_turns):
        unit = turn * (256 // F.lanes) + t // F.lanes
        row, group = unit % F.tile_rows, unit // F.tile_rows
        if (row < live) & (group < F.rank_groups):
            within = D.row_within(parity, first_row + row, head, part * F.lanes + place)
            for first in cutlass.range_constexpr(0, F.ranks_each, AT_ONCE):
                count = min(AT_ONCE, F.ranks_each - first)
                rank = group * F.ranks_each + first
                at = [told[0] + (Int64(rank) * D.row_slot + within)]
                words, _ = poll(at, count, D.row_slot, "sys", "scalars", told[1], told[4], PARTIAL, rank, block, 0)
                for i in cutlass.range_constexpr(count):
                    line = row * F.ranks + rank + i
                    to = shared + F.merged_at + (line * F.lanes + place) * 8
                    arch.inline_ptx(STORE_TWO, read_only_args=[to, words[4 * i], words[4 * i + 1]])
                    if place == 0:
                        to = shared + F.shares_at + line * 4
                        arch.inline_ptx(STORE_FLOAT, read_only_args=[to, as_float(words[4 * i + 2])])


@cute.jit
def share_gathered(live: Int32, part: Int32, shared: Int32, t: Int32, F: cutlass.Constexpr):
    """The block's share of each row, by the ranks' shares of all weights, ranks ascending, rounded, to every block of the cluster.

    A rank without tokens has minus infinity for a logarithm, and weighs nothing.
    """
    pairs = F.own_latent // 2
    for e in cutlass.range(t, live * pairs, 256, unroll=1):
        row, column = e // pairs, e % pairs * 2
        logs = [shared_float(shared + F.shares_at + (row * F.ranks + rank) * 4) for rank in range(F.ranks)]
        top = logs[0]
        for one in logs[1:]:
            top = arch.fmax(top, one)
        total, first, second = Float32(0.0), Float32(0.0), Float32(0.0)
        for rank in cutlass.range_constexpr(F.ranks):
            share = unary(EXP2, logs[rank] - top)
            at = shared + F.merged_at + (row * F.ranks + rank) * (F.lanes * 8) + column * 2
            (word,) = matrices(LOAD_WORD, at, 1)
            total += share
            first += low(word) * share if share > Float32(0.0) else Float32(0.0)
            second += high(word) * share if share > Float32(0.0) else Float32(0.0)
        factor = Float32(1.0) / total
        word = rounded(first * factor, second * factor)
        to = shared + row * F.latent_pitch + (part * F.own_latent + column) * 2
        for peer in cutlass.range_constexpr(F.cluster):
            there = arch.inline_ptx(PEER, write_only_types=[Uint32], read_only_args=[to, Int32(peer)])
            arch.inline_ptx(STORE_PEER, read_only_args=[there, word])
