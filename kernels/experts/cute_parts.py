"""Parts of the CuTe DSL kernels of the experts: loads on a condition, packets, bounded polls, SiTU, one step of a product."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T

from ..cute_numbers import EXP2, LOG2E, as_float, rounded, unary
from ..cute_streaming import MMA, read
from ..cute_waits import FENCE, LOAD_PACKET, LOAD_WORD, POLLS_A_LOOK, ROW, look, publish
from .layout import ACTIVATION_EXPONENT, LEFT, LIFTED, operands

LOAD_SCALE = "ld.global.L1::no_allocate.L2::cache_hint.u32 $0, [$1], $2;"
LOAD_W_IF = (
    "{ .reg .pred p; setp.gt.s32 p, $6, STEP; "
    "@p ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {$0, $1, $2, $3}, [$4], $5; }"
)
LOAD_SCALE_IF = (
    "{ .reg .pred p; setp.gt.s32 p, $3, STEP; @p ld.global.L1::no_allocate.L2::cache_hint.u32 $0, [$1], $2; }"
)
LOAD_X_IF = "{ .reg .pred p; setp.gt.s32 p, $5, STEP; @p ld.global.v4.u32 {$0, $1, $2, $3}, [$4]; }"
# one instruction where the compiler would take two: the bits of $1 under the mask, all others of $2
JOIN = "lop3.b32 {$w0}, {$r0}, {$r1}, MASK, 0xE4;"
# a constant is no operand of this multiply
SCALE = "{ .reg .b32 f; mov.b32 f, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, f; }"
RCP = "rcp.approx.ftz.f32 {$w0}, {$r0};"
EXPONENT = 0x7F800000
# powers of two as pairs of BF16
LIFTED_WORD, ACTIVATION_WORD = (LIFTED + 127) * 0x00800080, (ACTIVATION_EXPONENT + 127) * 0x00800080


@cute.jit
def item_of(table: cute.Tensor, item: Int32, warp: Int32, PLAN: cutlass.Constexpr):
    """(expert, place of its first pair, rows) of an item; of a single row items are slots, in the warp's own part of the table."""
    found = [Int32(0), item, Int32(1)]
    if cutlass.const_expr(PLAN.single):
        found[0] = table[warp * PLAN.top_k + item]
    else:
        found = list(PLAN.item_parts(table[PLAN.items_at + item]))
    return found


@cute.jit
def read_if(
    text: cutlass.Constexpr, STEP: cutlass.Constexpr, address: Int64, WORDS: cutlass.Constexpr, more: list, steps: Int32
):
    """Words of one load where ``steps`` exceeds ``STEP``, else anything; volatile as :func:`read` is, and for the same reason."""
    given = [address.ir_value(), *(one.ir_value() for one in more), steps.ir_value()]
    kinds = ",".join(["=r"] * WORDS + ["l"] * (1 + len(more)) + ["r"])
    one = WORDS == 1
    kind = T.i32() if one else llvm.StructType.get_literal([T.i32()] * WORDS)
    text = text.replace("STEP", str(STEP))
    got = llvm.inline_asm(
        kind, given, text, kinds, has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT
    )  # fmt: skip
    return [Uint32(got)] if one else [Uint32(llvm.extractvalue(T.i32(), got, [word])) for word in range(WORDS)]


@cute.jit
def join(first: Uint32, second: Uint32):
    """See :func:`.layout.joined`."""
    text = JOIN.replace("MASK", str(LEFT))
    return arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[first, second])


@cute.jit
def tanh(value: Float32):
    """To a few units of FP32: a series near zero, where the other form loses its digits."""
    square = value * value
    series = value * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1.0 - 2.0 * unary(RCP, unary(EXP2, value * (2 * LOG2E)) + 1.0)
    return series if square < 0.0625 else far


@cute.jit
def situ(gate: Float32, up: Float32, BETA: cutlass.Constexpr, LINEAR: cutlass.Constexpr):
    """``BETA tanh(gate / BETA) sigmoid(gate) LINEAR tanh(up / LINEAR)``."""
    sigmoid = unary(RCP, unary(EXP2, gate * -LOG2E) + 1.0)
    return BETA * tanh(gate * (1 / BETA)) * sigmoid * (LINEAR * tanh(up * (1 / LINEAR)))


@cute.jit
def scaled(words: list, factor: Uint32):
    """Pairs of BF16 times a power of two."""
    return [arch.inline_ptx(SCALE, write_only_types=[Uint32], read_only_args=[word, factor]) for word in words]


@cute.jit
def factors(words: list):
    """Pairs of activations as the operands of weights ask for them, see :data:`.layout.ACTIVATION_EXPONENT`."""
    return scaled(words, Uint32(ACTIVATION_WORD)) if cutlass.const_expr(ACTIVATION_EXPONENT > 0) else words


