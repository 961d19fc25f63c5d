"""What the engines of this family share: the problem's type, first refusals, buffers, what the compiler is told."""

from __future__ import annotations

from typing import Any

from .. import health
from ..contract import Buffer, Engine, Problem
from .family import LmHead
from .layout import Board


def head(problem: Problem) -> LmHead:
    """The problem as this family's own type."""
    assert isinstance(problem, LmHead)
    return problem


def refuses_always(engine: Engine, problem: LmHead, arch: str) -> str | None:
    """What no engine of this family serves."""
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    if problem.vocab % 2:
        return f"{problem.vocab} vocabulary rows a rank do not go in pairs"
    return None


def exchange_buffers(problem: LmHead) -> tuple[Buffer, ...]:
    """What the blocks of a launch, and the ranks, leave to each other to find the best token."""
    return (
        Buffer("keys", (problem.rows,), "int64", zeroed=True),
        Buffer("arrived", (1,), "int32", zeroed=True),
        *Board(problem.tp, problem.rows).buffers("mailbox"),
        Buffer("epochs", (1,), "int32", persistent=True),
        health.BUFFER,
    )


def fake_tensors(problem: LmHead, buffers: tuple[Buffer, ...]) -> dict[str, Any]:
    """What the compiler is told of each argument. Imports the compiler."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    from .family import FAMILY

    kinds = {"bfloat16": cutlass.BFloat16, "float32": cutlass.Float32, "int32": cutlass.Int32, "int64": cutlass.Int64}
    sizes = {name: (draw.dtype, draw.shape) for name, draw in FAMILY.draws(problem).items()}
    sizes |= {name: (dtype, shape) for name, (shape, dtype) in FAMILY.output_specs(problem).items()}
    sizes |= {buffer.name: (buffer.dtype, buffer.shape) for buffer in buffers}
    sizes["tokens"] = ("int32", (problem.rows,))
    if problem.kind != "embed":
        sizes["peers"] = ("int32", (problem.tp, problem.rows, 2))
    made = {}
    for name, (dtype, shape) in sizes.items():
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        made[name] = make_fake_tensor(kinds[dtype], shape, stride=tuple(strides), assumed_align=16)
    return made
