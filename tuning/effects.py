"""What the parameters of a space did to the time, as the trials of a study tell it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trial = tuple[Mapping[str, Any], float]
"""Config and time in microseconds of a trial that ended ok."""


@dataclass(frozen=True)
class Slice:
    """The trials in which a parameter had one value."""

    value: Any
    times_us: tuple[float, ...]
    """In the order of the trials."""

    @property
    def best_us(self) -> float:
        """Fastest of them."""
        return min(self.times_us)

    @property
    def median_us(self) -> float:
        """Median of them."""
        return statistics.median(self.times_us)


def slices(trials: Sequence[Trial]) -> dict[str, list[Slice]]:
    """Parameter to its values in ascending order, each with the times of its trials."""
    names = dict.fromkeys(name for config, _ in trials for name in config)
    found: dict[str, list[Slice]] = {}
    for name in names:
        times: dict[Any, list[float]] = {}
        for config, time in trials:
            if name in config:
                times.setdefault(config[name], []).append(time)
        order = sorted(
            times, key=lambda value: (isinstance(value, str), str(value) if isinstance(value, str) else value)
        )
        found[name] = [Slice(value, tuple(times[value])) for value in order]
    return found


def importance(trials: Sequence[Trial]) -> dict[str, float]:
    """Share of the spread of log times that each parameter explains alone, most first; 0 where chance explains as much.

    The analysis of variance of one factor, corrected for its number of values (epsilon squared). Shares need not add up to
    one: what two parameters do together is nobody's share, and a search visits good regions more often than others, so that
    this describes the study, not the space.
    """
    logs = [math.log(time) for _, time in trials]
    if len(logs) < 3:
        return {}
    mean = statistics.fmean(logs)
    total = sum((value - mean) ** 2 for value in logs)
    shares = {}
    for name, parts in slices(trials).items():
        count = sum(len(part.times_us) for part in parts)
        if count != len(logs) or total == 0 or len(parts) < 2 or len(parts) == count:
            shares[name] = 0.0
            continue
        within = 0.0
        for part in parts:
            own = [math.log(time) for time in part.times_us]
            within += sum((value - statistics.fmean(own)) ** 2 for value in own)
        noise = within / (count - len(parts))
        shares[name] = max(0.0, (total - within - (len(parts) - 1) * noise) / total)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
