"""Parts of the CuTe DSL kernels of the experts: activations through MXFP8, exactly what BF16 operands can hold."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import as_float, as_word, rounded
from ..cute_streaming import LOAD_X, read
from ..cute_waits import publish, raise_flag

MAX_NAN = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
E4M3_PAIR = (
    "{ .reg .b16 t, l, h; .reg .b32 f; cvt.rn.satfinite.e4m3x2.f32 t, {$r1}, {$r0}; cvt.rn.f16x2.e4m3x2 f, t; "
    "mov.b32 {l, h}, f; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
)
STORE_WORDS = "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
SPAN = 256
"""Columns of a row that one warp quantises."""


@cute.jit
def largest(first: Float32, second: Float32):
    """The larger one; NaN if one is."""
    return arch.inline_ptx(MAX_NAN, write_only_types=[Float32], read_only_args=[first, second])


@cute.jit
def quantized(values: list, CEIL: cutlass.Constexpr):
    """Eight values of a lane, whose group of 32 lies in four neighbouring lanes, rounded to E4M3 times a power of two.

    A group with a NaN or an infinity becomes all NaN.
    """
    top = Float32(0.0)
    for i in cutlass.range_constexpr(8):
        top = largest(top, as_float(as_word(values[i]) & Uint32(0x7FFFFFFF)))
    for k in cutlass.range_constexpr(2):
        top = largest(top, arch.shuffle_sync_bfly(top, 1 << k))
    word = as_word(top)
    # of 2^(e - 8) where the largest is m 2^e; one more where it would not fit
    field = (word >> 23) - Uint32(8)
    if cutlass.const_expr(CEIL):
        field = field + Uint32(1) if (word & Uint32(0x7FFFFF)) > Uint32(0x600000) else field
    field = Uint32(1) if (word >> 23) < Uint32(9) else field
    scale, inverse = as_float(field << 23), as_float((Uint32(254) - field) << 23)
    scale = as_float(Uint32(0x7FC00000)) if (word >> 23) == Uint32(255) else scale
    found = []
    for i in cutlass.range_constexpr(4):
        given = [values[2 * i] * inverse, values[2 * i + 1] * inverse]
        low, high = arch.inline_ptx(E4M3_PAIR, write_only_types=[Float32] * 2, read_only_args=given)
        found += [low * scale, high * scale]
    return found


@cute.jit
def quantize_rows(
    x: Int64, held: Int64, ready: Int64, rows: Int32, number: Int32, lane: Int32, epoch: Uint32, PLAN: cutlass.Constexpr
):
    """Warp ``number`` of the grid quantises its columns of a row of the latent and says so."""
    spans = PLAN.latent // SPAN
    if number < rows * spans:
        at = Int64(number // spans * PLAN.latent + number % spans * SPAN + lane * 8) * 2
        words = read(LOAD_X, x + at, 4, [])
        values = []
        for word in words:
            values += [as_float(word << 16), as_float(word & Uint32(0xFFFF0000))]
        made = quantized(values, PLAN.latent_rounding == "ceil")
        stored = [rounded(made[2 * i], made[2 * i + 1]) for i in range(4)]
        arch.inline_ptx(STORE_WORDS, read_only_args=[held + at, *stored])
        arch.sync_warp()
        if lane == 0:
            raise_flag(ready, number, epoch)


@cute.jit
def publish_wide(address: Int64, values: list, epoch: Uint32):
    """Store a packet of four FP32 values, each in 24 bits: cut off, the last bit set where something was.

    So rounding to four bits after gives what it would have given of all 32, and a NaN, all ones, stays one.
    """
    words = []
    for value in values:
        word = as_word(value)
        words.append(word | (((word & Uint32(0xFF)) + Uint32(0xFF)) & Uint32(0x100)))
    upper = [word & Uint32(0xFFFFFF00) for word in words[:3]]
    last = words[3]
    sent = [upper[i] | ((last >> (24 - 8 * i)) & Uint32(0xFF)) for i in range(3)]
    publish(address, [*sent, epoch], "gpu")


@cute.jit
def hidden_words(words: list, FACTOR: cutlass.Constexpr, CEIL: cutlass.Constexpr):
    """Packets of :func:`publish_wide`, two a group, three words each: quantised, times a power of two, as pairs of BF16."""
    found = []
    for g in cutlass.range_constexpr(len(words) // 6):
        values = []
        for half in cutlass.range_constexpr(2):
            part = words[6 * g + 3 * half : 6 * g + 3 * half + 3]
            values += [as_float(word & Uint32(0xFFFFFF00)) for word in part]
            low = [word & Uint32(0xFF) for word in part]
            values.append(as_float((low[0] << 24) | (low[1] << 16) | (low[2] << 8)))
        made = quantized(values, CEIL)
        found += [rounded(made[2 * i] * FACTOR, made[2 * i + 1] * FACTOR) for i in range(4)]
    return found
