"""The cute_tcgen05 engine: the TMA pipeline with Blackwell's tensor-memory MMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cute_tma_engine import HERE, SHARED_SOURCES, CuteTmaEngine


class CuteTcgen05Engine(CuteTmaEngine):
    """For sm_100a and sm_103a: one warp issues MMAs of 128 weight rows, sums in tensor memory. Never run here."""

    name = "cute_tcgen05"
    archs = ("sm_100a", "sm_103a")
    sources = (HERE / "cute_tcgen05.py", *SHARED_SOURCES)
    mma_rows, n_step, mma_warps = 128, 16, 1
    other_registers = 20

    def host(self) -> Callable[..., Any]:
        """See :meth:`CuteTmaEngine.host`."""
        from .cute_tcgen05 import launch

        return launch
