"""Whether a time changed by more than it varies from step to step.

The rule is one that can be checked by eye: the ranges from the 10th to the 90th percentile of the steps do not overlap,
with at least eight steps on each side, and the medians differ by half a percent. It knows nothing of what differs
between two captures of the same thing (clocks, temperature, another node), and neither does any other rule that sees
one capture of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..timing import median_ns, quantile_ns

RULE = "p10 to p90 of the steps do not overlap, and the medians differ by 0.5 % or more"
_LEAST = 0.005
FEWEST_STEPS = 8
"""Of fewer steps the ranges part too often by chance.

Of 8 or more a side they do once in 3,000 times at most, of 5 once in 130, and a comparison looks at some forty times.
"""


@dataclass(frozen=True)
class Change:
    """A time in two traces, ns: medians over the steps, their p10 and p90, and whether they part.

    ``a`` or ``b`` is None where the thing is not there. ``beyond`` is None where that cannot be told: a side is not
    there, or has too few steps.
    """

    a: int | None
    b: int | None
    a_range: tuple[int, int] | None = None
    b_range: tuple[int, int] | None = None
    beyond: bool | None = None

    @property
    def delta(self) -> int | None:
        """What b has more than a, or None where one of them is not there."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def worth(self) -> int:
        """How much it moves the total: the difference, or all of what is on one side only."""
        return (self.b or 0) - (self.a or 0)

    def to_json(self) -> dict[str, object]:
        """As JSON-able data."""
        return {
            "a_ns": self.a,
            "b_ns": self.b,
            "delta_ns": self.delta,
            "a_p10_p90_ns": list(self.a_range) if self.a_range else None,
            "b_p10_p90_ns": list(self.b_range) if self.b_range else None,
            "beyond_the_spread": self.beyond,
        }


def change(a: Sequence[int] | None, b: Sequence[int] | None, resolution: int = 1) -> Change:
    """Compare the values of the steps of two traces.

    Args:
        a: one value a step, ns; None where the thing is not in the trace.
        b: likewise.
        resolution: the step in which the coarser file counts time; a smaller difference is none, ns.
    """
    ranges = [(quantile_ns(side, 10), quantile_ns(side, 90)) if side else None for side in (a, b)]
    beyond = None
    if a and b and min(len(a), len(b)) >= FEWEST_STEPS and ranges[0] and ranges[1]:
        parted = ranges[0][1] < ranges[1][0] or ranges[1][1] < ranges[0][0]
        beyond = parted and abs(median_ns(a) - median_ns(b)) > max(resolution, _LEAST * median_ns(a))
    return Change(median_ns(a) if a else None, median_ns(b) if b else None, ranges[0], ranges[1], beyond)
