"""CuTe DSL kernel: brings weights of the next kernels into the L2, beside the experts that stream past it."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_streaming import read

LOAD_RANGE = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];"
PREFETCH = "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};"
PREFETCH_KEPT = "cp.async.bulk.prefetch.L2.global.L2::cache_hint [{$r0}], {$r1}, {$r2};"
EVICT_LAST = 0x14F0000000000000


@cute.kernel
def k3_experts_cute_prefetch(
    ranges: cute.Tensor, count: Int32, CHUNK: cutlass.Constexpr, BLOCKS: cutlass.Constexpr, KEPT: cutlass.Constexpr
):
    """Ranges int64 [count, 2], address and bytes, in the order in which they will be read; multiples of 16.

    Chunks are numbered through all ranges and dealt out to all lanes of the grid, the first ones first. Nothing but the
    table of ranges is read, which no kernel of the step writes: so that comes before the dependency wait, and the next
    kernel may start at once.
    """
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    arch.griddepcontrol_launch_dependents()
    turn = Int32(block * 32 + t)
    first = Int32(0)
    for r in cutlass.range(0, count, 1, unroll=1):
        words = read(LOAD_RANGE, ranges.iterator.toint() + Int64(r) * 16, 4, [])
        address = (Int64(words[1]) << 32) | Int64(words[0])
        size = Int32(words[2])
        chunks = (size + CHUNK - 1) // CHUNK
        while turn < first + chunks:
            at = (turn - first) * CHUNK
            length = Uint32(cutlass.min(size - at, CHUNK))
            if cutlass.const_expr(KEPT):
                arch.inline_ptx(PREFETCH_KEPT, read_only_args=[address + Int64(at), length, Int64(EVICT_LAST)])
            else:
                arch.inline_ptx(PREFETCH, read_only_args=[address + Int64(at), length])
            turn += 32 * BLOCKS
        first += chunks
    arch.griddepcontrol_wait()


k3_experts_cute_prefetch.set_name_prefix(
    "k3_experts_cute_prefetch", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    ranges: cute.Tensor, count: Int32,
    CHUNK: cutlass.Constexpr, BLOCKS: cutlass.Constexpr, KEPT: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one warp a block."""
    k3_experts_cute_prefetch(ranges, count, CHUNK, BLOCKS, KEPT).launch(
        grid=[BLOCKS, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True
    )
