"""The cute_fused engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_MIX
from ..params import K_ORDER, RELEASE
from ..residency import register_limit
from ..space import Config, Constraint, Space
from ..stamps import build_of
from .common import (
    BACKOFF,
    COLUMNS,
    GEMM_PARAMS,
    HIDDEN,
    MIXER_REGISTERS,
    PACKET,
    REHEARSE,
    SUM_WORDS,
    UNITS,
    eps_constant,
    exchange_buffers,
    exchange_order,
    exchange_work,
    fake_tensors,
    form,
    gemm_constraints,
    gemm_registers,
    projection,
    refuses_always,
    stores,
    tensor_args,
)

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"run_bytes": 64, "warps_k": 6}
"""What the order of a partial's sum depends on, pinned for batch-invariant results."""
MOST_ROWS = 16


def mixers(rows: int) -> int:
    """Warps of a block that finish rows: every unit of every row has its own on the GPU."""
    return -(-rows * UNITS // (HIDDEN // COLUMNS))


class CuteFusedEngine(Engine):
    """One launch: 128 blocks make and publish partials, then each finishes its part of a row."""

    name = "cute_fused"
    family = "output_projection"
    compiler = "cute"
    sources = (
        *(
            HERE / f"{name}.py"
            for name in (
                "cute_fused",
                "cute_mix",
                "cute_parts",
                "cute_product",
            )
        ),
        *CUTE_MIX,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Few rows: each part of each row has a warp of its own, beside those of the product."""
        problem = projection(problem)
        if problem.rows > MOST_ROWS:
            return f"{problem.rows} rows: a block holds the warps of at most {MOST_ROWS} beside the product's"
        if problem.width % 192:
            return f"width {problem.width} is not a multiple of 192, the columns of six warps"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """How K is split over warps, loads in flight, how waits poll, when the next kernel may start."""
        problem = projection(problem)
        rows = problem.rows

        def warps(c: Config) -> int:
            return int(c["warps_k"]) + mixers(rows)

        return Space(
            params=(
                *GEMM_PARAMS,
                PACKET,
                BACKOFF,
                REHEARSE,
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                *gemm_constraints(problem, INVARIANT),
                Constraint(
                    lambda c: gemm_registers(rows, c) <= register_limit(32 * warps(c), gpu),
                    "operands in flight and sums exceed a thread's registers",
                ),
                Constraint(
                    lambda c: register_limit(32 * warps(c), gpu) >= MIXER_REGISTERS,
                    f"so many warps leave a mixer less than {MIXER_REGISTERS} registers",
                ),
            ),
            default=self._default(problem),
        )

    @staticmethod
    def _default(problem: Problem) -> Config:
        """Six warps, so that with two mixers a block has eight: as many registers as a thread can have."""
        problem = projection(problem)
        return {
            "run_bytes": 64, "warps_k": 6, "depth": min(4 if problem.rows <= 8 else 3, problem.width // 192), "packet": "bf16x7e16", "backoff": 0, "rehearse": 0,
            "release": "loads", "k_order": "free",
        }  # fmt: skip

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. Not in the space: ``stores``, and ``jitter``, seed of random delays in every hand-over, for tests."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_fused import launch

        problem = projection(problem)
        rows, blocks, finishing = problem.rows, problem.hidden // COLUMNS, mixers(problem.rows)
        warps = int(config["warps_k"])
        args = {name: arg for name, arg in tensor_args(problem, config).items() if not name.startswith("totals")}
        fakes = fake_tensors(problem, config, blocks)
        built = compile_cute(
            launch,
            (
                *(fakes[name] for name in args), Int32(1), Int32(1), Int32(0), rows, problem.width, problem.hidden, problem.tp, problem.blocks,
                problem.kind == "restart", eps_constant(problem.eps), int(config["run_bytes"]) // 64, int(config["depth"]),
                warps, finishing, form(config).name, stores(config), int(config["backoff"]), str(config["release"]), build_of(config),
                bool(config["rehearse"]),
            ),
            arch,
            grid=(blocks, 1, 1),
            block=(32 * (warps + finishing), 1, 1),
            shared_bytes=warps * rows * SUM_WORDS * 4,
            args=(*args.values(), Arg("int32", "rows"), Arg("int32", "blocks"), Arg("int32", "early")),
            pdl=True,
        )  # fmt: skip
        built = dataclasses.replace(built, needs_residency=True)
        return Compiled(
            self.family, self.name, problem, config, arch, (built,), exchange_buffers(problem, config, blocks)
        )

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads x; packets are written and read once; three hand-overs between blocks."""
        problem = projection(problem)
        return exchange_work(problem, config, hand_overs=2)

    def summation_order(self, problem: Problem, config: Config) -> str:
        """Of the partial, of the ranks, of a row's scalars."""
        return exchange_order(config)
