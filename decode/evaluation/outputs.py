"""What a backend is asked, and what it puts out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Asked:
    """One prompt and the seed of its random numbers."""

    ids: tuple[int, ...]
    seed: int


@dataclass
class Output:
    """What came of one."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithms of the probability that the backend itself gave each token, at temperature 1."""
    stopped: bool = False
    """Ended by a stop token, which is the last of ``tokens``; else by its length."""
