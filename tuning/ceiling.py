"""The read ceiling of the GPU at hand: best plain read of gigabytes. Imports Triton: import it lazily."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

READ_BYTES = 4 << 30


@triton.jit
def k3lab_read(x_ptr, out_ptr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """A block sums ``TILES`` stretches of ``BLOCK`` words, one contiguous range."""
    offset = tl.arange(0, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    start = block * TILES * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in tl.static_range(TILES):
        total += tl.load(x_ptr + start + tile * BLOCK + offset, eviction_policy="evict_first")
    tl.store(out_ptr + block, tl.sum(total))


SHAPES = [(block, tiles, warps) for block in (2048, 4096, 8192) for tiles in (1, 2, 4) for warps in (4, 8)]
"""(words a tile, tiles a block, warps): all tiles of a block are in flight together."""


def time_read(x: torch.Tensor, out: torch.Tensor, block: int, tiles: int, warps: int) -> float:
    """Bytes/s of one shape, median of 7 after 2."""
    grid = x.numel() // (block * tiles)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        k3lab_read[(grid,)](x, out, BLOCK=block, TILES=tiles, num_warps=warps)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return grid * block * tiles * 4 / sorted(times[2:])[3]


@cache
def read_ceiling(read_bytes: int = READ_BYTES) -> float:
    """Bytes/s of the best of some shapes of a plain read of 4 GiB."""
    words = read_bytes // 4
    x = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    out = torch.empty(words // 2048, dtype=torch.int32, device="cuda")
    for _ in range(20):  # up to the clocks that a measurement runs at
        time_read(x, out, *SHAPES[0])
    best = max(time_read(x, out, *shape) for shape in SHAPES)
    del x, out
    torch.cuda.empty_cache()
    return best
