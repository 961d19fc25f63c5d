"""Parts of the CuTe DSL kernel of KDA: loads that may be left out, shared memory, functions of one value."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import math
from cutlass.cute import arch

from ..cute_numbers import EXP2, LOG2E, RSQRT, high, low, unary
from ..cute_streaming import read
from .layout import DIM

L2_EPS = 1e-6
RCP = "rcp.approx.ftz.f32 {$w0}, {$r0};"
STORE_4 = "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
STORE_HALF = "st.global.u16 [{$r0}], {$r1};"
STORE_RUN = {
    1: STORE_HALF,
    2: "st.global.u32 [{$r0}], {$r1};",
    4: "st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};",
}
# loads by whether they come before the dependency wait: those stay out of L1, and are told from all others by that
WORD = {True: "ld.global.L1::no_allocate.u32 $0, [$1];", False: "ld.global.u32 $0, [$1];"}
FOUR_EARLY = "ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
# loads that are left out, and give zeros, where the last operand is zero
WHERE = "{ .reg .pred p; setp.ne.s64 p, "
ZEROS = "".join(f"mov.u32 ${word}, 0; " for word in range(4))
A_ZERO = len(ZEROS) // 4
KINDS = {2: ("u16", "$0"), 4: ("u32", "$0"), 8: ("v2.u32", "{$0, $1}"), 16: ("v4.u32", "{$0, $1, $2, $3}")}
"""Bytes of a load to its type and registers."""
HINTS = {True: ".L1::no_allocate", False: ""}
MAYBE = {
    (size, early): f"{WHERE}${words + 1}, 0; {ZEROS[: words * A_ZERO]}@p ld.global{hint}.{kind} {registers}, [${words}]; }}"
    for size, (kind, registers) in KINDS.items() for words in (max(size // 4, 1),) for early, hint in HINTS.items()
}  # fmt: skip
MAYBE_STATE = (
    f"{WHERE}$6, 0; {ZEROS}@p ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {{$0, $1, $2, $3}}, [$4], $5; }}"
)


@cute.jit
def maybe(address: Int64, BYTES: cutlass.Constexpr, on: cutlass.Boolean, EARLY: cutlass.Constexpr):
    """Words of one load where ``on`` holds, zeros elsewhere; two bytes are the lower half of a word."""
    return read(MAYBE[BYTES, EARLY], address, max(BYTES // 4, 1), [Int64(Int32(on))])


@cute.jit
def half(address: Int64, on: cutlass.Boolean):
    """One BF16 value as FP32 where ``on`` holds, zero elsewhere; after the dependency wait."""
    (word,) = maybe(address, 2, on, False)
    return low(word)


@cute.jit
def floats(memory: cute.Pointer, OFFSET: cutlass.Constexpr, COUNT: cutlass.Constexpr, RUN: cutlass.Constexpr):
    """FP32 numbers of shared memory from a byte offset on, as [COUNT / RUN, RUN]."""
    at = cute.recast_ptr((memory + OFFSET // 4).align(4 * RUN), dtype=Float32)
    return cute.make_tensor(at, cute.make_layout((COUNT // RUN, RUN), stride=(RUN, 1)))


@cute.jit
def run_of(tensor: cute.Tensor, index: Int32, RUN: cutlass.Constexpr):
    """One run as a list."""
    got = tensor[index, None].load()
    return [Float32(got[i]) for i in range(RUN)]


@cute.jit
def put_run(tensor: cute.Tensor, index: Int32, values: list):
    """The reverse of :func:`run_of`."""
    kept = cute.make_rmem_tensor(len(values), Float32)
    for i in cutlass.range_constexpr(len(values)):
        kept[i] = values[i]
    tensor[index, None].store(kept.load())


@cute.jit
def fma(a: Float32, b: Float32, c: Float32):
    """The product of two and the third, rounded once."""
    return Float32(math.fma(a.ir_value(), b.ir_value(), c.ir_value()))


@cute.jit
def sigmoid(x: Float32):
    """1 / (1 + exp(-x)), within a few units in the last place."""
    return unary(RCP, unary(EXP2, x * Float32(-LOG2E)) + Float32(1.0))


@cute.jit
def scales(qq: Float32, kk: Float32):
    """What a query and a key are multiplied by, from their sums of squares."""
    return unary(RSQRT, qq + Float32(L2_EPS)) * Float32(DIM**-0.5), unary(RSQRT, kk + Float32(L2_EPS))


@cute.jit
def channels_of(words: list, RUN: cutlass.Constexpr):
    """BF16 values of neighbouring channels as FP32, two a word."""
    return [high(words[i // 2]) if i % 2 else low(words[i // 2]) for i in range(RUN)]


@cute.jit
def add_lanes(values: list, FIRST: cutlass.Constexpr, END: cutlass.Constexpr):
    """Each value summed over the lanes that differ in the bits ``FIRST`` to below ``END``; the same bits in all."""
    sums = list(values)
    for step in cutlass.range_constexpr((END // FIRST).bit_length() - 1):
        others = [arch.shuffle_sync_bfly(one, (END // 2) >> step) for one in sums]
        sums = [one + other for one, other in zip(sums, others, strict=True)]
    return sums


@cute.jit
def store_run(address: Int64, words: list, RUN: cutlass.Constexpr):
    """BF16 values of neighbouring channels."""
    arch.inline_ptx(STORE_RUN[RUN], read_only_args=[address, *words])


@cute.jit
def slot_words(slots: Int64, first_request: Int32, lane: Int32, SPLIT: cutlass.Constexpr):
    """Slots of a block's requests as loaded, one a lane: the one that request 0 reads, those written after its tokens, then
    request 1. Requests beyond the last have its slots.
    """
    mine = cutlass.min(lane, SPLIT.together * SPLIT.slots - 1)
    request = cutlass.min(first_request + mine // SPLIT.slots, SPLIT.requests - 1)
    (word,) = read(WORD[True], slots + Int64(request * SPLIT.slots + mine % SPLIT.slots) * 4, 1, [])
    return word


@cute.jit
def entry(words: Uint32, request: Int32, column: Int32, SPLIT: cutlass.Constexpr):
    """Entry of the pools of a slot of a block's request: column 0 is read, column 1 + t is written after token t; negative
    for padding. By all lanes of a warp, which wait for the slots here.
    """
    return Int32(arch.shuffle_sync(words, request * SPLIT.slots + column)) - 1


@cute.jit
def zero_behind(addresses: list):
    """Zero, which is there once all of these global addresses are: what needs it does not stand before them.

    None has its highest bit set, but the compiler cannot tell.
    """
    every = addresses[0]
    for one in addresses[1:]:
        every |= one
    return Int32(every >> 63) & 1


@cute.jit
def group_slot(read_slots: list, number: Int32, SPLIT: cutlass.Constexpr):
    """Entry that the request of a block's step ``number`` reads; ``read_slots``: of all requests of the block."""
    slot = read_slots[0]
    for r in cutlass.range_constexpr(1, SPLIT.together):
        slot = read_slots[r] if number >= r * SPLIT.tokens else slot
    return slot
