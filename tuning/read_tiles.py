"""Plain streaming reads in Triton: what the read ceiling is measured with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3lab_read_tiles(x_ptr, out_ptr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """A block sums ``TILES`` stretches of ``BLOCK`` words, one contiguous range."""
    offset = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * (TILES * BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in tl.static_range(TILES):
        total += tl.load(x_ptr + start + tile * BLOCK + offset, eviction_policy="evict_first")
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))
