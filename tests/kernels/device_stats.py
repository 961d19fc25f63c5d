"""Device times as the statistics of pytest-benchmark."""

from __future__ import annotations

from typing import Any

import pytest
from k3lab.tuning import benchmark_stats
from k3lab.tuning.timing import Timing


def record(benchmark: Any, timing: Timing) -> None:
    """Every cold sample is one round of the benchmark; what makes the figure believable goes beside it."""
    benchmark_stats.record(benchmark, timing.cold.samples_ns, timing.to_json())
    assert benchmark.stats.stats.median == pytest.approx(timing.cold_us * 1e-6, rel=0.01)
