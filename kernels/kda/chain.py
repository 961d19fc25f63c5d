"""The family's work in PyTorch operators, as a user would write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors

if TYPE_CHECKING:
    from .family import Kda


def chain(problem: Kda) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs; what torch.compile is given."""
    from .family import WEIGHTS
    from .twin import KdaWeights, kda

    def run(tensors: Tensors) -> Tensors:
        read = tensors["slots"][:, 0] - 1
        out, conv_states, states = kda(
            tensors["proj"], KdaWeights(**{name: tensors[name] for name in WEIGHTS}), tensors["conv_state"][read],
            tensors["state"][read], q_len=problem.q_len, lower_bound=problem.lower_bound, eps=problem.eps,
        )  # fmt: skip
        return {"out": out, "conv_states": conv_states.flatten(0, 1), "states": states.flatten(0, 1)}

    return run


def chain_call(problem: Kda, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors, capturable in a graph: states go to their slots."""
    run = chain(problem)

    def call() -> None:
        made = run(tensors)
        tensors["out"].copy_(made["out"])
        written = (tensors["slots"][:, 1:] - 1).flatten().long()
        for name in ("conv_states", "states"):
            tensors[name].index_copy_(0, written, made[name])

    return call
