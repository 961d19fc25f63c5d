"""Parts of the CuTe DSL kernels: packets, bounded waits, sums over lanes, and how a lane's columns lie in memory."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T

from ..cute_streaming import read

# A packet is one access of 16 bytes, data and epoch together: whoever sees the epoch has the data, so no fence orders
# a publish or a poll. Only .b128 is one access by the memory model.
LOAD_PACKET = (
    "{ .reg .b128 v; .reg .b64 a, b; ld.relaxed.SCOPE.global.b128 v, [$4]; mov.b128 {a, b}, v; "
    "mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b; }"
)
STORE_PACKET = (
    "{ .reg .b128 v; .reg .b64 a, b; mov.b64 a, {{$r1}, {$r2}}; mov.b64 b, {{$r3}, {$r4}}; mov.b128 v, {a, b}; "
    "st.relaxed.SCOPE.global.b128 [{$r0}], v; }"
)
LOAD_WORD = "ld.relaxed.gpu.global.u32 $0, [$1];"
LOAD_TARGET = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
LOAD_PAIR, LOAD_LAST = "ld.global.u32 $0, [$1];", "ld.global.u16 $0, [$1];"
LOAD_WEIGHT_PAIR, LOAD_WEIGHT_LAST = (
    "ld.global.L1::no_allocate.u32 $0, [$1];",
    "ld.global.L1::no_allocate.u16 $0, [$1];",
)
STORE_PAIR, STORE_LAST = "st.global.u32 [{$r0}], {$r1};", "st.global.u16 [{$r0}], {$r1};"
ROUND = "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};"
SCALE = "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};"
RSQRT, EXP2, RCP = "rsqrt.approx.f32 {$w0}, {$r0};", "ex2.approx.ftz.f32 {$w0}, {$r0};", "rcp.approx.f32 {$w0}, {$r0};"
LOG2E = 1.4426950408889634
# the health record, as in ..health: words of the claim, of the sets of missed ranks, of the limit
CLAIM_PHASE, CLAIM_SLOT, CLAIM_BLOCK, MISSED, LIMIT = 1, 2, 3, 4, 10
POLLS_A_LOOK = 1024
DEFAULT_LIMIT_NS = 10_000_000_000
PARTIAL, TOTAL, ROW = 1, 2, 3


@cute.jit
def publish(address: Int64, words: list, SCOPE: cutlass.Constexpr):
    """Store one packet of four words."""
    arch.inline_ptx(STORE_PACKET.replace("SCOPE", SCOPE), read_only_args=[address, *words])


@cute.jit
def low(word: Uint32):
    """The lower BF16 value as FP32."""
    return Float32(llvm.bitcast(T.f32(), (word << 16).ir_value()))


@cute.jit
def high(word: Uint32):
    """The upper BF16 value as FP32."""
    return Float32(llvm.bitcast(T.f32(), (word & Uint32(0xFFFF0000)).ir_value()))


@cute.jit
def as_float(word: Uint32):
    """The same 32 bits as FP32."""
    return Float32(llvm.bitcast(T.f32(), word.ir_value()))


@cute.jit
def as_word(value: Float32):
    """The same 32 bits as an integer."""
    return Uint32(llvm.bitcast(T.i32(), value.ir_value()))


@cute.jit
def rounded(first: Float32, second: Float32):
    """Two FP32 values as BF16 in one word, the first below."""
    return arch.inline_ptx(ROUND, write_only_types=[Uint32], read_only_args=[second, first])


@cute.jit
def unary(text: cutlass.Constexpr, value: Float32):
    """One approximate function of the special-function unit."""
    return arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[value])


@cute.jit
def seven(words: list):
    """The seven values of a packet as FP32."""
    values = []
    for word in cutlass.range_constexpr(3):
        values += [low(words[word]), high(words[word])]
    return [*values, low(words[3])]


@cute.jit
def packed(values: list):
    """Seven FP32 values rounded to BF16, in four words; the last half word is zero."""
    words = [rounded(values[2 * word], values[2 * word + 1]) for word in range(3)]
    return [*words, rounded(values[6], Float32(0.0))]


@cute.jit
def columns_of(packet: Int32):
    """Columns of a packet: (first of three neighbouring pairs, 16 apart; the seventh).

    Eight packets share 56 columns. Three pairs and one make every access of a warp to a row whole 32-byte runs, and
    the packet's words are what lies in memory.
    """
    base = packet // 8 * 56
    return base + packet % 8 * 2, base + 48 + packet % 8


@cute.jit
def row_words(base: Int64, row: Int32, HIDDEN: cutlass.Constexpr, packet: Int32, WEIGHT: cutlass.Constexpr):
    """A packet's columns of one row of a BF16 matrix, as four words."""
    pair, last = columns_of(packet)
    texts = (LOAD_WEIGHT_PAIR, LOAD_WEIGHT_LAST) if cutlass.const_expr(WEIGHT) else (LOAD_PAIR, LOAD_LAST)
    first = base + (Int64(row) * HIDDEN + pair) * 2
    words = []
    for word in cutlass.range_constexpr(3):
        words += read(texts[0], first + 32 * word, 1, [])
    return words + read(texts[1], base + (Int64(row) * HIDDEN + last) * 2, 1, [])


