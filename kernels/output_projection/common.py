"""What the engines of this family share: arguments, buffers, first refusals, sizes of the producer's and mixer's parts."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from .. import health
from ..contract import Arg, Buffer, Engine, Problem, Work
from ..errors import InputError
from ..params import pinned
from ..space import Config, Constraint, Param
from .family import OutputProjection
from .mailbox import PACKETS, Layout, Packet, RowExchange, epochs_buffer, one_shot, packet, two_shot

COLUMNS = 56
"""Columns of w_o that one block of the producer makes: eight packets of seven."""
UNITS = 32
"""Warps that share a row's AttnRes and norm; each has 32 packets of seven columns."""
HIDDEN = COLUMNS * 4 * UNITS
"""The hidden size these kernels are written for."""
SCALAR_PACKETS = 8
"""Kinds of packets in the exchange of scalars: up to six for the saved blocks' sums, one for their mix, one for the
prefix."""
ROW_SUM_BYTES = 16 * UNITS * SCALAR_PACKETS + 16
"""Shared memory of a cluster's block: a row's scalars and two barriers."""
SLICES = 12
"""Of a row, in shared memory: three weights, the old residual, the saved blocks."""
SUM_WORDS = 66
"""FP32 words a row of one warp's sums takes in shared memory."""
RESERVED_REGISTERS = 30
"""Addresses, targets and the allocator's slack, beside operands and sums."""
MIXER_REGISTERS = 150
"""What a mixer takes with 16 slots and 8 saved blocks."""
MIXER_LEAST_REGISTERS = 128
"""What it can do with, without a spill."""

GEMM_PARAMS = (
    Param("run_bytes", (64, 128), "bytes of a weight row that a warp loads at once"),
    Param("warps_k", (4, 6, 8, 12, 16), "warps that share the K of a block"),
    Param("depth", (1, 2, 3, 4, 5, 6), "steps of weights in flight a warp"),
)
"""Of the part that makes the partials."""
REHEARSE = Param("rehearse", (0, 1), "the finish of a row run once for nothing while it waits, which fetches its code")
BACKOFF = Param(
    "backoff", (0, 20, 100), "nanoseconds ahead of the first poll of a row's sums, and between two rounds of polls"
)
PACKET = Param(
    "packet", tuple(PACKETS), "one access: seven BF16 values and 16 bits of the epoch, or two values and 32 bits of it"
)


def projection(problem: Problem) -> OutputProjection:
    """The problem as this family's own type."""
    assert isinstance(problem, OutputProjection)
    return problem


def refuses_always(engine: Engine, problem: OutputProjection, arch: str) -> str | None:
    """What no engine of this family serves."""
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    if problem.hidden != HIDDEN:
        return f"hidden {problem.hidden}: the kernels cut rows of {HIDDEN} columns into 1024 packets of seven"
    if problem.width % 32:
        return f"width {problem.width} is not a multiple of 32, the columns that a warp takes in one step"
    if not 0 <= problem.blocks <= 8:
        return f"{problem.blocks} saved blocks: the kernels mix at most 8"
    if problem.tp > 16:
        return f"TP {problem.tp}: a lane polls the slots of at most 16 ranks at once"
    return None


def form(config: Config) -> Packet:
    """The packets that ranks exchange."""
    return packet(str(config.get("packet", "bf16x7e16")))


def mail(problem: OutputProjection, config: Config) -> tuple[Layout, ...]:
    """Mailboxes: of partials, and of an owner's sums where the exchange is ``two_shot``."""
    if config.get("exchange") == "two_shot":
        return two_shot(problem.tp, problem.rows, problem.hidden, form(config))
    return (one_shot(problem.tp, problem.rows, problem.hidden, form(config)),)


def shard(problem: OutputProjection, config: Config) -> int:
    """How many lanes' seven columns of a row a rank owns; 0 where each rank sums all columns."""
    return HIDDEN // 7 // problem.tp if config.get("exchange") == "two_shot" else 0


def stores(config: Config) -> str:
    """How the producer publishes: ``peer`` stores, or ``multicast``, one that the switch copies to every rank.

    Not in the space: the transport says which kernels it serves.

    Raises:
        InputError: the config's packets cannot be sent so.
    """
    how = str(config.get("stores", "peer"))
    if how not in ("peer", "multicast"):
        raise InputError(f"no stores {how!r}; there are peer and multicast")
    if how == "multicast" and form(config).bytes > 8:
        raise InputError(
            f"multicast stores of packets {form(config).name}: multimem.st has no 16 bytes that are one access; "
            "packet b32e32 has 8"
        )
    if how == "multicast" and config.get("exchange") == "two_shot":
        raise InputError("multicast stores reach every rank; two_shot sends each owner its own columns")
    return how


def scalars(problem: OutputProjection) -> RowExchange:
    """The exchange of a row's scalars."""
    return RowExchange(problem.rows, UNITS, SCALAR_PACKETS)


def exchange_buffers(problem: OutputProjection, config: Config, blocks: int) -> tuple[Buffer, ...]:
    """What launches leave to each other; ``blocks`` keep launch counters."""
    boxes = zip(("mailbox", "totals"), mail(problem, config), strict=False)
    return (
        *(buffer for name, layout in boxes for buffer in layout.buffers(name)),
        scalars(problem).buffer("scalars"),
        epochs_buffer("epochs", blocks),
        health.BUFFER,
    )


