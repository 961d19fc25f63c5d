"""Choice part of the router's CuTe DSL kernels: the exact best experts of one row, by the warps that share it."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass.cute import arch

from ..cute_numbers import as_float, as_word
from ..cute_stages import stage
from ..cute_streaming import read
from .arithmetic import TINY
from .cute_words import (
    ADD,
    DIVIDE,
    MULTIPLY,
    SIGMOID,
    poll_twos,
    rounded_op,
    shared_words,
)  # fmt: skip

LOAD_BIAS = "ld.global.L1::no_allocate.v2.u32 {$0, $1}, [$2];"
LOAD_PAIR = "ld.global.v2.u32 {$0, $1}, [$2];"
STORE_PAIR = "st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};"
STORE = "st.global.u32 [{$r0}], {$r1};"
TWO_KEYS = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];"


@cute.jit
def pairs_of(lane: Int32, C: cutlass.Constexpr):
    """A lane's pairs of experts; one beyond the experts repeats the last."""
    return [cutlass.min(C.pair(lane, i), C.pairs - 1) for i in range(C.pairs_a_lane)]


@cute.jit
def biases(bias: Int64, pairs: list):
    """FP32 words of a lane's biases."""
    words = []
    for pair in pairs:
        words += read(LOAD_BIAS, bias + pair * 8, 2, [])
    return words


@cute.jit
def gathered(
    source: Int64,
    row: Int32,
    pairs: list,
    parity: Int32,
    epoch: Uint32,
    health: Int64,
    block: Int32,
    MAIL: cutlass.Constexpr,
    C: cutlass.Constexpr,
    BACKOFF: cutlass.Constexpr,
):
    """FP32 words of a lane's logits of a row: out of the ranks' packets, or of a plain matrix."""
    B = C.board
    if cutlass.const_expr(MAIL):
        at, slots = [], []
        for pair in pairs:
            rank, word = C.place(pair)
            at.append(source + Int64(rank * B.slot_bytes + B.within(parity, row, word)))
            slots.append(rank)
        words = poll_twos(at, slots, epoch, health, block, BACKOFF, TOGETHER=True)
    else:
        words = []
        for pair in pairs:
            words += read(LOAD_PAIR, source + (row * C.experts + 2 * pair) * 4, 2, [])
    return words


@cute.jit
def ordered(biased: Float32):
    """32 bits, none of them zero, in the order of the scores; NaN as minus infinity."""
    bits = as_word(biased)
    bits = Uint32(0xFF800000) if biased != biased else bits
    flip = Uint32(Int32(bits) >> 31) | Uint32(0x80000000)
    return bits ^ flip


@cute.jit
def key_of(high: Uint32, expert: Int32):
    """64 bits that order experts: by biased score, then the lower id first."""
    return both(Uint32(0xFFFFFFFF) - Uint32(expert), high)


@cute.jit
def both(low: Uint32, high: Uint32):
    """A key from its two words."""
    return Uint64(high) << 32 | Uint64(low)


@cute.jit
def exchanged(key: Uint64, distance: cutlass.Constexpr):
    """The key of the lane so far away."""
    low = arch.shuffle_sync_bfly(Uint32(key & Uint64(0xFFFFFFFF)), distance)
    high = arch.shuffle_sync_bfly(Uint32(key >> 32), distance)
    return both(Uint32(low), Uint32(high))


@cute.jit
def how_many_above(address: Int32, key: Uint64, turns: Int32):
    """How many of ``8 turns`` keys in shared memory are greater; in turns, since a warp that comes here once waits for its
    instructions.
    """
    count = Int32(0)
    for turn in cutlass.range(turns, unroll=1):
        words = []
        for j in cutlass.range_constexpr(4):
            words += shared_words(TWO_KEYS, address + 64 * turn + 16 * j, 4)
        for j in cutlass.range_constexpr(8):
            count += Int32(1) if both(words[2 * j], words[2 * j + 1]) > key else Int32(0)
    return count


@cute.jit
def meet(row: Int32, C: cutlass.Constexpr):
    """The warps of a row meet."""
    if cutlass.const_expr(C.warps_a_row > 1):
        arch.barrier(barrier_id=1 + row, number_of_threads=C.lanes)
    else:
        arch.sync_warp()


