"""Whether a step launches what its plan says: tuned kernels by symbol, in a captured graph or in a trace of its replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

OURS = "k3_"
"""Symbols of kernels of this package begin so; what PyTorch launches beside them is no part of the count."""


def differences(planned: Mapping[str, int], names: Iterable[str], steps: int = 1) -> list[str]:
    """A line for every tuned kernel that is launched more or less often than planned; empty where all is as planned.

    Args:
        planned: launches a step by symbol (:meth:`~k3lab.decode.plan.Plan.tuned_kernels`).
        names: of all kernels that were launched.
        steps: in which.
    """
    found = Counter(name for name in names if name.startswith(OURS))
    return [
        f"{name}: {found[name]} launches in {steps} step{'s' if steps > 1 else ''}, {planned.get(name, 0) * steps} planned"
        for name in sorted({*planned, *found})
        if found[name] != planned.get(name, 0) * steps
    ]


def counted(planned: Mapping[str, int], names: Iterable[str]) -> dict[str, Any]:
    """Of a captured step, for reports: planned and found launches of tuned kernels, all kernels, and differences."""
    every = list(names)
    return {
        "planned": sum(planned.values()), "tuned": sum(name.startswith(OURS) for name in every), "kernels": len(every),
        "differences": differences(planned, every),
    }  # fmt: skip
