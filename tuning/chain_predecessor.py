"""The stand-in for the kernel before: takes its time without the memory, then hands over its result."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer


@triton.jit
def k3lab_chain_predecessor(
    source_ptr, result_ptr, nanoseconds, words,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, MOST_TURNS: tl.constexpr,
):  # fmt: skip
    """result[words] = source[words], 32-bit words, no sooner than ``nanoseconds`` after the predecessor's end.

    Dependents may start at once: what they read of ``result`` before their own wait is not there yet. The
    spin is bounded by ``MOST_TURNS`` readings of the clock.
    """
    gdc_launch_dependents()
    gdc_wait()
    start = globaltimer()
    turns = 0
    while (globaltimer() - start < nanoseconds) & (turns < MOST_TURNS):
        turns += 1
    for at in range(tl.program_id(0) * BLOCK, words, BLOCKS * BLOCK):
        offset = at + tl.arange(0, BLOCK)
        inside = offset < words
        tl.store(result_ptr + offset, tl.load(source_ptr + offset, mask=inside), mask=inside)
