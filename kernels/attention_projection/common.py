"""What the engines of this family share: kernel arguments, first refusals, rounding of sizes."""

from __future__ import annotations

from ..contract import Arg, Engine, Problem
from .family import AttentionProjection

X, W, OUT, ROWS = Arg("tensor", "x"), Arg("tensor", "w"), Arg("tensor", "out"), Arg("int32", "rows")
FMA_ROWS = 8
"""Most rows of an FMA kernel: every row has its own sums in registers."""


def power_of_two(rows: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``rows`` and ``least``."""
    size = least
    while size < rows:
        size *= 2
    return size


def refuses_always(engine: Engine, problem: AttentionProjection, arch: str) -> str | None:
    """What no engine of this family serves: other dtypes, architectures it does not name."""
    if problem.dtype != "bfloat16":
        return f"dtype {problem.dtype}: the kernels read bfloat16"
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    return None


def projection(problem: Problem) -> AttentionProjection:
    """The problem as this family's own type."""
    assert isinstance(problem, AttentionProjection)
    return problem
