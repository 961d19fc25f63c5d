"""Parts of the router's CuTe DSL kernels: packets of one word, shared memory, arithmetic that rounds as stated."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T

from ..cute_streaming import read
from ..cute_waits import PARTIAL, POLLS_A_LOOK, look

# two neighbouring packets of 8 bytes, a word and the epoch each: an access of each, in one instruction
STORE_TWO = "{ .reg .b64 a, b; mov.b64 a, {{$r1}, {$r3}}; mov.b64 b, {{$r2}, {$r3}}; st.relaxed.sys.global.v2.b64 [{$r0}], {a, b}; }"
LOAD_TWO = "{ .reg .b64 a, b; ld.relaxed.sys.global.v2.b64 {a, b}, [$4]; mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b; }"


# exact.sigmoid, its rounding written out: no compiler fuses or reorders these; a test holds the constants to arithmetic.py
SIGMOID = (
    "{ .reg .f32 a, m, n, r, p; .reg .b32 b; .reg .pred big, odd; "
    "neg.f32 a, {$r0}; max.f32 a, a, 0fC2AE0000; "
    "fma.rn.f32 m, a, 0f3FB8AA3B, 0f4B400000; sub.rn.f32 n, m, 0f4B400000; "
    "fma.rn.f32 r, n, 0fBF317200, a; fma.rn.f32 r, n, 0fB5BFBE8E, r; "
    "mov.f32 p, 0f3AB5B6E7; "
    "fma.rn.f32 p, p, r, 0f3C091815; fma.rn.f32 p, p, r, 0f3D2AAB45; fma.rn.f32 p, p, r, 0f3E2AAA51; "
    "fma.rn.f32 p, p, r, 0f3F000000; fma.rn.f32 p, p, r, 0f3F800000; fma.rn.f32 p, p, r, 0f3F800000; "
    "mov.b32 b, m; shl.b32 b, b, 23; add.s32 b, b, 0x3F800000; mov.b32 m, b; mul.rn.f32 p, p, m; "
    "setp.gt.f32 big, a, 0f42B00000; selp.f32 p, 0f7F800000, p, big; add.rn.f32 p, p, 0f3F800000; rcp.rn.f32 p, p; "
    "setp.nan.f32 odd, {$r0}, {$r0}; selp.f32 {$w0}, 0f7FC00000, p, odd; }"
)
ADD, DIVIDE = "add.rn.f32 {$w0}, {$r0}, {$r1};", "div.rn.f32 {$w0}, {$r0}, {$r1};"
MULTIPLY = "mul.rn.f32 {$w0}, {$r0}, {$r1};"


@cute.jit
def rounded_op(text: cutlass.Constexpr, *values: Float32):
    """One FP32 result of FP32 operands."""
    return arch.inline_ptx(text, write_only_types=[Float32], read_only_args=list(values))


@cute.jit
def piece(memory: cute.Pointer, offset: cutlass.Constexpr, dtype: cutlass.Constexpr, count: cutlass.Constexpr):
    """Elements of a block's shared memory from a byte offset on: blocks of several roles share out the same bytes."""
    at = cute.recast_ptr((memory + offset // 4).align(16), dtype=dtype)
    return cute.make_tensor(at, cute.make_layout(count))


@cute.jit
def shared_words(text: cutlass.Constexpr, address: Int32, WORDS: cutlass.Constexpr):
    """Words of one load from shared memory."""
    kinds = ",".join(["=r"] * WORDS + ["r"])
    got = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * WORDS), [Int32(address).ir_value()], text, kinds,
        has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return [Uint32(llvm.extractvalue(T.i32(), got, [word])) for word in range(WORDS)]


@cute.jit
def poll_twos(
    at: list, slots: list, epoch: Uint32, health: Int64, block: Int32, BACKOFF: cutlass.Constexpr,
    TOGETHER: cutlass.Constexpr = False,
):  # fmt: skip
    """Two neighbouring words from each address, once all of them carry the epoch, or after the limit.

    ``slots`` are the ranks that write there. A round asks for all at once; every :data:`POLLS_A_LOOK` rounds a lane
    looks at the clock and the health record, and gives up past the limit or once anyone has. A round's instructions
    are there once: the first brings those of all others. ``TOGETHER``: all lanes of the warp call this, and all poll until none
    misses anything: lanes that left one by one would make every later shuffle take a slow path of about a microsecond, by which the
    compiler first brings the warp together.
    """
    words = [Uint32(0)] * (4 * len(at))
    rounds, started, waits = Int32(0), Int64(0), cutlass.Boolean(True)
    while waits:
        for i in cutlass.range_constexpr(len(at)):
            words[4 * i : 4 * i + 4] = read(LOAD_TWO, at[i], 4, [])
        missing = Uint32(0)
        for i in cutlass.range_constexpr(len(at)):
            missing |= (words[4 * i + 1] ^ epoch) | (words[4 * i + 3] ^ epoch)
        waits = missing != Uint32(0)
        rounds += 1
        if waits and rounds % POLLS_A_LOOK == 0:
            late = Uint32(0)
            for i in cutlass.range_constexpr(len(at)):
                differs = ((words[4 * i + 1] ^ epoch) | (words[4 * i + 3] ^ epoch)) != Uint32(0)
                late |= Uint32(1) << Uint32(slots[i]) if differs else Uint32(0)
            started, waits = look(epoch, health, started, late, PARTIAL, block)
        if cutlass.const_expr(TOGETHER):
            waits = arch.vote_any_sync(waits)
        if cutlass.const_expr(BACKOFF > 0):  # noqa: SIM102, compiled in or not, then asked at run time
            if waits:
                arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(BACKOFF)])
    found = []
    for i in cutlass.range_constexpr(len(at)):
        found += [words[4 * i], words[4 * i + 2]]
    return found
