"""What the engines of this family share."""

from __future__ import annotations

from ..contract import Problem
from .family import Kda

TENSORS = (
    "proj", "f_b", "conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "o_norm", "conv_state", "state", "slots", "out",
    "conv_states", "states",
)  # fmt: skip
"""Parameters of every kernel, in order; the row count follows."""


def kda(problem: Problem) -> Kda:
    """The problem as this family's own type."""
    assert isinstance(problem, Kda)
    return problem