@cute.jit
def choose(
    words: list, bias: list, pairs: list, local: Int32, warp: Int32, lane: Int32, memory: list, scaling: cutlass.Constexpr,
    C: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """(place of the choice, expert, weight, scores that are NaN), the last for lane 0, the others for ``top_k`` lanes.

    First the best of each of up to 32 groups of experts: the ``top_k``-th best of those has as many experts at or above it, so
    only what reaches it is a candidate: some two dozen where scores are like each other's, up to a hundred where a few stand out
    and lie together. Those are ranked against each other, a thread each. Only the row's first warp returns something; all warps take part. Sums and quotients as :mod:`.exact`.

    Args:
        words: of this lane's logits.
        bias: of its biases.
        pairs: its pairs of experts.
        local: row of the block.
        warp: of the row, warp-uniform.
        lane: of the row, all its warps'.
        memory: best [rows][32], candidates [rows][most], their scores, counts [rows][2].
        scaling: of the weights.
        C: layout.
    """
    best, candidates, scores, counts = memory
    inside = lane % 32
    best_at = best.iterator + local * 32
    list_at = candidates.iterator + local * C.most
    for i in cutlass.range_constexpr(-(-C.most // C.lanes)):
        if i * C.lanes + lane < C.most:
            candidates[local * C.most + i * C.lanes + lane] = Uint64(0)
    if warp == 0:
        if lane >= C.groups:
            best[local * 32 + lane] = Uint64(0)
        if lane < 2:
            counts[local * 2 + lane] = Int32(0)
    highs, found = [], []
    top, odd = Uint64(0), Int32(0)
    for i in cutlass.range_constexpr(C.pairs_a_lane):
        live = C.pair(lane, i) < C.pairs
        for h in cutlass.range_constexpr(2):
            score = rounded_op(SIGMOID, as_float(words[2 * i + h]))
            biased = rounded_op(ADD, score, as_float(bias[2 * i + h]))
            high = ordered(biased) if live else Uint32(0)
            key = key_of(high, 2 * pairs[i] + h)
            odd += Int32(1) if live & (biased != biased) else Int32(0)
            highs.append(high)
            found.append(score)
            top = key if key > top else top
    for step in cutlass.range_constexpr(5):
        if cutlass.const_expr(16 >> step >= C.groups_a_warp):
            other = exchanged(top, 16 >> step)
            top = other if other > top else top
    if inside < C.groups_a_warp:
        best[local * 32 + warp * C.groups_a_warp + inside] = top
    meet(local, C)
    mine = Uint64(best[local * 32 + inside])
    above = how_many_above(Int32(best_at.toint()), mine, Int32(4))
    bar = Uint32(arch.vote_ballot_sync((above == C.top_k - 1) & (mine >> 32 != Uint64(0))))
    source = Int32(arch.popc((bar & (Uint32(0) - bar)) - Uint32(1)))
    low = arch.shuffle_sync(Uint32(mine & Uint64(0xFFFFFFFF)), source)
    high = arch.shuffle_sync(Uint32(mine >> 32), source)
    least = both(Uint32(low), Uint32(high))
    for j in cutlass.range_constexpr(2 * C.pairs_a_lane):
        key = key_of(highs[j], 2 * pairs[j // 2] + j % 2)
        if key >= least:
            place = arch.atomic_add(counts.iterator + local * 2, Int32(1), sem="relaxed", scope="cta")
            candidates[local * C.most + place] = key
            scores[local * C.most + place] = found[j]
    if odd > 0:
        arch.atomic_add(counts.iterator + (local * 2 + 1), odd, sem="relaxed", scope="cta")
    meet(local, C)
    stage(JITTER, "product")
    total = counts[local * 2]
    for c in cutlass.range(
        lane, total, C.lanes, unroll=1
    ):  # one each, of all warps: some two dozen, or many that are alike
        rival = Uint64(candidates[local * C.most + c])
        rank = how_many_above(Int32(list_at.toint()), rival, (total + 7) // 8)
        if rank < C.top_k:
            best[local * 32 + rank] = Uint64(as_word(scores[local * C.most + c])) << 32 | (rival & Uint64(0xFFFFFFFF))
    meet(local, C)
    stage(JITTER, "sent")
    expert, weight, place, nans = Int32(0), Float32(0.0), inside, Int32(0)
    if warp == 0:
        nans = counts[local * 2 + 1]
        chosen = Uint64(best[local * 32 + inside % C.top_k])
        expert = Int32(Uint32(0xFFFFFFFF) - Uint32(chosen & Uint64(0xFFFFFFFF)))
        score = as_float(Uint32(chosen >> 32))
        amount, half = score, C.top_k // 2
        for step in cutlass.range_constexpr(C.top_k.bit_length() - 1):
            amount = rounded_op(ADD, amount, arch.shuffle_sync_bfly(amount, half >> step))
        weight = rounded_op(
            MULTIPLY, rounded_op(DIVIDE, score, rounded_op(ADD, amount, Float32(TINY))), Float32(scaling)
        )
    return place, expert, weight, nans