@cute.jit
def store_row_words(base: Int64, row: Int32, HIDDEN: cutlass.Constexpr, packet: Int32, words: list):
    """The reverse of :func:`row_words`."""
    pair, last = columns_of(packet)
    first = base + (Int64(row) * HIDDEN + pair) * 2
    for word in cutlass.range_constexpr(3):
        arch.inline_ptx(STORE_PAIR, read_only_args=[first + 32 * word, words[word]])
    arch.inline_ptx(STORE_LAST, read_only_args=[base + (Int64(row) * HIDDEN + last) * 2, words[3]])


@cute.jit
def sum_lanes(values: list):
    """Each value summed over the warp, in every lane: butterfly, so the same bits in all."""
    sums = list(values)
    for step in cutlass.range_constexpr(5):
        others = [arch.shuffle_sync_bfly(one, 16 >> step) for one in sums]
        sums = [one + other for one, other in zip(sums, others, strict=True)]
    return sums


@cute.jit
def sum_sixteen(values: list, lane: Int32):
    """Sixteen values summed over the warp; lanes 2 i and 2 i + 1 get value i. Each step sends half of what is left."""
    left = list(values)
    for step in cutlass.range_constexpr(4):
        distance, half = 16 >> step, 8 >> step
        upper = (lane & distance) != 0
        kept = [left[half + i] if upper else left[i] for i in range(half)]
        sent = [left[i] if upper else left[half + i] for i in range(half)]
        left = [mine + arch.shuffle_sync_bfly(other, distance) for mine, other in zip(kept, sent, strict=True)]
    return left[0] + arch.shuffle_sync_bfly(left[0], 1)


@cute.jit
def scaled(words: list, factor: Uint32, epoch: Uint32):
    """A packet's words times a power of two, with the epoch."""
    times = [arch.inline_ptx(SCALE, write_only_types=[Uint32], read_only_args=[word, factor]) for word in words]
    return [*times[:3], (times[3] & Uint32(0xFFFF)) | (epoch << 16)]


@cute.jit
def epoch_of(counter: Int64, block: Int32):
    """This launch's epoch: one more than what the block's counter holds."""
    (count,) = read(LOAD_WORD, counter + block * 4, 1, [])
    return count + Uint32(1)


@cute.jit
def count_launch(counter: Int64, block: Int32, epoch: Uint32):
    """What the block's next launch finds. By one thread, when all warps of the block have read the counter."""
    arch.inline_ptx("st.relaxed.gpu.global.u32 [{$r0}], {$r1};", read_only_args=[counter + block * 4, epoch])


@cute.jit
def pause(JITTER: cutlass.Constexpr, epoch: Uint32, place: Int32):
    """Tests only: a delay of up to 8 microseconds, another at every place and in every launch."""
    if cutlass.const_expr(JITTER > 0):
        x = (
            (epoch * Uint32(0x9E3779B1))
            ^ (Uint32(place) * Uint32(0x85EBCA77))
            ^ Uint32(JITTER * 0xC2B2AE3D & 0xFFFFFFFF)
        )
        x = (x ^ (x >> 15)) * Uint32(0x2C1B3C6D)
        x = (x ^ (x >> 12)) * Uint32(0x297A2D39)
        arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[(x ^ (x >> 15)) & Uint32(0x1FFF)])


