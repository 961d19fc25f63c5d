"""The cute_mma engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..params import K_ORDER, RELEASE, pinned
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import exchange_buffers, fake_tensors, head, refuses_always
from .layout import Head, power_of_two

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import LmHead

HERE = Path(__file__).parent
INVARIANT = {"chunks": 1, "warps_k": 8}
"""What the order of a logit's sum depends on, pinned for batch-invariant results."""
RESERVED_REGISTERS = 40
"""Addresses, loop state and the allocator's slack, beside operands and sums."""
MOST_RANKS = 16
BACKOFF = Param("backoff", (0, 20), "nanoseconds between two rounds of polls for the other ranks' tokens")
SHARD = ("h", "w", "logits")
ARGMAX = ("h", "w", "peers", "ids", "best", "keys", "arrived", "mailbox", "mailbox_targets", "epochs", "health")


def layout(problem: LmHead, config: Config) -> Head:
    """Who does what under a config."""
    names = ("tile", "chunks", "depth", "warps_n", "warps_k")
    return Head(problem.rows, problem.hidden, problem.vocab, problem.tp, *(int(config[name]) for name in names))


def registers(one: Head) -> int:
    """Registers a thread: operands in flight, sums, and the rest."""
    loads = one.n_tiles + one.m_tiles * one.halves
    return 4 * (min(one.depth, one.steps) * loads + one.n_tiles * one.m_tiles) + RESERVED_REGISTERS


