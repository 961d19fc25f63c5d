"""Timings held against stored ones: how far a run may lie above its baseline follows from what was measured to spread.

A baseline is what some rounds of one kernel took on one GPU, each round a capture of its own. Two measurements of one
kernel differ by more than the rounds of either: :data:`BETWEEN` is what they were seen to differ, and the baseline's own
rounds add what they spread. A baseline whose limit would be so wide that a slowdown of :data:`SLOWDOWN` could pass is
not stored. The figures are those of ``results/h200/timing_noise.json``, where a test makes them anew.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..kernels.errors import InputError
from ..kernels.whole_file import write_whole

FORMAT, SCHEMA = "k3lab-baselines", 1
SLOWDOWN = 0.10
"""What every stored baseline can tell from noise."""
BETWEEN = 0.045
"""One steady kernel, two measurements: the most that their medians were seen to differ on an H200."""
WIDEST = 0.06
"""Limit above which a baseline is too unsteady: a slowdown of :data:`SLOWDOWN` that lies low by noise would pass."""


def spread(medians: Sequence[float]) -> float:
    """(largest - smallest) / median of the medians of rounds."""
    return (max(medians) - min(medians)) / statistics.median(medians)


@dataclass(frozen=True)
class Baseline:
    """What a kernel took on one GPU."""

    gpu: str
    """Name of the GPU's card, e.g. ``H200``."""
    rounds_us: tuple[float, ...]
    """Microseconds a call: the median of each round."""
    what: Mapping[str, Any]
    """Family, engine, problem and config."""
    environment: Mapping[str, Any]
    """Driver, versions and commit of then."""

    @property
    def median_us(self) -> float:
        """Microseconds a call."""
        return statistics.median(self.rounds_us)

    @property
    def limit(self) -> float:
        """How far a run may lie above, as a share: 0.05 is 5 %."""
        return BETWEEN + spread(self.rounds_us)

    @property
    def fault(self) -> str | None:
        """Why it cannot serve, in one line, or None."""
        if self.limit <= WIDEST:
            return None
        return (
            f"its rounds spread by {spread(self.rounds_us):.1%} ({', '.join(f'{us:.2f}' for us in self.rounds_us)} us): "
            f"a slowdown of {SLOWDOWN:.0%} would not be told from noise; look at clocks and power, and store it again"
        )


@dataclass(frozen=True)
class Held:
    """A run beside its baseline."""

    ok: bool
    line: str
    """What was found, in one line."""
    ratio: float
    """Run over baseline."""


def hold(baseline: Baseline, rounds_us: Sequence[float]) -> Held:
    """Judge a run by its baseline.

    Args:
        baseline: the stored one.
        rounds_us: medians of the run's rounds, in microseconds.
    """
    now = statistics.median(rounds_us)
    ratio = now / baseline.median_us
    ok = ratio <= 1 + baseline.limit
    line = (
        f"{now:.2f} us is {abs(ratio - 1):.1%} {'above' if ratio > 1 else 'below'} the baseline of {baseline.median_us:.2f} us "
        f"on {baseline.gpu}; limit {baseline.limit:.1%} ({BETWEEN:.1%} between measurements, {spread(baseline.rounds_us):.1%} its own rounds)"
    )
    return Held(ok, line, ratio)


class BaselineFile:
    """Baselines by name and GPU in a JSON file that is kept beside the tests."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            data = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path} cannot be read as baselines: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("schema") != SCHEMA:
            raise InputError(f"{self.path} holds no baselines of this version (format {FORMAT}, schema {SCHEMA})")
        return dict(data["entries"])

    def gpus(self, name: str) -> tuple[str, ...]:
        """GPUs on which the name has a baseline."""
        return tuple(self._entries().get(name, {}))

    def get(self, name: str, gpu: str) -> Baseline | None:
        """The baseline of that name on that GPU, or None.

        Raises:
            InputError: the file is not one of baselines, or damaged.
        """
        entry = self._entries().get(name, {}).get(gpu)
        if entry is None:
            return None
        try:
            rounds = tuple(float(us) for us in entry["rounds_us"])
            if not rounds or min(rounds) <= 0:
                raise ValueError("no rounds")
            return Baseline(gpu, rounds, entry["what"], entry["environment"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.path}: the baseline {name!r} on {gpu} is damaged: {error}") from error

    def store(self, name: str, baseline: Baseline) -> None:
        """Put it in place of one of the same name and GPU; the file is written whole or not at all.

        Raises:
            InputError: the baseline has a fault, or the file cannot be written.
        """
        if baseline.fault:
            raise InputError(f"the baseline of {name!r} is not stored: {baseline.fault}")
        entries = self._entries()
        entry = {key: value for key, value in asdict(baseline).items() if key != "gpu"}
        entries.setdefault(name, {})[baseline.gpu] = entry
        data = {"format": FORMAT, "schema": SCHEMA, "entries": {key: entries[key] for key in sorted(entries)}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error
