"""What the CuTe DSL engines of this family share: sizes, refusals, the front's parameters and rules, buffers, one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import health
from ..contract import Arg, Buffer, Engine, Launch, Problem
from ..cute_sources import CUTE_PARTS
from ..errors import InputError
from ..params import K_ORDER, RELEASE, pinned
from ..residency import blocks_by_registers, register_limit
from ..space import Config, Constraint, Param
from .choice_layout import Choice
from .family import Router
from .layout import Board, Front

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
PARTS = (
    *(HERE / f"cute_{name}.py" for name in ("front", "choice", "route", "words")),
    *CUTE_PARTS,
)
"""Files that the kernels of all engines use."""
INVARIANT = {"split_k": 8, "chunks": 1, "warps_k": 4}
"""What the order of a logit's sum depends on, pinned for batch-invariant results."""
RESERVED_REGISTERS = 20
"""The allocator's slack, beside operands, sums and addresses."""


def router(problem: Problem) -> Router:
    """The problem as this family's own type."""
    assert isinstance(problem, Router)
    return problem


def board(problem: Router) -> Board:
    """Its mailbox."""
    return Board(problem.tp, problem.rows, problem.experts, problem.latent)


def front_of(problem: Router, config: Config) -> Front:
    """Its front."""
    names = ("tile", "split_k", "chunks", "depth", "warps_n", "warps_k")
    return Front(board(problem), problem.hidden, *(int(config[name]) for name in names))


