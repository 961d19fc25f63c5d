"""What an engine of the tail is made of: how a problem is shared out, arguments, buffers, first refusals."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from .. import health
from ..contract import Arg, Buffer, Engine, Problem
from ..errors import InputError
from ..output_projection.mailbox import epochs_buffer
from ..space import Config
from .family import MoeTail
from .layout import ROW_SUM_BYTES, RUN, TILE, UNIT, WARPS, Cut

MOST_ROWS = 64
LEAST_REGISTERS = 128
"""A thread of a block of 512 has no more."""


def tail(problem: Problem) -> MoeTail:
    """The problem as this family's own type."""
    assert isinstance(problem, MoeTail)
    return problem


def finishing_blocks(rows: int, config: Config) -> int:
    """Blocks that finish rows, whole clusters, of which each takes at most ``rows_each`` rows one after the other."""
    split = int(config["split_k"])
    wanted = -(-rows // int(config["rows_each"]))
    return -(-wanted // split) * split


def cut(problem: MoeTail, config: Config) -> Cut:
    """How the kernel shares the problem out."""
    return Cut(
        problem.tp, problem.rows, problem.hidden, problem.latent, problem.blocks, int(config["split_k"]),
        config["exchange"] == "two_shot", finishing_blocks(problem.rows, config),
    )  # fmt: skip


def refuses_always(engine: Engine, problem: MoeTail, arch: str) -> str | None:
    """What no engine of this family serves."""
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    if problem.tp not in (1, 2, 4, 8, 16):
        return (
            f"TP {problem.tp}: the table of ranks is shared out over the threads of a block, so it is 1, 2, 4, 8 or 16"
        )
    if problem.hidden % (TILE * problem.tp):
        return f"hidden {problem.hidden} is not a multiple of {TILE * problem.tp}, 64 columns a cluster on every rank"
    if problem.hidden % UNIT or problem.hidden > WARPS * UNIT:
        return f"hidden {problem.hidden}: a row is at most {WARPS} warps of {UNIT} columns"
    if problem.latent % 128 or problem.latent % (4 * problem.tp):
        return f"latent {problem.latent} is not a multiple of 128 and of four columns a rank"
    if not 0 <= problem.blocks <= 8:
        return f"{problem.blocks} saved blocks: the kernel mixes at most 8"
    if problem.rows > MOST_ROWS:
        return f"{problem.rows} rows: the decode path serves at most {MOST_ROWS}"
    return None


def must_be_peer(config: Config) -> None:
    """Refuse other ways to publish than one store a rank; not in the space, the transport says which kernels it serves.

    Raises:
        InputError: the config asks for another one.
    """
    how = str(config.get("stores", "peer"))
    if how != "peer":
        raise InputError(f"stores {how!r}: a reduce-scatter sends each owner its own columns, so there is peer alone")


def buffers(shape: Cut) -> tuple[Buffer, ...]:
    """What launches leave to each other; every block keeps a launch counter."""
    return (
        *(buffer for name in shape.tables for buffer in shape.box(name).buffers(name)),
        epochs_buffer("epochs", shape.blocks),
        health.BUFFER,
    )


def tensor_args(shape: Cut) -> dict[str, Arg]:
    """Kernel arguments by name; with one shot there are no sums to send."""
    names = (
        "latent_partial", "shared_partial", "latent_norm", "w_up", "prefix", "blocks", "res_norm", "res_proj", "norm_w",
        "prefix_out", "next_input", "latents", "latents_targets", "shares", "shares_targets", "totals", "totals_targets",
        "deltas", "deltas_targets", "epochs", "health",
    )  # fmt: skip
    args = {name: Arg("tensor", name) for name in names}
    args["w_up"] = Arg("tensor_map", "w_up", box=(TILE, RUN))
    if not shape.two_shot:
        args["totals"] = args["totals_targets"] = Arg("null")
    return args


def fake_tensors(shape: Cut) -> dict[str, Any]:
    """What the compiler is told of each argument. Imports the compiler."""
    from cutlass import BFloat16, Int32, Int64
    from cutlass.cute.runtime import make_fake_tensor

    rows, hidden, latent = shape.rows, shape.hidden, shape.latent
    shapes: Mapping[str, tuple[int, ...]] = {
        "latent_partial": (rows, latent), "shared_partial": (rows, hidden), "latent_norm": (latent,),
        "w_up": (shape.shard, latent), "prefix": (rows, hidden), "blocks": (max(shape.saved, 1), rows, hidden),
        "res_norm": (hidden,), "res_proj": (1, hidden), "norm_w": (hidden,), "prefix_out": (rows, hidden),
        "next_input": (rows, hidden),
    }  # fmt: skip
    sizes: dict[str, Any] = {name: (BFloat16, extents) for name, extents in shapes.items()}
    sizes |= {"totals": (Int32, (1, 4)), "totals_targets": (Int64, (1, 2))}
    for buffer in buffers(shape):
        sizes[buffer.name] = (Int64 if buffer.dtype == "int64" else Int32, buffer.shape)
    made = {}
    for name, (dtype, extents) in sizes.items():
        strides = [1]
        for extent in reversed(extents[1:]):
            strides.insert(0, strides[0] * extent)
        made[name] = make_fake_tensor(dtype, extents, stride=tuple(strides), assumed_align=16)
    return made


def eps_constant(eps: float) -> float:
    """``eps`` as FP32 has it: what the kernel adds."""
    return float(struct.unpack("<f", struct.pack("<f", eps))[0])


def crowded(shape: Cut, at_once: int) -> bool:
    """Whether packets of a round leave some words on the stack: those of more than eight ranks beside what passes keep."""
    return shape.passes > 1 and shape.chunks_each > 1 and not shape.two_shot and at_once > 8


def shared_bytes(shape: Cut) -> int:
    """Dynamic shared memory of a block, whichever it is."""
    return ROW_SUM_BYTES + shape.memory_bytes
