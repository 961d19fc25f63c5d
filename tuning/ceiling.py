"""The read ceiling of the GPU at hand: best plain read of gigabytes. Imports Triton: import it lazily."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

READ_BYTES = 4 << 30


@triton.jit
def k3lab_read(x_ptr, out_ptr, words: tl.constexpr, BLOCK: tl.constexpr, blocks: tl.constexpr):
    """Each block sums every ``blocks``-th stretch of ``BLOCK`` words."""
    offset = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for step in range(0, words // (BLOCK * blocks)):
        where = start + step.to(tl.int64) * (BLOCK * blocks) + offset
        total += tl.load(x_ptr + where, eviction_policy="evict_first")
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


@cache
def read_ceiling(read_bytes: int = READ_BYTES) -> float:
    """Bytes/s of the best of some shapes of a streaming read of 4 GiB, median of 9 each."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    words = read_bytes // 4
    x = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    out = torch.empty(sms * 8, dtype=torch.int32, device="cuda")
    best = 0.0
    for block in (4096, 8192):
        for a_sm in (2, 4, 8):
            grid = sms * a_sm
            usable = words // (block * grid) * (block * grid)
            times = []
            for _ in range(11):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                k3lab_read[(grid,)](x, out, words=words, BLOCK=block, blocks=grid, num_warps=8)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e-3)
            best = max(best, usable * 4 / sorted(times[2:])[4])
    del x, out
    torch.cuda.empty_cache()
    return best