def choice_of(problem: Router, config: Config) -> Choice:
    """Its choice: in a step by ``choosers`` clusters of the front's size."""
    if problem.kind == "choice":
        return Choice(board(problem), problem.top_k, int(config["blocks"]), int(config["warps"]))
    front = front_of(problem, config)
    return Choice(front.board, problem.top_k, front.split * int(config.get("choosers", 1)), front.threads // 32)


def registers(front: Front) -> int:
    """A thread's: operands in flight, sums, addresses, the words it sends, and the rest."""
    loads, sums = front.n_tiles + front.m_tiles * front.halves, front.n_tiles * front.m_tiles
    depth = min(front.depth, front.steps)
    # where all is in flight at once, sums begin as the first operands end
    spared = min(sums, loads) if depth == front.steps else 0
    return 4 * (depth * loads + sums - spared) + 2 * loads + 3 * front.turns + RESERVED_REGISTERS


def choice_registers(choice: Choice, *, polls: bool) -> int:
    """A thread's: order and score of each expert, and the rest; where it polls, packets, addresses and biases meanwhile."""
    return 8 * choice.pairs_a_lane + 44 if polls else 6 * choice.pairs_a_lane + 28


def clusters_that_fit(front: Front, choice: Choice, gpu: GpuCard) -> int:
    """Of a step, by the card: layers of blocks an SM holds, and whole clusters of each GPC."""
    shared = max(front.shared_bytes, choice.shared_bytes)
    held = max(registers(front), choice_registers(choice, polls=True))
    layers = min(
        blocks_by_registers(held, front.threads, gpu),
        gpu.max_threads_per_sm // front.threads,
        gpu.shared_per_sm // (shared + 1024),
    )
    return layers * sum(sms // front.split for sms in gpu.gpc_sms)


def choice_faults(choice: Choice) -> str | None:
    """What a choice cannot do, or None."""
    if choice.rows_a_block > choice.warps:
        return "more rows a block than warps that choose"
    if choice.warps_a_row > 1 and choice.rows_a_block > 15:
        return "more rows of several warps than a block has barriers for"
    if choice.filled < choice.top_k or choice.groups > 32:
        return "too few groups of experts to find the best among"
    return None


def refuses_always(engine: Engine, problem: Router, arch: str) -> str | None:
    """What no engine of this family serves: its K tiles, pairs of outputs, and how the choice groups experts."""
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    if problem.hidden % 1792:
        return (
            f"hidden {problem.hidden} is not a multiple of 1792, the columns that 8 blocks of 7 warps take in one step"
        )
    if problem.experts % 2 or problem.latent % 4:
        return f"{problem.experts} experts and {problem.latent} latents a rank do not go in pairs and fours"
    if problem.all_experts > 1024 or problem.all_experts < 2 * 32:
        return (
            f"{problem.all_experts} experts: the warps of a row hold 1024 at most, and a warp looks among 64 at least"
        )
    if problem.top_k & (problem.top_k - 1) or problem.top_k > 16:
        return f"top-{problem.top_k}: the chosen scores are added in halves, at most 16"
    if problem.tp > 16:
        return f"TP {problem.tp}: a late rank is named in the lower half of a word"
    return None


FRONT_PARAMS = (
    Param("tile", (2, 4, 8, 16, 24, 32, 40, 48, 56, 80, 96), "weight rows a cluster"),
    Param("split_k", (1, 2, 4, 8, 16), "blocks of a cluster, which share the K of its rows"),
    Param("chunks", (1, 2, 4, 8), "runs of 64 bytes a warp loads from each row at once"),
    Param("depth", (1, 2, 3, 4, 7, 8), "steps of weights in flight a warp"),
    Param("warps_n", (1, 2, 3), "warps that share the rows of a tile"),
    Param("warps_k", (2, 4, 7, 8, 14, 16, 28), "warps that share the K of a block"),
    RELEASE,
    K_ORDER,
)


def front_rules(problem: Router, gpu: GpuCard) -> tuple[Constraint, ...]:
    """What holds wherever a shard is made."""
    hidden, rows, outputs = problem.hidden, problem.rows, problem.experts + problem.latent

    def front(c: Config) -> Front:
        return front_of(problem, c)

    return (
        pinned(INVARIANT),
        Constraint(
            lambda c: int(c["chunks"]) == 1 or front(c).chunks * front(c).tokens <= 16,
            f"{{chunks}} chunks of {rows} token rows exceed the 16 rows of an MMA",
        ),
        Constraint(
            lambda c: hidden % (32 * int(c["chunks"]) * int(c["split_k"]) * int(c["warps_k"])) == 0,
            f"{{split_k}} blocks of {{warps_k}} warps of {{chunks}} x 32 columns do not divide hidden {hidden}",
        ),
        Constraint(lambda c: int(c["depth"]) <= front(c).steps, "more steps in flight than a warp has"),
        Constraint(lambda c: int(c["tile"]) * int(c["chunks"]) >= 8, "the tile is less than one load of a warp"),
        Constraint(
            lambda c: (int(c["warps_n"]) - 1) * front(c).n_tiles * front(c).per_tile < int(c["tile"]),
            "{warps_n} warps for {tile} rows leave one without work",
        ),
        Constraint(lambda c: problem.tp <= front(c).threads <= 1024, "fewer threads than ranks, or more than 1024"),
        Constraint(
            lambda c: registers(front(c)) <= register_limit(front(c).threads, gpu),
            "operands in flight and sums exceed a thread's registers",
        ),
        Constraint(
            lambda c: front(c).shared_bytes <= gpu.shared_per_block,
            f"sums exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
        ),
        Constraint(
            lambda c: front(c).blocks * 2 >= min(gpu.sms, outputs // 8),
            f"too few blocks: more than half of the {gpu.sms} SMs of {gpu.name} idle",
        ),
    )


def first_legal(problem: Router, rules: Sequence[Constraint], more: Sequence[Config]) -> Config:
    """The default: the first wish that no rule forbids, with the first of ``more`` parameters that none forbids.

    Raises:
        InputError: every one is forbidden.
    """
    base = {"release": "loads", "k_order": "free"}
    found = [{**base, **wish, **one} for wish in wishes(problem) for one in more]
    legal = next((wish for wish in found if all(rule.holds(wish) for rule in rules)), None)
    if legal is None:
        raise InputError(f"router {problem.label}: none of the configs that were thought of fits this GPU")
    return legal


def wishes(problem: Router) -> Iterator[Config]:
    """The best guess first: all weights in flight at once, few bytes of x a block, about one block an SM."""
    rows = problem.rows
    if rows <= 2:
        for tile, warps, depth in ((2, 14, 2), (4, 14, 2), (4, 7, 4), (8, 14, 2), (8, 7, 2)):
            if (problem.experts + problem.latent) // tile <= 300:
                yield {"tile": tile, "split_k": 1, "chunks": 8, "depth": depth, "warps_n": 1, "warps_k": warps}
    chunks = 2 if rows <= 8 else 1
    if 5 <= rows <= 8:
        for tile in (16, 24, 32, 40):
            yield {"tile": tile, "split_k": 8, "chunks": 2, "depth": 1, "warps_n": 1, "warps_k": 14}
    for split, tiles in ((8, (16, 24, 32, 40, 48, 56, 80, 96)), (4, (16, 24, 32, 40, 48, 56))):
        for tile in tiles:
            for warps_n, warps_k in ((1, 7), (2, 4), (2, 7), (3, 4), (1, 14)):
                for depth in (4, 2, 1):
                    yield {
                        "tile": tile, "split_k": split, "chunks": chunks, "depth": depth, "warps_n": warps_n, "warps_k": warps_k,
                    }  # fmt: skip


def shard_buffers(problem: Router, blocks: int) -> tuple[Buffer, ...]:
    """What launches that publish leave to each other; ``blocks`` keep launch counters."""
    from ..output_projection.mailbox import epochs_buffer

    return (*board(problem).mail.buffers("mailbox"), epochs_buffer("epochs", blocks), health.BUFFER)


def choice_buffers(problem: Router) -> tuple[Buffer, ...]:
    """``nans``: how many scores of a row are NaN."""
    return (Buffer("nans", (problem.rows,), "int32"),)


def fake_tensors(problem: Router, buffers: tuple[Buffer, ...]) -> dict[str, Any]:
    """What the compiler is told of each argument. Imports the compiler."""
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    from .family import FAMILY

    kinds = {"bfloat16": cutlass.BFloat16, "float32": cutlass.Float32, "int32": cutlass.Int32, "int64": cutlass.Int64}
    sizes = {name: (draw.dtype, draw.shape) for name, draw in FAMILY.draws(problem).items()}
    sizes |= {name: (dtype, shape) for name, (shape, dtype) in FAMILY.output_specs(problem).items()}
    sizes |= {buffer.name: (buffer.dtype, buffer.shape) for buffer in buffers}
    sizes["peers"] = ("int32", (problem.tp, problem.rows, board(problem).words))
    made = {}
    for name, (dtype, shape) in sizes.items():
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        made[name] = make_fake_tensor(kinds[dtype], shape, stride=tuple(strides), assumed_align=16)
    return made


def built(
    host: Callable[..., Any], names: Sequence[str], more: tuple[Any, ...], problem: Router, buffers: tuple[Buffer, ...], arch: str,
    *, blocks: int, threads: int, cluster: int, shared_bytes: int,
) -> Launch:  # fmt: skip
    """One kernel of the tensors ``names``, of the row count and of constants."""
    from cutlass import Int32

    from ..cute_compile import compile_cute

    fakes = fake_tensors(problem, buffers)
    return compile_cute(
        host, (*(fakes[name] for name in names), Int32(1), *more), arch, grid=(blocks, 1, 1), block=(threads, 1, 1),
        shared_bytes=shared_bytes, args=(*(Arg("tensor", name) for name in names), Arg("int32", "rows")),
        cluster=(cluster, 1, 1), pdl=True,
    )  # fmt: skip


def sum_order(front: Front) -> str:
    """Of a logit or latent, in words."""
    parts = "every 32nd, then by butterfly" if front.by_warps else "ascending"
    return (
        f"MMAs over every {front.warps_k}th block of {front.chunks} x 32 columns ascending, a sum a warp and chunk; those "
        f"{front.warps_k * front.chunks} {parts}, then {front.split} K ranges ascending"
    )