def tensor_args(problem: OutputProjection, config: Config) -> dict[str, Arg]:
    """Kernel arguments by name; a layer that restarts the residual has no old one, one shot has no sums to send."""
    names = (
        "x", "w_o", "prefix", "blocks", "res_norm", "res_proj", "norm_w", "prefix_out", "mlp_input", "mailbox",
        "mailbox_targets", "totals", "totals_targets", "scalars", "epochs", "health",
    )  # fmt: skip
    args = {name: Arg("tensor", name) for name in names}
    if problem.kind == "restart":
        args["prefix"] = Arg("null")
    if config.get("exchange") != "two_shot":
        args["totals"] = args["totals_targets"] = Arg("null")
    return args


def fake_tensors(problem: OutputProjection, config: Config, blocks: int) -> dict[str, Any]:
    """What the compiler is told of each argument. Imports the compiler."""
    from cutlass import BFloat16, Int32, Int64
    from cutlass.cute.runtime import make_fake_tensor

    rows, hidden, width = problem.rows, problem.hidden, problem.width
    shapes: Mapping[str, tuple[int, ...]] = {
        "x": (rows, width), "w_o": (hidden, width), "prefix": (rows, hidden), "blocks": (max(problem.blocks, 1), rows, hidden),
        "res_norm": (hidden,), "res_proj": (1, hidden), "norm_w": (hidden,), "prefix_out": (rows, hidden),
        "mlp_input": (rows, hidden),
    }  # fmt: skip
    sizes: dict[str, Any] = {name: (BFloat16, shape) for name, shape in shapes.items()}
    sizes |= {"totals": (Int32, (1, 4)), "totals_targets": (Int64, (1, 2))}
    for buffer in exchange_buffers(problem, config, blocks):
        sizes[buffer.name] = (Int64 if buffer.dtype == "int64" else Int32, buffer.shape)
    made = {}
    for name, (dtype, shape) in sizes.items():
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        made[name] = make_fake_tensor(dtype, shape, stride=tuple(strides), assumed_align=16)
    return made


def eps_constant(eps: float) -> float:
    """``eps`` as FP32 has it: what the kernel adds."""
    return float(struct.unpack("<f", struct.pack("<f", eps))[0])


def run_bytes(config: Config) -> int:
    """Bytes of a weight row that a warp takes at once."""
    return int(config.get("run_bytes", 64))


def gemm_tiles(rows: int, config: Config) -> tuple[int, int, int]:
    """(n8 tiles of w, m16 tiles of x, rows of 8 an x tile has) of one warp of the producer."""
    chunks = run_bytes(config) // 64
    return COLUMNS * chunks // 8, -(-rows // 16), chunks if rows <= 8 else 2


def gemm_registers(rows: int, config: Config) -> int:
    """Registers of a producer's thread: operands in flight, sums, and the rest."""
    n_tiles, m_tiles, halves = gemm_tiles(rows, config)
    depth = int(config["depth"])
    operands = depth * n_tiles + x_depth(rows, depth) * m_tiles * halves
    # addresses of x beyond those of one tile
    return 4 * (operands + n_tiles * m_tiles) + 2 * (m_tiles - 1) * halves + RESERVED_REGISTERS


def x_depth(rows: int, depth: int) -> int:
    """Steps of x in flight beside ``depth`` of weights: more rows are more registers, and x is near."""
    return depth if rows <= 16 else 1


def gemm_columns(config: Config) -> int:
    """Columns of K that a block takes in one step."""
    return run_bytes(config) // 2 * int(config["warps_k"])


def gemm_constraints(problem: OutputProjection, invariant: Config) -> tuple[Constraint, ...]:
    """What holds wherever partials are made; ``invariant``: what ``k_order`` pins."""
    rows, width = problem.rows, problem.width
    return (
        pinned(invariant),
        Constraint(
            lambda c: c["run_bytes"] == 64 or rows <= 8, f"two runs of {rows} token rows exceed the 16 rows of an MMA"
        ),
        Constraint(
            lambda c: width % gemm_columns(c) == 0,
            f"{{warps_k}} warps of {{run_bytes}} bytes do not divide width {width}",
        ),
        Constraint(lambda c: int(c["depth"]) <= width // gemm_columns(c), "more steps in flight than a warp has"),
    )


def exchange_work(problem: OutputProjection, config: Config, *, hand_overs: int) -> Work:
    """Every block reads x; packets are written and read once; blocks wait for blocks ``hand_overs`` times in a row.

    Of what a rank receives its own slot's share does not cross the link.
    """
    boxes, others = mail(problem, config), problem.tp - 1
    n_tiles, _, _ = gemm_tiles(problem.rows, config)
    return Work(
        l2_bytes=problem.hidden // COLUMNS * problem.rows * problem.width * 2
        + sum(2 * box.received_bytes for box in boxes),
        in_flight_bytes=int(config["depth"]) * n_tiles * 512 * int(config["warps_k"]),
        tile_turns=problem.width / gemm_columns(config),
        dependent_steps=hand_overs,
        link_bytes=sum(box.received_bytes // problem.tp * others for box in boxes),
        link_hops=len(boxes) if others else 0,
    )


def exchange_order(config: Config) -> str:
    """The order of a partial's sum, of the ranks' and of a row's scalars, in words."""
    chunks, warps = run_bytes(config) // 64, config["warps_k"]
    return (
        f"partial: MMAs over every {warps}th block of {chunks} x 32 columns ascending, a sum a chunk, chunks, then {warps} "
        "warps ascending; ranks ascending, whoever adds them; a row's scalars: 7 columns ascending, 32 lanes, then 32 "
        "units by butterfly"
    )