def shared(problem: LmHead, one: Head) -> int:
    """Dynamic shared memory of a block, as the kernels allocate it."""
    return 4 * one.sum_words + (4 * -(-one.best_words // 4) * 4 + 16 if problem.kind == "argmax" else 0)


class CuteMmaEngine(Engine):
    """The vocabulary's rows from memory into MMA registers without a stop; for a token, one maximum a block and row, and the
    last block tells the other ranks.
    """

    name = "cute_mma"
    family = "lm_head"
    compiler = "cute"
    sources = (
        *(HERE / f"cute_{name}.py" for name in ("mma", "stream", "best")),
        HERE.parent / "cute_polls.py",
        *CUTE_PARTS,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """K in whole blocks of 32 columns for eight warps; ranks that a warp's lanes and a word of the record hold."""
        problem = head(problem)
        if problem.kind == "embed":
            return "kind embed: this engine makes logits; cute_rows looks rows up"
        if problem.hidden % 256:
            return f"hidden {problem.hidden} is not a multiple of 256, the columns that 8 warps take in one step"
        if problem.kind == "argmax" and problem.tp > MOST_RANKS:
            return f"TP {problem.tp}: a late rank is named in the lower half of a word"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile of vocabulary rows, how K is shared, loads in flight, warps."""
        problem = head(problem)
        hidden, rows, tokens = problem.hidden, problem.rows, power_of_two(problem.rows)

        def one(c: Config) -> Head:
            return layout(problem, c)

        return Space(
            params=(
                Param("tile", (8, 10, 12, 14, 16, 20, 24, 26, 32, 40, 48, 64, 80), "vocabulary rows a block"),
                Param("chunks", (1, 2, 4, 8), "runs of 64 bytes a warp loads from each row at once"),
                Param("depth", (1, 2, 3, 4, 5, 6), "steps of weights in flight a warp"),
                Param("warps_n", (1, 2, 4), "warps that share the rows of a tile"),
                Param("warps_k", (2, 4, 7, 8, 14, 16), "warps that share the K of a block"),
                RELEASE,
                K_ORDER,
                *((BACKOFF,) if problem.kind == "argmax" else ()),
            ),
            constraints=(
                pinned(INVARIANT),
                Constraint(
                    lambda c: int(c["chunks"]) == 1 or int(c["chunks"]) * tokens <= 16,
                    f"{{chunks}} chunks of {tokens} token rows exceed the 16 rows of an MMA",
                ),
                Constraint(
                    lambda c: hidden % (32 * int(c["chunks"]) * int(c["warps_k"])) == 0,
                    f"{{warps_k}} warps of {{chunks}} x 32 columns do not divide hidden {hidden}",
                ),
                Constraint(lambda c: int(c["depth"]) <= one(c).steps, "more steps in flight than a warp has"),
                Constraint(
                    lambda c: (int(c["warps_n"]) - 1) * one(c).n_tiles * one(c).per_tile < int(c["tile"]),
                    "{warps_n} warps for {tile} rows leave one without work",
                ),
                Constraint(
                    lambda c: rows <= one(c).threads <= 1024, "more than 1024 threads a block, or fewer than token rows"
                ),
                Constraint(
                    lambda c: registers(one(c)) <= register_limit(one(c).threads, gpu),
                    "operands in flight and sums exceed a thread's registers",
                ),
                Constraint(
                    lambda c: shared(problem, one(c)) <= gpu.shared_per_block,
                    f"sums exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: one(c).tiles * 10 >= 9 * min(gpu.sms, -(-problem.vocab // 8)),
                    f"too few blocks: more than a tenth of the {gpu.sms} SMs of {gpu.name} idle",
                ),
            ),
            default=self._default(problem, gpu),
        )

    @staticmethod
    def _default(problem: LmHead, gpu: GpuCard) -> Config:
        """Small tiles, two chunks, several blocks an SM, as it won at the projection, and such a tile that all blocks of
        10240 rows fit on 132 SMs at once. At many token rows the tile grows, because every block reads all of h.
        """
        rows, hidden = problem.rows, problem.hidden
        wishes: list[tuple[int, int, int, int, int]] = []
        if rows <= 8:
            wishes = [(20, 2, 2, 1, 4), (12, 2, 4, 1, 4), (8, 2, 1, 1, 4)]
        elif rows <= 16:
            wishes = [(40, 1, 2, 1, 8), (16, 1, 2, 1, 8)]
        elif rows <= 32:
            wishes = [(40, 1, 2, 1, 8), (32, 1, 2, 1, 8), (16, 1, 2, 1, 8)]
        else:
            wishes = [(80, 1, 2, 2, 4), (48, 1, 2, 2, 4), (16, 1, 1, 1, 8)]
        wishes += [(8, 1, 2, 1, 8), (8, 1, 1, 1, 8)]
        for tile, chunks, depth, warps_n, warps_k in wishes:
            found = Head(rows, hidden, problem.vocab, problem.tp, tile, chunks, depth, warps_n, warps_k)
            whole = hidden % (32 * chunks * warps_k) == 0 and depth <= found.steps
            if whole and (found.tiles * 10 >= 9 * gpu.sms or tile == 8):
                break
        config: dict[str, int | str] = {
            "tile": tile, "chunks": chunks, "depth": depth, "warps_n": warps_n, "warps_k": warps_k, "release": "loads", "k_order": "free",
        }  # fmt: skip
        return {**config, "backoff": 0} if problem.kind == "argmax" else config

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. Not in the space: ``jitter``, seed of random delays in the exchange, for tests."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from . import cute_mma

        problem = head(problem)
        one, argmax = layout(problem, config), problem.kind == "argmax"
        buffers = exchange_buffers(problem) if argmax else ()
        fakes = fake_tensors(problem, buffers)
        names = ARGMAX if argmax else SHARD
        numbers = ("rows", "rank") if argmax else ("rows",)
        more = (int(config["backoff"]), build_of(config)) if argmax else ()
        built = compile_cute(
            cute_mma.launch_argmax if argmax else cute_mma.launch_shard,
            (*(fakes[name] for name in names), *(Int32(1) for _ in numbers), one, str(config["release"]), *more),
            arch,
            grid=(one.tiles, 1, 1),
            block=(one.threads, 1, 1),
            shared_bytes=shared(problem, one),
            args=(*(Arg("tensor", name) for name in names), *(Arg("int32", name) for name in numbers)),
            pdl=True,
        )
        return Compiled(self.family, self.name, problem, config, arch, (built,), buffers)

    def work(self, problem: Problem, config: Config) -> Work:
        """Every tile reads h again; the weights of ``depth`` steps are in flight in each warp."""
        problem = head(problem)
        one = layout(problem, config)
        argmax = problem.kind == "argmax"
        return Work(
            l2_bytes=one.tiles * problem.rows * problem.hidden * 2,
            in_flight_bytes=one.depth * one.n_tiles * 512 * one.warps,
            tile_turns=one.steps,
            dependent_steps=1 if argmax else 0,
            link_bytes=16 * problem.rows * (problem.tp - 1) if argmax else 0,
            link_hops=1 if argmax and problem.tp > 1 else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        return (
            f"MMAs over every {config['warps_k']}th block of {config['chunks']} x 32 columns ascending, a sum a chunk; sums of "
            f"{config['warps_k']} warps and their chunks ascending"
        )
