"""The cute_wgmma engine: the TMA pipeline with Hopper's warpgroup MMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cute_tma_engine import HERE, SHARED_SOURCES, CuteTmaEngine


class CuteWgmmaEngine(CuteTmaEngine):
    """For sm_90a: each consumer warpgroup has 64 weight rows, sums in registers."""

    name = "cute_wgmma"
    archs = ("sm_90a",)
    sources = (HERE / "cute_wgmma.py", *SHARED_SOURCES)
    mma_rows, n_step, mma_warps = 64, 8, 0
    other_registers = 26

    def host(self) -> Callable[..., Any]:
        """See :meth:`CuteTmaEngine.host`."""
        from .cute_wgmma import launch

        return launch
