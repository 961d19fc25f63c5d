"""Device times as the statistics of pytest-benchmark: its clock is the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def record(benchmark: Any, samples_ns: Sequence[int], extra: Mapping[str, Any]) -> None:
    """Every sample becomes one round of the benchmark; what makes the figure believable goes beside it.

    Args:
        benchmark: the fixture of pytest-benchmark, not used before.
        samples_ns: device time of each replay, nanoseconds a call.
        extra: JSON-able, kept as ``extra_info``.
    """
    benchmark.extra_info.update(extra)
    benchmark._timer = _replayed(samples_ns)
    benchmark.pedantic(lambda: None, rounds=len(samples_ns), iterations=1)


def _replayed(samples_ns: Sequence[int]) -> Callable[[], float]:
    """A timer whose differences are the recorded device times."""
    samples, state = iter(samples_ns), {"now": 0.0, "start": True}

    def timer() -> float:
        if not state["start"]:
            state["now"] += next(samples, 0) * 1e-9
        state["start"] = not state["start"]
        return state["now"]

    return timer
