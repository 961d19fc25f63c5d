"""Long outputs followed: whether one backend's text goes astray where it gets long and the other's does not.

Sampled texts part sooner or later, so tokens are not compared. What is followed, window by window of an output's
tokens: how likely each backend finds its own tokens (nats a token), and how much it repeats itself (the share of
8-token runs that were there before in the same output). A backend that drifts differs from the other in late windows
and not in the first: the difference of these differences is what is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .outputs import Output
from .paired import LEAST, interval

FIRST = 64
"""Tokens of the first window; each later window is as long as all before it."""
RUN = 8
ALPHA = 0.01
"""Less than for scores: two things are looked at, and nobody asked beforehand which."""
Outputs = Mapping[str, Sequence[Output]]
"""Problem to the outputs of its repeats."""


def edges(longest: int) -> list[int]:
    """Where windows begin and end: 0, 64, 128, 256 and so on, the last whole one within ``longest``."""
    made = [0, FIRST]
    while made[-1] * 2 <= longest:
        made.append(made[-1] * 2)
    return made if longest >= FIRST else [0]


def repeated(tokens: Sequence[int]) -> list[bool]:
    """Of each token, whether the run of 8 that ends with it was there before."""
    seen: set[tuple[int, ...]] = set()
    found = [False] * min(len(tokens), RUN - 1)
    for end in range(RUN, len(tokens) + 1):
        run = tuple(tokens[end - RUN : end])
        found.append(run in seen)
        seen.add(run)
    return found


@dataclass(frozen=True)
class Window:
    """Tokens ``begin`` to ``end`` of the outputs that reach ``end`` under both backends."""

    begin: int
    end: int
    problems: int
    """That have such outputs."""
    alike: float
    """Share of pairs of outputs that are the same token by token up to ``end``."""
    likelihood: tuple[float, float]
    """Nats a token, of the first backend and of the second."""
    repeats: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "begin": self.begin, "end": self.end, "problems": self.problems, "alike": self.alike,
            "nats_a_token": list(self.likelihood), "repeated": list(self.repeats),
        }  # fmt: skip


@dataclass(frozen=True)
class Drift:
    """The windows, and the change of the backends' difference from the first window to the last that enough reach."""

    windows: tuple[Window, ...]
    likelihood: tuple[float, float] | None
    """99 % interval of the change in nats a token; None where too few outputs reach a second window."""
    repeats: tuple[float, float] | None
    last: int
    """End of the last window that is judged; 0: none."""

    @property
    def verdict(self) -> str:
        """``drifts``: less likely or more repetitive late, the interval without zero; ``none found``; or ``inconclusive``."""
        if self.likelihood is None or self.repeats is None:
            return "inconclusive"
        return "drifts" if self.likelihood[1] < 0 or self.repeats[0] > 0 else "none found"

    def to_json(self) -> dict[str, Any]:
        """All of it, and the verdict."""
        return {
            "windows": [one.to_json() for one in self.windows], "last": self.last, "verdict": self.verdict,
            "change_nats_a_token": list(self.likelihood) if self.likelihood else None,
            "change_repeated": list(self.repeats) if self.repeats else None,
        }  # fmt: skip


def drift(first: Outputs, second: Outputs) -> Drift:
    """Follow two backends' outputs of the same problems and repeats."""
    pairs = {
        name: [(a, b) for a, b in zip(first[name], second[name], strict=False)] for name in first if name in second
    }
    marks = {
        id(one): (np.array(one.logprobs), np.array(repeated(one.tokens)))
        for several in pairs.values() for both in several for one in both
    }  # fmt: skip
    longest = max((min(len(a.tokens), len(b.tokens)) for several in pairs.values() for a, b in several), default=0)
    windows, differences = [], []
    for begin, end in pairwise(edges(longest)):
        reach = {
            name: own
            for name, several in pairs.items()
            if (own := [(a, b) for a, b in several if min(len(a.tokens), len(b.tokens)) >= end])
        }
        means = {  # problem to [what, backend]
            name: np.array([
                [np.mean([marks[id(both[side])][what][begin:end].mean() for both in own]) for side in (0, 1)] for what in (0, 1)
            ])
            for name, own in reach.items()
        }  # fmt: skip
        alike = [a.tokens[:end] == b.tokens[:end] for own in reach.values() for a, b in own]
        told = np.mean(list(means.values()), axis=0)
        windows.append(
            Window(begin, end, len(reach), float(np.mean(alike)), (float(told[0, 0]), float(told[0, 1])), (float(told[1, 0]), float(told[1, 1])))
        )  # fmt: skip
        differences.append({name: own[:, 1] - own[:, 0] for name, own in means.items()})
    judged = [index for index, one in enumerate(windows) if index and one.problems >= LEAST]
    if not judged:
        return Drift(tuple(windows), None, None, 0)
    late, early = differences[judged[-1]], differences[0]
    change = np.array([late[name] - early[name] for name in late])
    return Drift(
        tuple(windows), _interval(change[:, 0]), _interval(change[:, 1]), windows[judged[-1]].end
    )  # fmt: skip


def _interval(changes: Any) -> tuple[float, float]:
    # where nothing changes, what may change unseen is of the size of what was seen: none
    return interval(list(changes), spread=float(np.abs(changes).max()), alpha=ALPHA)
