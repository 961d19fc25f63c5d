"""Parts of the MLA attention on tensor cores: matrices out of shared memory, E4M3 to FP16, MMAs, copies of keys."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T

from ..cute_numbers import as_float
from ..cute_streaming import read

MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
TURNED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
TURNED_PAIR = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0, $1}, [$2];"
COPY = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};"
STORE_WORD = "st.shared.b32 [{$r0}], {$r1};"
STORE_FOUR = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {{$w0},{$w1},{$w2},{$w3}}, "
    "{{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};"
)
WIDEN = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; "
    "cvt.rn.f16x2.e4m3x2 {$w1}, high; }"
)
ROUND_HALF = "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};"
LOAD_SHARED, STORE_FLOAT = "ld.shared.b32 $0, [$1];", "st.shared.f32 [{$r0}], {$r1};"
LOAD_FOUR = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
LOAD_WORD = "ld.global.u32 $0, [$1];"


@cute.jit
def matrices(text: cutlass.Constexpr, address: Int32, WORDS: cutlass.Constexpr):
    """8 x 8 matrices of 16-bit values; a lane gives the address of one row. Volatile: others write there in between."""
    kinds = ",".join(["=r"] * WORDS + ["r"])
    kind = T.i32() if WORDS == 1 else llvm.StructType.get_literal([T.i32()] * WORDS)
    got = llvm.inline_asm(
        kind, [address.ir_value()], text, kinds, has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT
    )  # fmt: skip
    if cutlass.const_expr(WORDS == 1):
        return [Uint32(got)]
    return [Uint32(llvm.extractvalue(T.i32(), got, [word])) for word in range(WORDS)]


@cute.jit
def shared_float(address: Int32):
    """One FP32 value of shared memory."""
    return as_float(matrices(LOAD_SHARED, address, 1)[0])


@cute.jit
def widened(word: Uint32):
    """Four E4M3 values as two words of FP16: exact."""
    low, high = arch.inline_ptx(WIDEN, write_only_types=[Uint32] * 2, read_only_args=[word])
    return low, high


@cute.jit
def mma(a: list, b: list, c: list, KIND: cutlass.Constexpr):
    """Add a b to c, of 16 x 16 and 16 x 8 values ``KIND``."""
    return list(arch.inline_ptx(MMA.replace("KIND", KIND), write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c]))


@cute.jit
def keys_for_scores(base: Int32, k: cutlass.Constexpr, lane: Int32, A: cutlass.Constexpr):
    """Operands of two steps of 16 columns, from column ``32 k`` on, of 16 tokens that begin at ``base``.

    E4M3 columns come in another order, that of :func:`query_words`: of four neighbours in a word the first two are
    columns of the MMA's first half, the others of its second.
    """
    row = base + lane % 16 * A.pitch
    if cutlass.const_expr(A.fp8):
        found = matrices(MATRICES, row + (2 * k + lane // 16) * 16, 4)
        wide = [widened(word) for word in found]
        return [
            [wide[0][0], wide[1][0], wide[0][1], wide[1][1]],
            [wide[2][0], wide[3][0], wide[2][1], wide[3][1]],
        ]
    return [matrices(MATRICES, row + (4 * k + 2 * half + lane // 16) * 16, 4) for half in range(2)]


@cute.jit
def keys_for_sums(base: Int32, m: cutlass.Constexpr, lane: Int32, A: cutlass.Constexpr):
    """Operands of 32 latents from ``32 m`` on of the warp's, by 16 tokens that begin at ``base``: two of 16 latents.

    E4M3 pairs of latents lie in one 16-bit value: row g of an operand is latent 2 g, row 8 + g latent 2 g + 1.
    """
    if cutlass.const_expr(A.fp8):
        row = base + lane % 16 * A.pitch
        found = matrices(TURNED, row + (2 * m + lane // 16) * 16, 4)
        turned = [
            widened(
                arch.inline_ptx(
                    "prmt.b32 {$w0}, {$r0}, {$r0}, 0x3120;", write_only_types=[Uint32], read_only_args=[word]
                )
            )
            for word in found
        ]
        return [
            [turned[0][0], turned[0][1], turned[1][0], turned[1][1]],
            [turned[2][0], turned[2][1], turned[3][0], turned[3][1]],
        ]
    row = base + (lane % 8 + lane // 16 * 8) * A.pitch + lane // 8 % 2 * 16
    return [matrices(TURNED, row + (4 * m + 2 * half) * 16, 4) for half in range(2)]


@cute.jit
def latent_of(m: cutlass.Constexpr, group: Int32, half: cutlass.Constexpr, A: cutlass.Constexpr):
    """Which of the warp's latents is row ``group + 8 half`` of its ``m``-th operand."""
    return m * 16 + (group * 2 + half if cutlass.const_expr(A.fp8) else group + 8 * half)


@cute.jit
def copy_keys(
    cache: Int64, table: Int64, shared: Int32, request: Int32, start: Int32, last: Int32, t: Int32,
    A: cutlass.Constexpr,
):  # fmt: skip
    """Begin the copy of the tile at token ``start``; keys from ``last`` on are zeros."""
    own, within = t // A.threads_a_row, t % A.threads_a_row
    if own < A.rows_a_pass:
        for p in cutlass.range_constexpr(A.passes):
            row = p * A.rows_a_pass + own
            token = start + row
            inside = cutlass.min(token, last - 1)
            (page,) = read(LOAD_WORD, table + (Int64(request) * A.pages + inside // A.page) * 4, 1, [])
            source = cache + (Int64(page) * A.page + inside % A.page) * A.row_bytes + within * 16
            target = shared + row * A.pitch + within * 16
            size = Int32(16) if token < last else Int32(0)
            for c in cutlass.range_constexpr(A.chunks_a_thread):
                step = c * A.threads_a_row * 16
                arch.inline_ptx(COPY, read_only_args=[target + step, source + step, size])


@cute.jit
def copy_queries(
    query: Int64, shared: Int32, first: Int32, live: Int32, t: Int32, THREADS: cutlass.Constexpr, A: cutlass.Constexpr
):
    """Queries ``first`` onwards, of which ``live`` count, as 16-bit values; the others are zeros."""
    chunks = A.width // 8
    if cutlass.const_expr(A.fp8):
        for e in cutlass.range(t, A.queries * (chunks // 2), THREADS, unroll=1):
            row, c = e // (chunks // 2), e % (chunks // 2)
            there = row < live
            words = read(LOAD_FOUR, query + (Int64(first + (row if there else 0)) * A.row_bytes + c * 16), 4, [])
            wide = [widened(word if there else Uint32(0)) for word in words]
            to = shared + row * A.query_pitch + c * 32
            for half in cutlass.range_constexpr(2):
                arch.inline_ptx(STORE_FOUR, read_only_args=[to + 16 * half, *(pair[half] for pair in wide)])
    else:
        for e in cutlass.range(t, A.queries * chunks, THREADS, unroll=1):
            row, c = e // chunks, e % chunks
            there = row < live
            source = query + (Int64(first + (row if there else 0)) * A.row_bytes + c * 16)
            size = Int32(16) if there else Int32(0)
            arch.inline_ptx(COPY, read_only_args=[shared + row * A.query_pitch + c * 16, source, size])
