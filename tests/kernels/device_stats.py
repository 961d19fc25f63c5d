"""Device times as the statistics of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from k3lab.tuning.timing import Timing


def record(benchmark: Any, timing: Timing) -> None:
    """Every cold sample is one round of the benchmark; what makes the figure believable goes beside it."""
    benchmark.extra_info.update(timing.to_json())
    benchmark._timer = _replayed(timing.cold.samples_ns)
    benchmark.pedantic(lambda: None, rounds=len(timing.cold.samples_ns), iterations=1)
    assert benchmark.stats.stats.median == pytest.approx(timing.cold_us * 1e-6, rel=0.01)


def _replayed(samples_ns: Sequence[int]) -> Callable[[], float]:
    """A timer whose differences are the recorded device times."""
    samples, state = iter(samples_ns), {"now": 0.0, "start": True}

    def timer() -> float:
        if not state["start"]:
            state["now"] += next(samples, 0) * 1e-9
        state["start"] = not state["start"]
        return state["now"]

    return timer
