"""Whether two systems differ on the same problems: a paired difference with its interval, and what may be said of it.

Repeats of a problem are no problems of their own: scores are averaged over them first. The interval is a bootstrap
over problems (percentiles); where few problems differ at all, a bootstrap knows nothing of those that would have, and
the interval is widened by the share of problems that may do so unseen (``1 - alpha ** (1 / n)``, the exact one-sided
bound for none of n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALPHA = 0.05
RESAMPLES = 10_000
LEAST = 10
"""Problems below which nothing is concluded."""
FEW = 5
"""Problems that differ, below which the interval is widened."""


@dataclass(frozen=True)
class Paired:
    """The second system's score minus the first's."""

    problems: int
    differing: int
    """Problems whose mean scores differ."""
    first: float
    """Mean score."""
    second: float
    difference: float
    low: float
    """Of the 95 % interval."""
    high: float
    margin: float
    """What counts as no loss."""

    @property
    def verdict(self) -> str:
        """``worse``, ``better``, ``no loss`` beyond the margin, or ``inconclusive``."""
        if self.problems < LEAST or self.first <= self.margin:  # from nothing nothing can be lost
            return "inconclusive"
        if self.high < 0:
            return "worse"
        if self.low > 0:
            return "better"
        return "no loss" if self.low >= -self.margin else "inconclusive"

    def to_json(self) -> dict[str, Any]:
        """All of it, and the verdict."""
        return {
            "problems": self.problems, "differing": self.differing, "first": self.first, "second": self.second,
            "difference": self.difference, "interval": [self.low, self.high], "margin": self.margin, "verdict": self.verdict,
        }  # fmt: skip


def interval(
    values: Sequence[float], *, spread: float = 1.0, alpha: float = ALPHA, seed: int = 0
) -> tuple[float, float]:
    """An interval of the mean of ``values``, one a problem; of no values it is unbounded.

    Args:
        values: differences.
        spread: how far a difference can lie from zero.
        alpha: share of intervals that miss the truth.
        seed: of the bootstrap.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        return float("-inf"), float("inf")
    drawn = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 500):  # some at a time: a long list is never there 10,000 times
        means[start : start + 500] = data[drawn.integers(0, data.size, (500, data.size))].mean(1)
    low, high = np.quantile(means, [alpha / 2, 1 - alpha / 2])
    if np.count_nonzero(data) < FEW:
        unseen = (1 - (alpha / 2) ** (1 / data.size)) * spread
        low, high = min(low, data.mean() - unseen), max(high, data.mean() + unseen)
    return float(low), float(high)


def paired(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], *, margin: float, seed: int = 0
) -> Paired:
    """Compare scores, problem to the scores of its repeats, of the problems that both have.

    Args:
        first: of the system that is there, 0 to 1.
        second: of the one that is judged.
        margin: loss of mean score that does not matter.
        seed: of the bootstrap.
    """
    names = [name for name in first if name in second]
    a = np.array([np.mean(first[name]) for name in names])
    b = np.array([np.mean(second[name]) for name in names])
    low, high = interval(list(b - a), seed=seed)
    return Paired(
        problems=len(names), differing=int(np.count_nonzero(b - a)), first=float(a.mean()) if names else float("nan"),
        second=float(b.mean()) if names else float("nan"), difference=float((b - a).mean()) if names else float("nan"),
        low=low, high=high, margin=margin,
    )  # fmt: skip