@cute.jit
def step(words: list, scale: Uint32, x: list, acc: list):
    """Add ``w x^T`` over one block to the sums: 32 rows by 32 columns of w, up to eight rows of x.

    Args:
        words: four, as held.
        scale: four bytes, of this lane's four rows.
        x: four words, eight neighbouring columns of one row.
        acc: eight sums: tile, row g or g + 8, token.
    """
    made = operands(words, join)
    if cutlass.const_expr(LIFTED > 0):
        made = scaled(made, Uint32(LIFTED_WORD))
    sums = list(acc)
    for tile in cutlass.range_constexpr(2):
        part = [Float32(0.0)] * 4
        for half in cutlass.range_constexpr(2):
            at = 8 * tile + 4 * half
            args = [*made[at : at + 4], x[2 * half], x[2 * half + 1], *part]
            part = arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=args)
        for upper in cutlass.range_constexpr(2):
            byte = 2 * tile + upper
            moved = scale >> 1 if cutlass.const_expr(byte == 3) else scale << (23 - 8 * byte)
            factor = as_float(moved & Uint32(EXPONENT))
            for token in cutlass.range_constexpr(2):
                at = 4 * tile + 2 * upper + token
                sums[at] = sums[at] + part[2 * upper + token] * factor
    return sums


@cute.jit
def four(value: Float32, lane: Int32):
    """The values of four neighbouring lanes."""
    return [arch.shuffle_sync(value, lane // 4 * 4 + i) for i in range(4)]


@cute.jit
def publish_four(address: Int64, values: list, epoch: Uint32):
    """Store a packet: four FP32 values rounded to BF16."""
    words = [rounded(values[0], values[1]), rounded(values[2], values[3])]
    publish(address, [*words, epoch, epoch], "gpu")


@cute.jit
def load_packets(addresses: list):
    """All words of packets, whatever epoch they carry."""
    words = []
    for i in cutlass.range_constexpr(len(addresses)):
        words += read(LOAD_PACKET.replace("SCOPE", "gpu"), addresses[i], 4, [])
    return words


@cute.jit
def opened(words: list, DATA: cutlass.Constexpr, epoch: Uint32):
    """(the first ``DATA`` words of each packet, zero if all others carry the epoch)."""
    missing, data = Uint32(0), []
    for i in cutlass.range_constexpr(len(words) // 4):
        # every word is used, or the load would be narrowed to less than a packet
        for word in cutlass.range_constexpr(DATA, 4):
            missing |= words[4 * i + word] ^ epoch
        data += words[4 * i : 4 * i + DATA]
    return data, missing


@cute.jit
def settled(
    words: list, addresses: list, DATA: cutlass.Constexpr, epoch: Uint32, health: Int64, block: Int32, earnest: Int32 | None = None
):  # fmt: skip
    """The first ``DATA`` words of each packet, once all others carry the epoch, or after the limit.

    ``words`` are what :func:`load_packets` found before; a round loads all packets at once. ``earnest``: 0 takes them as they are.
    All lanes of the warp call this, and all poll until none misses anything. Were they to leave one by one, the compiler could
    not prove that they meet again: each shuffle after it would have a slow path, out of line.
    """
    got, missing = opened(words, DATA, epoch)
    rounds, started = Int32(0), Int64(0)
    waits = missing != Uint32(0)
    if cutlass.const_expr(earnest is not None):
        waits = waits & (earnest > Int32(0))
    waits = arch.vote_any_sync(waits)
    while waits:
        got, missing = opened(load_packets(addresses), DATA, epoch)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % POLLS_A_LOOK == 0:
            started, waits = look(epoch, health, started, None, ROW, block)
        waits = arch.vote_any_sync(waits)
    return got


@cute.jit
def all_done(flags: Int64, count: Int32, t: Int32, epoch: Uint32, health: Int64, block: Int32, PLAN: cutlass.Constexpr):
    """Wait until ``count`` flags carry the epoch, or until the limit, and see what was stored before. Ends with a barrier."""
    for i in cutlass.range(t, count, PLAN.threads, unroll=1):
        (found,) = read(LOAD_WORD, flags + Int64(i) * 4, 1, [])
        rounds, started = Int32(0), Int64(0)
        waits = found != epoch
        while waits:
            (found,) = read(LOAD_WORD, flags + Int64(i) * 4, 1, [])
            waits = found != epoch
            rounds += 1
            if waits and rounds % POLLS_A_LOOK == 0:
                started, waits = look(epoch, health, started, None, ROW, block)
    arch.inline_ptx(FENCE)
    arch.sync_threads()
