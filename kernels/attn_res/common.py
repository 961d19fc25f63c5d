"""What the engines of this family share: the problem's type, first refusals, arguments."""

from __future__ import annotations

import struct

from ..contract import Arg, Engine, Problem
from .family import AttnRes

TENSORS = ("prefix", "blocks", "res_norm", "res_proj", "norm_w", "out")
"""In the order of the kernels' parameters."""


def mixing(problem: Problem) -> AttnRes:
    """The problem as this family's own type."""
    assert isinstance(problem, AttnRes)
    return problem


def refuses_always(engine: Engine, problem: AttnRes, arch: str) -> str | None:
    """What no engine of this family serves."""
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    if (problem.blocks == 0) != (problem.kind == "first"):
        return f"kind {problem.kind} with {problem.blocks} saved blocks: the first mix alone has none"
    return None


def tensor_args(problem: AttnRes) -> dict[str, Arg]:
    """Kernel arguments by name; where no block is saved there is nothing to weigh."""
    absent = ("blocks", "res_norm", "res_proj") if problem.kind == "first" else ()
    return {name: Arg("null") if name in absent else Arg("tensor", name) for name in TENSORS}


def eps_constant(eps: float) -> float:
    """``eps`` as FP32 has it: what the kernels add."""
    return float(struct.unpack("<f", struct.pack("<f", eps))[0])
