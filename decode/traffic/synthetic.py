"""Made-up agent traffic: many turns of long tool results and short answers, thinking pauses, one system prompt a kind of agent.

Shaped like agentic coding traffic in general; it is a recording of nothing, and files made of it say so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...kernels import InputError
from .sessions import Session, Traffic, Turn, traffic_of


@dataclass(frozen=True)
class Shape:
    """Medians and limits; lengths are log-normal around them, pauses exponential."""

    sessions: int = 8
    turns: int = 6
    """Mean; each session has 1 or more, geometrically."""
    system_tokens: int = 4000
    systems: int = 2
    prompt: int = 800
    output: int = 250
    pause_s: float = 4.0
    """Mean."""
    arrivals_s: float = 2.0
    """Mean time between sessions' starts."""
    context: int = 65_536
    """No session grows longer; it ends before."""
    sigma: float = 0.9
    """Of the logarithms of prompts and outputs."""

    def check(self) -> None:
        """Raise InputError for a shape that cannot be."""
        most = {
            "sessions": 100_000,
            "turns": 10_000,
            "systems": 100_000,
            "prompt": 2**20,
            "output": 2**20,
            "context": 2**24,
        }
        for name, limit in {**most, "system_tokens": 2**24}.items():
            if not 1 <= getattr(self, name) <= limit:
                raise InputError(f"{name.removesuffix('_tokens')} is {getattr(self, name)}, must be 1 to {limit}")
        for name in ("pause_s", "arrivals_s"):
            if not 0 <= getattr(self, name) < 86_400:
                raise InputError(
                    f"{name.removesuffix('_s')} is {getattr(self, name):g}, must be seconds from 0 to a day"
                )
        if not 0 <= self.sigma <= 3:
            raise InputError(f"sigma is {self.sigma:g}, must lie in 0..3")
        if self.system_tokens + 2 > self.context:
            raise InputError(
                f"a context of {self.context} tokens has no room behind a system prompt of {self.system_tokens}"
            )


def synthetic(shape: Shape, seed: int) -> Traffic:
    """Sessions of a shape; the same for the same seed.

    Raises:
        InputError: see :meth:`Shape.check`.
    """
    shape.check()
    draw = random.Random(seed)
    made, start = [], 0.0
    for number in range(shape.sessions):
        room = shape.context - shape.system_tokens
        turns: list[Turn] = []
        while room >= 2 and (not turns or draw.random() < 1 - 1 / shape.turns):
            prompt = min(_length(draw, shape.prompt, shape.sigma), room - 1)
            output = min(_length(draw, shape.output, shape.sigma), room - prompt)
            pause = round(draw.expovariate(1 / shape.pause_s), 3) if turns and shape.pause_s else 0.0
            turns.append(Turn(pause, prompt, output))
            room -= prompt + output
        system = f"synthetic-{draw.randrange(shape.systems)}"
        made.append(Session(f"synthetic-{seed}-{number}", round(start, 3), system, shape.system_tokens, tuple(turns)))
        start += draw.expovariate(1 / shape.arrivals_s) if shape.arrivals_s else 0.0
    return traffic_of(made)


def _length(draw: random.Random, median: int, sigma: float) -> int:
    return max(1, min(round(draw.lognormvariate(0, sigma) * median), median * 50))
