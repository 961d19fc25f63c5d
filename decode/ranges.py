"""Ranges of a decode run for profilers: ``decode step 4`` and, in eager runs, ``layer 12``."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

DOMAIN = "k3lab"


def profiler_range(name: str) -> AbstractContextManager[object]:
    """An NVTX range in the domain ``k3lab``, and a torch.profiler range of that name while one records."""
    import nvtx
    import torch

    ranges = ExitStack()
    ranges.enter_context(nvtx.annotate(name, domain=DOMAIN))
    if torch.autograd.profiler._is_profiler_enabled:
        ranges.enter_context(torch.profiler.record_function(f"{DOMAIN} {name}"))
    return ranges
