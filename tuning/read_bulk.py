"""A streaming read by bulk copies into a ring of shared memory: no registers, no threads but one a block."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.experimental.primitives as prim
from cutlass import Int32, Int64, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

EVICT_FIRST = 0x12F0000000000000
"""L2 policy: what is read once leaves first."""


@cute.kernel
def k3lab_read_bulk(
    x: cute.Tensor, out: cute.Tensor, chunks: Int32,
    BLOCKS: cutlass.Constexpr, WORDS: cutlass.Constexpr, STAGES: cutlass.Constexpr,
):  # fmt: skip
    """Block b copies chunks b, b + BLOCKS, ... of ``WORDS`` 32-bit words, ``STAGES`` of them in flight."""
    thread, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    shared = SmemAllocator()
    ring = shared.allocate_tensor(Int32, cute.make_layout((WORDS, STAGES)), byte_alignment=128)
    arrived = shared.allocate_array(Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            arch.mbarrier_init(arrived + stage, 1)
    arch.mbarrier_init_fence()
    arch.sync_threads()
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            first = block + stage * BLOCKS
            if first < chunks:
                arch.mbarrier_arrive_and_expect_tx(arrived + stage, WORDS * 4)
                prim.cp_async_bulk_shared_cluster_global(
                    ring.iterator + stage * WORDS, x.iterator + first * WORDS, arrived + stage, WORDS * 4,
                    l2_cache_hint=EVICT_FIRST,
                )  # fmt: skip
        chunk = Int32(block)
        stage = Int32(0)
        phase = Int32(0)
        while chunk < chunks:
            arch.mbarrier_wait(arrived + stage, phase)
            later = chunk + STAGES * BLOCKS
            if later < chunks:
                # nothing reads the ring: the copy that arrived is simply overwritten
                arch.mbarrier_arrive_and_expect_tx(arrived + stage, WORDS * 4)
                prim.cp_async_bulk_shared_cluster_global(
                    ring.iterator + stage * WORDS, x.iterator + later * WORDS, arrived + stage, WORDS * 4,
                    l2_cache_hint=EVICT_FIRST,
                )  # fmt: skip
            chunk += BLOCKS
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1
        out[block] = ring[0, 0]


k3lab_read_bulk.set_name_prefix("k3lab_read_bulk", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch(
    x: cute.Tensor, out: cute.Tensor, chunks: Int32,
    BLOCKS: cutlass.Constexpr, WORDS: cutlass.Constexpr, STAGES: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: ``BLOCKS`` blocks of one warp."""
    k3lab_read_bulk(x, out, chunks, BLOCKS, WORDS, STAGES).launch(grid=[BLOCKS, 1, 1], block=[32, 1, 1], stream=stream)
