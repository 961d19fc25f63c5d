"""AttnRes and the norm behind it in CuTe DSL kernels: one unit's part of a row; families share the arithmetic.

A unit is a warp with some columns of a row in each lane. Units tell each other the row's sums (:mod:`.cute_row`), so each of
them is summed over a lane's columns, then over 32 lanes, then over the units, the latter two by butterfly.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from .cute_numbers import EXP2, LOG2E, RSQRT, as_float, as_word, high, low, sum_lanes, unary
from .cute_row import MIX_PACKET, OWN_BLOCK, SUM_PACKET, hear, kinds_of_saved, tell
from .cute_waits import pause

RCP = "rcp.approx.f32 {$w0}, {$r0};"
# the lower and the upper value of a word as FP32 by other instructions than usual: the compiler does not see that it has them
BELOW, ABOVE = "prmt.b32 {$w0}, {$r0}, 0, 0x1044;", "prmt.b32 {$w0}, {$r0}, 0, 0x3244;"


@cute.jit
def values_of(words: list, COUNT: cutlass.Constexpr):
    """The first ``COUNT`` BF16 values of some words as FP32."""
    values = []
    for word in words:
        values += [low(word), high(word)]
    return values[:COUNT]


@cute.jit
def values_again(words: list, COUNT: cutlass.Constexpr):
    """The same, made anew: where the values of long ago would take registers meanwhile."""
    values = []
    for word in words:
        for half in cutlass.range_constexpr(2):
            text = ABOVE if half else BELOW
            values.append(as_float(arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[word])))
    return values[:COUNT]


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
def mix_of_saved(
    sources: list, saved: Int32, folded: list, row_at: list, unit: Int32, lane: Int32, epoch: Uint32, health: Int64,
    block: Int32,
    HIDDEN: cutlass.Constexpr, EPS: cutlass.Constexpr, CLUSTER: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """(mix of the saved blocks at a lane's columns, its weights' sum, the largest score), weights relative to that.

    ``sources``: words of each; the first ``saved`` count, the others' weight is zero. ``folded``: AttnRes norm times query
    at the same columns.

    The scores need sums over the whole row: units tell theirs to each other. ``row_at`` says where the row's lie
    (:mod:`.cute_row`). The mix's own square, too, is told here, for whoever will need it after the sum.
    """
    count, columns = len(sources), len(folded)
    if cutlass.const_expr(count == 0):
        mix, total, largest = [Float32(0.0)] * columns, Float32(0.0), Float32(-float("inf"))
    else:
        values = [values_of(words, columns) for words in sources]
        sums = []
        for i in cutlass.range_constexpr(count):
            square, dot = Float32(0.0), Float32(0.0)
            for v, f in zip(values[i], folded, strict=True):
                square += v * v
                dot += v * f
            sums += [square, dot]
        sums += [Float32(0.0)] * (16 - len(sums))
        mine = sum_sixteen(sums, lane)
        # lane p publishes sums 3 p to 3 p + 2
        three = [as_word(arch.shuffle_sync(mine, (lane * 6 + 2 * k) & 31)) for k in range(3)]
        packets = kinds_of_saved(count)
        pause(JITTER, epoch, block * 64 + 32 + unit)
        if lane < packets:
            tell(row_at, lane, unit, three, epoch, 0, CLUSTER)
        got = hear(row_at, 0, packets, lane, epoch, health, block, 0, CLUSTER)
        sums = [as_float(got[4 * (i // 3) + i % 3]) if i < 2 * count else Float32(0.0) for i in range(16)]
        mine = sum_sixteen(sums, lane)
        square, dot = arch.shuffle_sync(mine, lane & 28), arch.shuffle_sync(mine, (lane & 28) + 2)
        score = dot * unary(RSQRT, square * (1.0 / HIDDEN) + EPS)
        score = score if lane // 4 < saved else Float32(-float("inf"))
        largest = score
        for distance in (4, 8, 16):
            largest = cutlass.max(largest, arch.shuffle_sync_bfly(largest, distance))
        weight = unary(EXP2, (score - largest) * LOG2E)
        total = weight
        for distance in (4, 8, 16):
            total += arch.shuffle_sync_bfly(total, distance)
        if cutlass.const_expr(CLUSTER == OWN_BLOCK):
            # many columns a lane: until here the words stay, not twice as many values
            values = [values_again(words, columns) for words in sources]
        mix = [Float32(0.0)] * columns
        for i in cutlass.range_constexpr(count):
            alpha = arch.shuffle_sync(weight, 4 * i)
            mix = [m + alpha * v for m, v in zip(mix, values[i], strict=True)]
        square = Float32(0.0)
        for m in mix:
            square += m * m
        (square,) = sum_lanes([square])
        if lane == 0:
            tell(row_at, Int32(MIX_PACKET), unit, [as_word(square), Uint32(0), Uint32(0)], epoch, 1, CLUSTER)
    return mix, total, largest


@cute.jit
def tell_prefix(
    p: list, mix: list, folded: list, row_at: list, unit: Int32, lane: Int32, epoch: Uint32, block: Int32,
    CLUSTER: cutlass.Constexpr, JITTER: cutlass.Constexpr, live: Int32 | None = None,
):  # fmt: skip
    """The running residual's square, its product with the query and with the mix, to all units of the row; to nobody with
    ``live`` zero.
    """
    square, dot, cross = Float32(0.0), Float32(0.0), Float32(0.0)
    for v, f, m in zip(p, folded, mix, strict=True):
        square += v * v
        dot += v * f
        cross += v * m
    three = sum_lanes([square, dot, cross])
    pause(JITTER, epoch, block * 64 + 34 + unit)
    speaks = lane == 0
    if cutlass.const_expr(live is not None):
        speaks = (lane == 0) & (live != Int32(0))
    if speaks:
        tell(row_at, Int32(SUM_PACKET), unit, [as_word(one) for one in three], epoch, 1, CLUSTER)


@cute.jit
def mixed(
    p: list, mix: list, total: Float32, largest: Float32, norm: list, row_at: list, lane: Int32, epoch: Uint32, health: Int64,
    block: Int32,
    HIDDEN: cutlass.Constexpr, SAVED: cutlass.Constexpr, EPS: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    CLUSTER: cutlass.Constexpr, live: Int32 | None = None,
):  # fmt: skip
    """The normed mix of all sources at a lane's columns, not rounded, once all units have told their sums.

    The mean square of the mix follows from three sums over the row, of which the twin knows nothing but the
    result: ``|a m + b p|^2 = a^2 m.m + 2 a b m.p + b^2 p.p``, so there is one exchange after the prefix is there.
    """
    first = MIX_PACKET if cutlass.const_expr(SAVED > 0) else SUM_PACKET
    count = SUM_PACKET + 1 - first
    got = hear(row_at, first, count, lane, epoch, health, block, BACKOFF, CLUSTER, live)
    sums = [as_float(word) for word in got[4 * (count - 1) : 4 * count - 1]]
    sums = sum_lanes([*sums, as_float(got[0])] if cutlass.const_expr(SAVED > 0) else [*sums, Float32(0.0)])
    square, dot, cross, of_mix = sums
    score = dot * unary(RSQRT, square * (1.0 / HIDDEN) + EPS)
    top = cutlass.max(largest, score)
    a, b = unary(EXP2, (largest - top) * LOG2E), unary(EXP2, (score - top) * LOG2E)
    scale = unary(RCP, a * total + b)
    a, b = a * scale, b * scale
    mean = (a * a * of_mix + 2.0 * a * b * cross + b * b * square) * (1.0 / HIDDEN)
    r = unary(RSQRT, mean + EPS)
    return [(a * m + b * v) * r * n for m, v, n in zip(mix, p, norm, strict=True)]
