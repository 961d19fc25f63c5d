"""Operators that come late, at random: no delay may change a bit of what a group computes."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from .operators import Operators

CYCLES_A_US = 1_500
"""Of a GPU's clock, about."""


class Delayed:
    """Operators with a random pause before each, on the device where they run on one: also in a captured graph."""

    def __init__(self, operators: Operators, seed: object, *, most_us: int = 200, share: float = 0.5) -> None:
        """Wrap.

        Args:
            operators: any backend's.
            seed: of the pauses; ranks need different ones.
            most_us: longest pause.
            share: of the operators that pause.
        """
        self._operators, self._draw = operators, random.Random(str(seed))
        self._most, self._share = most_us, share

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._operators, name)
        if name.startswith("_") or not callable(found) or name in ("check", "take"):
            return found

        def late(*args: Any, **more: Any) -> Any:
            if self._draw.random() < self._share:
                self._pause(self._draw.randint(1, self._most), args)
            return found(*args, **more)

        return late

    @staticmethod
    def _pause(us: int, args: tuple[Any, ...]) -> None:
        if any(isinstance(one, torch.Tensor) and one.is_cuda for one in args):
            torch.cuda._sleep(us * CYCLES_A_US)
        else:
            time.sleep(us / 1e6)
