"""A decode run's trace against its plan: every tuned kernel as often as planned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def traced_differences(path: Path, planned: Mapping[str, int], steps: int) -> list[str]:
    """Lines for tuned kernels that a trace of so many steps holds more or less often than planned.

    Raises:
        TraceError: it cannot be read.
    """
    from ..decode.launches import differences
    from ..traces import read_trace

    return differences(planned, (kernel.name for kernel in read_trace(path).kernels), steps)
