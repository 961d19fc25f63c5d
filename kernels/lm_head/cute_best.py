"""Best-token part of the head's CuTe DSL kernel: from a tile's sums to one token a row, over all blocks and ranks.

A logit's order is its BF16 value as an unsigned integer, NaN above all; a key is that order, and below it the inverted
index, so that the largest key is the highest logit and among equals the lowest index. Maxima of keys do not depend on
who comes first.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import rounded
from ..cute_polls import poll
from ..cute_streaming import read
from ..cute_waits import LOAD_TARGET, LOAD_WORD, PARTIAL, count_launch, epoch_of, pause, publish
from .cute_stream import pair_of_parts

NAN, ALL, ONE = 0x7FC00000, 0xFFFFFFFF, 0x3F803F80
RAISE_KEY = "{ .reg .b64 k; mov.b64 k, {{$r1}, {$r2}}; red.relaxed.gpu.global.max.u64 [{$r0}], k; }"
LOAD_KEY = "ld.relaxed.gpu.global.v2.u32 {$0, $1}, [$2];"
LOAD_PEER = "ld.global.v2.u32 {$0, $1}, [$2];"
CLEAR_KEY, STORE_WORD = "st.global.v2.u32 [{$r0}], {{$r1}, {$r1}};", "st.global.u32 [{$r0}], {$r1};"
# the arrivals order what the blocks raised before theirs, so whoever comes last sees every key
ARRIVE = "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};"
LARGEST = "redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;"


@cute.jit
def order_of(word: Uint32):
    """Where an FP32 value stands among all, as an unsigned integer: zeros are equal, NaN is all ones."""
    zero, odd = (word << 1) == Uint32(0), (word << 1) > Uint32(0xFF000000)
    flipped = word ^ (Uint32(ALL) if word >= Uint32(0x80000000) else Uint32(0x80000000))
    flipped = Uint32(0x80000000) if zero else flipped
    return Uint32(ALL) if odd else flipped


@cute.jit
def value_of(order: Uint32):
    """The FP32 value's bits that an order is of; of any NaN, of all zeros, one."""
    word = order ^ (Uint32(0x80000000) if order >= Uint32(0x80000000) else Uint32(ALL))
    return Uint32(NAN) if order == Uint32(ALL) else word


@cute.jit
def largest(value: Uint32):
    """Over the warp, in every lane."""
    return arch.inline_ptx(LARGEST, write_only_types=[Uint32], read_only_args=[value])


@cute.jit
def offer(sums: cute.Tensor, best: cute.Tensor, keys: Int64, t: Int32, rows: Int32, block: Int32, H: cutlass.Constexpr):
    """The tile's best of each row, its index within this rank's rows, into the keys: one atomic a row and block."""
    for pair in cutlass.range(t, rows * H.columns, H.threads, unroll=1):
        first, second = pair_of_parts(sums, pair, H)
        word = rounded(first, second)
        one, two = order_of(word << 16), order_of(word & Uint32(0xFFFF0000))
        n = block * H.tile + pair % H.columns * 2
        later = two > one
        order = two if later else one
        place = Uint32(n + 1) if later else Uint32(n)
        best[2 * pair] = Int32(order if n < H.vocab else Uint32(0))
        best[2 * pair + 1] = Int32(place)
    arch.sync_threads()
    if t < rows:
        order, place = Uint32(best[2 * t * H.columns]), Uint32(best[2 * t * H.columns + 1])
        for column in cutlass.range(1, H.columns, unroll=4):
            other, at = Uint32(best[2 * (t * H.columns + column)]), Uint32(best[2 * (t * H.columns + column) + 1])
            later = other > order
            order, place = other if later else order, at if later else place
        arch.inline_ptx(RAISE_KEY, read_only_args=[keys + Int64(t) * 8, place ^ Uint32(ALL), order])
    arch.sync_threads()


@cute.jit
def comes_last(arrived: Int64, said: cute.Tensor, t: Int32, H: cutlass.Constexpr):
    """Whether all other blocks have raised their keys: no block waits for another, the last one to come goes on."""
    if t == 0:
        before = arch.inline_ptx(ARRIVE, write_only_types=[Uint32], read_only_args=[arrived, Uint32(1)])
        said[0] = Int32(before)
    arch.sync_threads()
    return said[0] == H.tiles - 1


@cute.jit
def conclude(
    tensors: list, rows: Int32, rank: Int32, t: Int32, warp: Int32, lane: Int32, block: Int32, H: cutlass.Constexpr,
    BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """This rank's best tokens to every rank, and the best of all ranks' to the outputs; a lane is a rank, a warp takes a row.

    ``tensors`` are addresses: peers, ids, best, keys, arrived, mailbox, targets, epochs, health. All rows the kernel was
    compiled for are published. A slot whose factor is not one plays another rank: its words come from ``peers``.
    Nothing is published once a wait has given up. Keys and arrivals are zeros again for the next launch.
    """
    peers, ids, best, keys, arrived, mailbox, targets, counter, health = tensors
    B = H.board
    epoch = epoch_of(counter, Int32(0))
    (claim,) = read(LOAD_WORD, health, 1, [])
    to = cutlass.min(lane, B.ranks - 1)
    whom = read(LOAD_TARGET, targets + to * 16, 4, [])
    address = Int64(whom[1]) << 32 | Int64(whom[0])
    other, parity = whom[2] != Uint32(ONE), Int32(epoch & Uint32(1))
    pause(JITTER, epoch, block * 64 + warp)
    for row in cutlass.range(warp, B.rows, H.warps, unroll=1):
        below, order = read(LOAD_KEY, keys + Int64(row) * 8, 2, [])
        value, token = read(LOAD_PEER, peers + Int64(to * B.rows + row) * 8, 2, [])
        own = Uint32(rank * H.vocab) + (below ^ Uint32(ALL))
        own = Uint32(B.ranks * H.vocab - 1) if order == Uint32(ALL) else own
        value, token = value if other else value_of(order), token if other else own
        if lane < B.ranks and claim == Uint32(0):
            publish(address + B.within(parity, row), [value, token, Uint32(0), epoch], "sys")
    arch.sync_threads()
    if t == 0:  # all warps have read the counter
        count_launch(counter, Int32(0), epoch)
        arch.inline_ptx(STORE_WORD, read_only_args=[arrived, Uint32(0)])
    for row in cutlass.range(warp, B.rows, H.warps, unroll=1):
        if lane == 0:
            arch.inline_ptx(CLEAR_KEY, read_only_args=[keys + Int64(row) * 8, Uint32(0)])
        if row < rows:
            at = mailbox + B.offset(to, parity, row)
            # all lanes at once: the warp's maxima come next, and a warp that left lane by lane takes their slow paths
            words, _ = poll([at], 1, 0, "sys", "scalars", epoch, health, PARTIAL, to, block, BACKOFF, TOGETHER=True)
            order = order_of(words[0])
            top = largest(order)
            low = largest((words[1] ^ Uint32(ALL)) if order == top else Uint32(0))
            token = Uint32(B.ranks * H.vocab - 1) if top == Uint32(ALL) else low ^ Uint32(ALL)
            if lane == 0:
                arch.inline_ptx(STORE_WORD, read_only_args=[ids + Int64(row) * 4, token])
                arch.inline_ptx(STORE_WORD, read_only_args=[best + Int64(row) * 4, value_of(top)])
