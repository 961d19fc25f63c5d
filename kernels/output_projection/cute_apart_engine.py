"""The cute_apart engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_MIX, CUTE_TILES
from ..params import K_ORDER, RELEASE, pinned
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import (
    BACKOFF,
    COLUMNS,
    HIDDEN,
    PACKET,
    REHEARSE,
    ROW_SUM_BYTES,
    SLICES,
    SUM_WORDS,
    UNITS,
    eps_constant,
    exchange_buffers,
    exchange_order,
    exchange_work,
    fake_tensors,
    form,
    gemm_columns,
    projection,
    refuses_always,
    stores,
    tensor_args,
)
from .family import OutputProjection

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"warps_k": 6}
"""What the order of a partial's sum depends on, pinned for batch-invariant results."""
MOST_ROWS = 16
STEP = 32
"""Columns of K in a tile, 64 bytes."""
TILE_BYTES = COLUMNS * STEP * 2
A_SM = 2
"""Blocks that an SM has room for: those of a row beside the product's."""


def row_blocks(rows: int, config: Config) -> int:
    """Blocks that finish rows."""
    return rows * int(config["row_blocks"])


def shared(rows: int, config: Config) -> int:
    """Dynamic shared memory of a block: tiles with a barrier each, their sums, and a row's scalars."""
    warps, depth = int(config["warps_k"]), int(config["depth"])
    brought = max(warps * depth * TILE_BYTES, SLICES * (HIDDEN // int(config["row_blocks"])) * 2)
    return brought + -(-warps * depth * 8 // 16) * 16 + warps * rows * SUM_WORDS * 4 + ROW_SUM_BYTES


def room(gpu: GpuCard) -> int:
    """Shared memory a block may have where two share an SM; the system takes of each what a lone one may not have."""
    return gpu.shared_per_sm // A_SM - (gpu.shared_per_sm - gpu.shared_per_block)


def fit_together(rows: int, config: Config, gpu: GpuCard) -> bool:
    """Whether all clusters find room, each in one GPC, at two blocks an SM: on the careful side, layer by layer."""
    size = int(config["row_blocks"])
    return rows + HIDDEN // COLUMNS // size <= A_SM * sum(sms // size for sms in gpu.gpc_sms)


def threads(config: Config) -> int:
    """Threads of a block: the product's warps, or those of a row's share, whichever are more."""
    return 32 * max(int(config["warps_k"]), UNITS // int(config["row_blocks"]))


class CuteApartEngine(Engine):
    """One launch: 128 blocks make and publish partials, a cluster of others finishes each row."""

    name = "cute_apart"
    family = "output_projection"
    compiler = "cute"
    sources = (
        *(
            HERE / f"{name}.py"
            for name in (
                "cute_apart",
                "cute_copied",
                "cute_mix",
                "cute_parts",
                "cute_product",
                "cute_slices",
            )
        ),
        *CUTE_TILES,
        *CUTE_MIX,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Few rows: each has a cluster of its own beside the product's blocks."""
        problem = projection(problem)
        if problem.rows > MOST_ROWS:
            return f"{problem.rows} rows: at most {MOST_ROWS} have blocks of their own beside the product's"
        if problem.width % 192 and problem.width % 256:
            return f"width {problem.width} is a multiple of neither 192 nor 256, the columns of six or eight warps"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """How K is split over warps, loads in flight, blocks a row, how waits poll, when the next kernel may start."""
        problem = projection(problem)
        rows, width = problem.rows, problem.width

        return Space(
            params=(
                Param("warps_k", (4, 6, 8), "warps that share the K of a block"),
                Param("depth", (1, 2, 3, 4, 6, 8), "tiles of weights in flight a warp"),
                Param("row_blocks", (4, 8), "blocks of a cluster that finish a row together"),
                PACKET,
                BACKOFF,
                REHEARSE,
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                pinned(INVARIANT),
                Constraint(
                    lambda c: width % gemm_columns(c) == 0,
                    f"{{warps_k}} warps of {STEP} columns do not divide width {width}",
                ),
                Constraint(
                    lambda c: int(c["depth"]) <= width // gemm_columns(c), "more tiles in flight than a warp has"
                ),
                Constraint(
                    lambda c: c["rehearse"] == 0 or int(c["warps_k"]) > UNITS // int(c["row_blocks"]),
                    "no warp of a row's block has nothing to finish",
                ),
                Constraint(
                    lambda c: fit_together(rows, c, gpu),
                    f"more clusters of {{row_blocks}} than the GPCs of {gpu.name} hold at two blocks an SM",
                ),
                Constraint(
                    lambda c: shared(rows, c) <= room(gpu),
                    f"two blocks of so many tiles exceed the shared memory of an SM of {gpu.name}",
                ),
            ),
            default=self._default(problem, gpu),
        )

    @staticmethod
    def _default(problem: OutputProjection, gpu: GpuCard) -> Config:
        """Six warps where they divide K, as many tiles in flight as half of an SM's shared memory holds; eight blocks a row, of
        which each has warps to rehearse with, where they fit.
        """
        warps = 6 if problem.width % 192 == 0 else 8
        base: Config = {
            "warps_k": warps, "depth": 1, "row_blocks": 8, "packet": "bf16x7e16", "backoff": 0, "rehearse": 1, "release": "loads", "k_order": "free",
        }  # fmt: skip
        if not fit_together(problem.rows, base, gpu):
            base = {**base, "row_blocks": 4, "rehearse": 0}
        steps = problem.width // (STEP * warps)
        fits = [
            d for d in (1, 2, 3, 4)
            if d <= steps and shared(problem.rows, {**base, "depth": d}) <= room(gpu)
        ]  # fmt: skip
        return {**base, "depth": fits[-1]}

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. Not in the space: ``stores``, and ``jitter``, seed of random delays in every hand-over, for tests."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_apart import launch

        problem = projection(problem)
        rows, warps, cluster = problem.rows, int(config["warps_k"]), int(config["row_blocks"])
        blocks = row_blocks(rows, config) + problem.hidden // COLUMNS
        args = {name: arg for name, arg in tensor_args(problem, config).items() if not name.startswith("totals")}
        fakes = fake_tensors(problem, config, blocks)
        built = compile_cute(
            launch,
            (
                *(fakes[name] for name in args), Int32(1), Int32(1), Int32(0), rows, problem.width, problem.hidden, problem.tp, problem.blocks,
                problem.kind == "restart", eps_constant(problem.eps), int(config["depth"]), warps, cluster, form(config).name, stores(config), int(config["backoff"]), str(config["release"]), build_of(config),
                bool(config["rehearse"]),
            ),
            arch,
            grid=(blocks, 1, 1),
            block=(threads(config), 1, 1),
            shared_bytes=shared(rows, config),
            cluster=(cluster, 1, 1),
            args=(args.pop("x"), Arg("tensor_map", args.pop("w_o").name, box=(COLUMNS, STEP)), *args.values(), Arg("int32", "rows"), Arg("int32", "blocks"), Arg("int32", "early")),
            pdl=True,
        )  # fmt: skip
        built = dataclasses.replace(built, needs_residency=True)
        return Compiled(
            self.family, self.name, problem, config, arch, (built,), exchange_buffers(problem, config, blocks)
        )

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads x; packets are written and read once; one hand-over in memory and one in a cluster."""
        return exchange_work(projection(problem), config, hand_overs=1)

    def summation_order(self, problem: Problem, config: Config) -> str:
        """As of cute_fused."""
        return exchange_order(config)
