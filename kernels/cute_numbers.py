"""Numbers in CuTe DSL kernels: BF16 pairs in words, one instruction of the special-function unit, sums over a warp."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T

ROUND = "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};"
RSQRT, EXP2 = "rsqrt.approx.f32 {$w0}, {$r0};", "ex2.approx.ftz.f32 {$w0}, {$r0};"
LOG2E = 1.4426950408889634


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
def sum_lanes(values: list):
    """Each value summed over the warp, in every lane: butterfly, so the same bits in all."""
    sums = list(values)
    for step in cutlass.range_constexpr(5):
        others = [arch.shuffle_sync_bfly(one, 16 >> step) for one in sums]
        sums = [one + other for one, other in zip(sums, others, strict=True)]
    return sums
