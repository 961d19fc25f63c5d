"""A decode run's trace against its plan: every tuned kernel as often as planned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def traced_differences(path: Path, planned: Mapping[str, int], steps: int) -> list[str]:
    """Lines for tuned kernels that a trace of so many steps holds more or less often than planned.

    Raises:
        TraceError: it cannot be read.
    """
    from ..decode.launches import differences
    from ..traces import read_trace

    return differences(planned, (kernel.name for kernel in read_trace(path).kernels), steps)


def ranks_together(
    folder: Path, *, ranks: int, layers: int, rows: int, plan: Path | None, budget: str | None
) -> dict[str, Any]:
    """What :func:`~k3lab.traces.check_ranks` says of ``rank0.json.gz`` and so on in a folder; ``error`` where it can say nothing.

    Args:
        folder: with a trace a rank.
        ranks: of the group.
        layers: of a step.
        rows: of a step.
        plan: file with what was planned.
        budget: name or file; None judges nothing.
    """
    from ..traces import TraceError, check_ranks

    files = [folder / f"rank{rank}.json.gz" for rank in range(ranks)]
    try:
        return check_ranks(files, budget, world=ranks, layers=layers, tp=ranks, rows=rows, plan=plan).to_json()
    except TraceError as error:
        return {"error": str(error)}
