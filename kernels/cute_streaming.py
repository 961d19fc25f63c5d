"""Parts of CuTe DSL kernels that stream weights from memory straight into MMA operands; families share them."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T

EVICT_FIRST = 0x12F0000000000000
# not .nc: the compiler may move such a load below the dependency wait, and does
LOAD_W = "ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {$0, $1, $2, $3}, [$4], $5;"
LOAD_X = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0},{$w1},{$w2},{$w3}}, "
    "{{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};"
)


@cute.jit
def read(text: cutlass.Constexpr, address: Int64, WORDS: cutlass.Constexpr, more: list):
    """Words of one load, now and in this order among its like: volatile, or the compiler moves it to its first use."""
    operands = [address.ir_value(), *(one.ir_value() for one in more)]
    kinds = ",".join(["=r"] * WORDS + ["l"] * len(operands))
    one = WORDS == 1
    kind = T.i32() if one else llvm.StructType.get_literal([T.i32()] * WORDS)
    got = llvm.inline_asm(
        kind, operands, text, kinds, has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT
    )  # fmt: skip
    return [Uint32(got)] if one else [Uint32(llvm.extractvalue(T.i32(), got, [word])) for word in range(WORDS)]


@cute.jit
def multiply(acc: list, wr: list, xr: list, HALVES: cutlass.Constexpr):
    """Two MMAs for each pair of 16 rows of x and 8 of w: acc += x w^T over 32 columns."""
    n_tiles, m_tiles = len(wr) // 4, len(xr) // (4 * HALVES)
    sums = list(acc)
    for m in cutlass.range_constexpr(m_tiles):
        low = xr[m * HALVES * 4 : m * HALVES * 4 + 4]
        high = xr[m * 8 + 4 : m * 8 + 8] if cutlass.const_expr(HALVES == 2) else [Uint32(0)] * 4
        for k in cutlass.range_constexpr(2):
            a = [low[2 * k], high[2 * k], low[2 * k + 1], high[2 * k + 1]]
            for j in cutlass.range_constexpr(n_tiles):
                c = (m * n_tiles + j) * 4
                args = [*a, wr[4 * j + 2 * k], wr[4 * j + 2 * k + 1], *sums[c : c + 4]]
                sums[c : c + 4] = arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=args)
    return sums
