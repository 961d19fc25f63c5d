"""The timing policy: how a number is measured is part of the number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

POLICY_VERSION = 1


@dataclass(frozen=True)
class TimingPolicy:
    """Isolated timing in a CUDA graph: no PDL edge between calls, weights cold, many calls a replay."""

    mode: str = "graph"
    """Calls are captured once and replayed: no host launch cost in the figure."""
    rotate_bytes: int = 400_000_000
    """Copies of the weights are cycled through until at least this much lies between two uses of one."""
    calls: int = 40
    """Fewest calls in a graph: one replay's own cost stays below one percent."""
    samples: int = 25
    """Replays timed; the figure is their median."""
    warm_ms: float = 200.0
    """Shortest warm-up at full load, so that clocks have settled."""
    max_spread: float = 0.03
    """(p90 - p10) / median above which a measurement is repeated."""
    attempts: int = 3
    """Measurements tried before the result is called unstable."""
    below_floor: float = 0.03
    """A cold time further below the byte floor than this is a broken measurement."""
    rest_ms: float = 10.0
    """Idle before each replay of a series that is taken again because a cap held the clocks down: it times the kernel,
    not how often it is run. Large batches meet the power cap of an H200 where they are replayed without a pause."""
    version: int = POLICY_VERSION

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self)


QUICK = TimingPolicy(samples=11, warm_ms=30.0)
"""For searching: finalists are timed again with the full policy."""
FULL = TimingPolicy()

CONTEST = TimingPolicy(samples=15, warm_ms=20.0)
"""For a round of a contest: the GPU has just run another contestant."""

CHAIN = TimingPolicy(samples=7, warm_ms=2.0)
"""For a round of a contest's chains, half a second in all: what the samples spread widens the band, no more."""