@cute.jit
def poll(
    address: Int64, COUNT: cutlass.Constexpr, STRIDE: cutlass.Constexpr, SCOPE: cutlass.Constexpr,
    TAG_BITS: cutlass.Constexpr, epoch: Uint32, health: Int64, PHASE: cutlass.Constexpr, slot: Int32, block: Int32,
    BACKOFF: cutlass.Constexpr,
):  # fmt: skip
    """Words of ``COUNT`` packets, ``STRIDE`` bytes apart, once all of them carry the epoch, or after the limit.

    The first is rank ``slot``'s, where ranks are waited for. A round loads all of them at once. Every :data:`POLLS_A_LOOK` rounds a lane looks at the clock and at the health
    record: past the limit, or once anyone has given up, it ends with what it has and says whom it missed.
    """
    text = LOAD_PACKET.replace("SCOPE", SCOPE)
    tag = epoch << (32 - TAG_BITS)
    words = []
    for i in cutlass.range_constexpr(COUNT):
        words += read(text, address + i * STRIDE, 4, [])
    missing = Uint32(0)
    for i in cutlass.range_constexpr(COUNT):
        missing |= (words[4 * i + 3] ^ tag) >> (32 - TAG_BITS)
    rounds, started = Int32(0), Int64(0)
    waits = missing != Uint32(0)
    while waits:
        if cutlass.const_expr(BACKOFF > 0):
            arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(BACKOFF)])
        for i in cutlass.range_constexpr(COUNT):
            words[4 * i : 4 * i + 4] = read(text, address + i * STRIDE, 4, [])
        missing = Uint32(0)
        for i in cutlass.range_constexpr(COUNT):
            missing |= (words[4 * i + 3] ^ tag) >> (32 - TAG_BITS)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % POLLS_A_LOOK == 0:
            late = Uint32(0)
            for i in cutlass.range_constexpr(COUNT):
                late |= (
                    Uint32(1 << i) << slot if (words[4 * i + 3] ^ tag) >> (32 - TAG_BITS) != Uint32(0) else Uint32(0)
                )
            started, waits = look(epoch, health, started, late, PHASE, block)
    return words


@cute.jit
def look(epoch: Uint32, health: Int64, started: Int64, late: Uint32, PHASE: cutlass.Constexpr, block: Int32):
    """(when the wait's first look was, whether to wait on): see ..health for the record."""
    now = arch.globaltimer()
    first = started if started != Int64(0) else now
    (claimed,) = read(LOAD_WORD, health, 1, [])
    (below,) = read(LOAD_WORD, health + 4 * LIMIT, 1, [])
    (above,) = read(LOAD_WORD, health + 4 * LIMIT + 4, 1, [])
    limit = Int64(Uint64(above)) << 32 | Int64(Uint64(below))
    limit = limit if limit != Int64(0) else Int64(DEFAULT_LIMIT_NS)
    on, holder = claimed == Uint32(0), claimed
    name = epoch if epoch != Uint32(0) else Uint32(1)
    if on and now - first > limit:
        on = False
        won = arch.inline_ptx(
            "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], {$r1}, {$r2};", write_only_types=[Uint32],
            read_only_args=[health, Uint32(0), name],
        )  # fmt: skip
        holder = won if won != Uint32(0) else name
        if won == Uint32(0):
            slot = Uint32(0)
            if cutlass.const_expr(PHASE != ROW):
                slot = Uint32(arch.popc((late & (Uint32(0) - late)) - Uint32(1)))
            put = "st.relaxed.gpu.global.u32 [{$r0}], {$r1};"
            arch.inline_ptx(put, read_only_args=[health + 4 * CLAIM_PHASE, Uint32(PHASE)])
            arch.inline_ptx(put, read_only_args=[health + 4 * CLAIM_SLOT, slot])
            arch.inline_ptx(put, read_only_args=[health + 4 * CLAIM_BLOCK, Uint32(block)])
    # a later launch misses whom the first one stopped publishing, so it adds nothing
    if not on and holder == name:
        missed = late if cutlass.const_expr(PHASE != ROW) else Uint32(0)
        at = health + 4 * (MISSED + PHASE - 1)
        arch.inline_ptx("red.relaxed.gpu.global.or.b32 [{$r0}], {$r1};", read_only_args=[at, missed])
    return first, on
