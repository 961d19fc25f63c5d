"""When the warps of a CuTe DSL kernel pass the stages of a launch: stamps of the GPU's clocks, in builds that ask for them.

The builds are for tests and for ``k3lab stages``, and there is one number in a kernel that says which it is, ``JITTER``: zero
in what runs, the seed of random delays above it (:mod:`.cute_waits`), minus the address of a table of stamps below.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute import arch

from .stamps import BLOCKS, BYTES, STAGES, WARPS

STAMP = "st.global.v2.u64 [{$r0}], {{$r1}, {$r2}};"


@cute.jit
def stage(JITTER: cutlass.Constexpr, NAME: cutlass.Constexpr):
    """This warp has come to stage ``NAME``, one of :data:`.stamps.STAGES`; the last time counts, where it comes twice."""
    if cutlass.const_expr(JITTER < 0):
        t, _, _ = arch.thread_idx()
        x, y, z = arch.block_idx()
        wide, high, _ = arch.grid_dim()
        block = x + wide * (y + high * z)
        warp = t // 32
        if (t % 32 == 0) & (block < BLOCKS) & (warp < WARPS):
            place = (Int32(STAGES.index(NAME)) * BLOCKS + block) * WARPS + warp
            arch.inline_ptx(
                STAMP, read_only_args=[Int64(-JITTER) + Int64(place) * BYTES, arch.globaltimer(), arch.clock64()]
            )
