"""Which kernels wait for the other ranks, by their names. Data: add a pattern here for another library's kernels.

What counts is that no rank can end such a kernel before every rank has come to it: all-reduce, all-gather,
reduce-scatter and all-to-all do; a broadcast, a send or the half of a split collective that only publishes do not.
"""

from __future__ import annotations

import re
from functools import lru_cache

WAITING = (
    r"all_?reduce",  # nccl AllReduce, torch symmetric memory, TensorRT-LLM, FlashInfer
    r"all_?gather",
    r"reduce_?scatter",
    r"all_?to_?all",
    r"multimem",  # torch symmetric memory through NVLink SHARP
    r"cross_device_reduce",  # vLLM and SGLang
    r"(?:one|two)_?shot",
    r"quick_?reduce",
    r"lamport",
    r"k3_output_projection_",
    r"k3_moe_tail_",
)
"""A kernel whose name holds one of these waits for the other ranks, case aside ..."""

NOT_WAITING = (r"producer", r"publish", r"send_?recv", r"broadcast")
"""... unless it holds one of these as well."""

_WAITING = re.compile("|".join(WAITING), re.IGNORECASE)
_NOT_WAITING = re.compile("|".join(NOT_WAITING), re.IGNORECASE)


@lru_cache(maxsize=20000)
def is_collective(name: str) -> bool:
    """Whether the kernel cannot end before every rank has come to it."""
    return bool(_WAITING.search(name)) and not _NOT_WAITING.search(name)
