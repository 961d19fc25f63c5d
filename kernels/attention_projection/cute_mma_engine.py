"""The cute_mma engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Compiled, Engine, Problem, Work
from ..params import K_ORDER, RELEASE, pinned
from ..space import Config, Constraint, Param, Space
from .common import OUT, ROWS, W, X, power_of_two, projection, refuses_always

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"chunks": 1, "split_k": 1, "warps_k": 8}
"""What the order of the sum depends on, pinned for batch-invariant results."""
RESERVED_REGISTERS = 40
"""Addresses, loop state and the allocator's slack, beside operands and sums."""


def mma_tiles(rows: int, config: Config) -> tuple[int, int, int]:
    """(n8 tiles of w, m16 tiles of x, rows of 8 an x tile has) of one warp."""
    a_rows = int(config["chunks"]) * power_of_two(rows)
    n_tiles = -(-int(config["tile_n"]) * int(config["chunks"]) // (8 * int(config["warps_n"])))
    return n_tiles, -(-a_rows // 16), 1 if a_rows <= 8 else 2


def registers(rows: int, config: Config) -> int:
    """Registers a thread: operands in flight, sums, and the rest."""
    n_tiles, m_tiles, halves = mma_tiles(rows, config)
    return 4 * (int(config["depth"]) * (n_tiles + m_tiles * halves) + n_tiles * m_tiles) + RESERVED_REGISTERS


def warps(config: Config) -> int:
    """Warps a block."""
    return int(config["warps_n"]) * int(config["warps_k"])


def shared(rows: int, config: Config) -> int:
    """Dynamic shared memory of a block, as the kernel allocates it."""
    return int(config["warps_k"]) * int(config["chunks"]) * rows * int(config["tile_n"]) * 4


def tile_values(outputs: int, sms: int) -> tuple[int, ...]:
    """Rows a tile: small ones for many blocks, and those with which one to four waves of blocks just cover N."""
    waves = {-(-outputs * split // (sms * wave)) for split in (1, 2, 4) for wave in (1, 2, 3, 4)}
    return tuple(sorted({1, 2, 4, 6, 8, 12, 16, 24, 32, *(tile for tile in waves if tile <= 64)}))


class CuteMmaEngine(Engine):
    """W from memory into MMA registers without a stop, K split over warps and, if asked, a cluster."""

    name = "cute_mma"
    family = "attention_projection"
    compiler = "cute"
    sources = (HERE / "cute_mma.py", HERE.parent / "cute_streaming.py")

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16, and K in whole blocks of 32 columns for eight warps."""
        problem = projection(problem)
        if problem.hidden % 256:
            return f"hidden {problem.hidden} is not a multiple of 256, the columns that 8 warps take in one step"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile of weight rows, how K is split, loads in flight, warps."""
        problem = projection(problem)
        hidden, outputs, rows = problem.hidden, problem.outputs, problem.rows
        tokens = power_of_two(rows)

        def steps(c: Config) -> int:
            return hidden // (32 * int(c["chunks"]) * int(c["split_k"]) * int(c["warps_k"]))

        def blocks(c: Config) -> int:
            return -(-outputs // int(c["tile_n"])) * int(c["split_k"])

        def no_idle_warp(c: Config) -> bool:
            return (int(c["warps_n"]) - 1) * mma_tiles(rows, c)[0] * 8 < int(c["tile_n"]) * int(c["chunks"])

        return Space(
            params=(
                Param("tile_n", tile_values(outputs, gpu.sms), "weight rows a cluster"),
                Param("split_k", (1, 2, 4), "blocks of a cluster, which share the K of its rows"),
                Param("chunks", (1, 2, 4, 8), "runs of 64 bytes a warp loads from each row at once"),
                Param("depth", (1, 2, 3, 4, 5, 6), "steps of weights in flight a warp"),
                Param("warps_n", (1, 2), "warps that share the rows of a tile"),
                Param("warps_k", (2, 4, 7, 8, 14, 16, 28), "warps that share the K of a block"),
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                pinned(INVARIANT),
                Constraint(
                    lambda c: int(c["chunks"]) == 1 or int(c["chunks"]) * tokens <= 16,
                    f"{{chunks}} chunks of {tokens} token rows exceed the 16 rows of an MMA",
                ),
                Constraint(
                    lambda c: hidden % (32 * int(c["chunks"]) * int(c["split_k"]) * int(c["warps_k"])) == 0,
                    f"{{split_k}} blocks of {{warps_k}} warps of {{chunks}} x 32 columns do not divide hidden {hidden}",
                ),
                Constraint(lambda c: int(c["depth"]) <= steps(c), "more steps in flight than a warp has"),
                Constraint(
                    lambda c: int(c["tile_n"]) * int(c["chunks"]) >= 8, "the tile is less than one load of a warp"
                ),
                Constraint(no_idle_warp, "{warps_n} warps for {tile_n} rows leave one without work"),
                Constraint(lambda c: warps(c) <= 32, "more than 1024 threads a block"),
                Constraint(
                    lambda c: registers(rows, c) <= min(255, gpu.registers_per_sm // (32 * warps(c))),
                    "operands in flight and sums exceed a thread's registers",
                ),
                Constraint(
                    lambda c: shared(rows, c) <= gpu.shared_per_block,
                    f"partial sums exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: blocks(c) * 10 >= 9 * min(gpu.sms, -(-outputs // 8)),
                    f"too few blocks: more than a tenth of the {gpu.sms} SMs of {gpu.name} idle",
                ),
            ),
            default=self._default(problem),
        )

    @staticmethod
    def _default(problem: Problem) -> Config:
        """Legal for any shape: eight rows a block, eight warps."""
        problem = projection(problem)
        chunks = 2 if problem.rows <= 8 and problem.hidden % 512 == 0 else 1
        steps = problem.hidden // (256 * chunks)
        depth = next(d for d in (4, 2, 1) if d <= steps and (problem.rows <= 16 or d <= 2))
        return {
            "tile_n": 8, "split_k": 1, "chunks": chunks, "depth": depth, "warps_n": 1, "warps_k": 8,
            "release": "loads", "k_order": "free",
        }  # fmt: skip

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from cutlass import BFloat16, Int32
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute
        from .cute_mma import launch

        problem = projection(problem)
        rows, outputs, hidden = problem.rows, problem.outputs, problem.hidden
        tile, split = int(config["tile_n"]), int(config["split_k"])

        def matrix(height: int, width: int) -> object:
            return make_fake_tensor(BFloat16, (height, width), stride=(width, 1), assumed_align=16)

        sizes = (int(config[name]) for name in ("chunks", "depth", "warps_n", "warps_k"))
        built = compile_cute(
            launch,
            (
                matrix(rows, hidden), matrix(outputs, hidden), matrix(rows, outputs), Int32(1), rows, tile, split, *sizes,
                str(config["release"]),
            ),
            arch,
            grid=(-(-outputs // tile) * split, 1, 1),
            block=(32 * warps(config), 1, 1),
            shared_bytes=shared(rows, config),
            args=(X, W, OUT, ROWS),
            cluster=(split, 1, 1),
            pdl=True,
        )  # fmt: skip
        return Compiled(self.family, self.name, problem, config, arch, (built,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Every tile reads x again; the weights of ``depth`` steps are in flight in each warp."""
        problem = projection(problem)
        tiles = -(-problem.outputs // int(config["tile_n"]))
        n_tiles, _, _ = mma_tiles(problem.rows, config)
        columns = 32 * int(config["chunks"]) * int(config["split_k"]) * int(config["warps_k"])
        return Work(
            l2_bytes=tiles * problem.rows * problem.hidden * 2,
            in_flight_bytes=int(config["depth"]) * n_tiles * 512 * warps(config),
            tile_turns=problem.hidden / columns,
            dependent_steps=1 if int(config["split_k"]) > 1 else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        return (
            f"MMAs over every {config['warps_k']}th block of {config['chunks']} x 32 columns ascending, a sum a chunk; "
            f"sums of {config['warps_k']} warps and their chunks ascending, then of {config['split_k']} K ranges ascending"
        )
