"""Parts of the CuTe DSL kernels: packets of seven values, and how a lane's columns lie in memory."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_numbers import high, low, rounded
from ..cute_streaming import read

LOAD_PAIR, LOAD_LAST = "ld.global.u32 $0, [$1];", "ld.global.u16 $0, [$1];"
LOAD_WEIGHT_PAIR, LOAD_WEIGHT_LAST = (
    "ld.global.L1::no_allocate.u32 $0, [$1];",
    "ld.global.L1::no_allocate.u16 $0, [$1];",
)
STORE_PAIR, STORE_LAST = "st.global.u32 [{$r0}], {$r1};", "st.global.u16 [{$r0}], {$r1};"


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
