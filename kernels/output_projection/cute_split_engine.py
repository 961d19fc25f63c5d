"""The cute_split engine: producer and consumer in launches of their own, for any rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_MIX
from ..params import K_ORDER
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import (
    BACKOFF,
    COLUMNS,
    GEMM_PARAMS,
    MIXER_LEAST_REGISTERS,
    PACKET,
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
    gemm_constraints,
    gemm_registers,
    projection,
    refuses_always,
    shard,
    stores,
    tensor_args,
    x_depth,
)

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"run_bytes": 64, "warps_k": 8}
"""What the order of a partial's sum depends on, pinned for batch-invariant results."""
PRODUCER = ("x", "w_o", "mailbox_targets", "epochs", "health")
CONSUMER = (
    "prefix", "blocks", "res_norm", "res_proj", "norm_w", "prefix_out", "mlp_input", "mailbox", "totals", "totals_targets", "scalars",
    "epochs", "health",
)  # fmt: skip


def consumer_blocks(rows: int, config: Config) -> int:
    """Blocks of the consumer."""
    return rows * UNITS // int(config["mixers"])


def cluster(config: Config) -> int:
    """Blocks of the consumer that are a row and a cluster; 1 where they need not be one."""
    return UNITS // int(config["mixers"]) if config["row_sums"] == "cluster" else 1


def consumer_shared(config: Config) -> int:
    """Dynamic shared memory of a consumer's block: slices of its row and their barrier, and the row's scalars, where a cluster has a row."""
    return SLICES * 448 * int(config["mixers"]) + 16 + ROW_SUM_BYTES if cluster(config) > 1 else 0


def shared(rows: int, config: Config) -> int:
    """Dynamic shared memory of a producer's block."""
    return int(config["warps_k"]) * rows * SUM_WORDS * 4


class CuteSplitEngine(Engine):
    """Two launches: the first publishes partials, the second polls them and finishes the rows."""

    name = "cute_split"
    family = "output_projection"
    compiler = "cute"
    sources = (
        *(
            HERE / f"{name}.py"
            for name in (
                "cute_split",
                "cute_mix",
                "cute_parts",
                "cute_product",
                "cute_slices",
            )
        ),
        *CUTE_MIX,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """K in whole steps of eight warps or six."""
        problem = projection(problem)
        if problem.width % 192 and problem.width % 256:
            return f"width {problem.width} is a multiple of neither 192 nor 256, the columns of six or eight warps"
        if 32 % problem.tp:
            return f"TP {problem.tp} does not divide the 32 warps of a row"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """How K is split over warps, loads in flight, units a block of the consumer, where it waits, how it polls."""
        problem = projection(problem)
        rows = problem.rows

        return Space(
            params=(
                *GEMM_PARAMS,
                Param(
                    "exchange",
                    ("one_shot", "two_shot"),
                    "whether each rank sums all columns, or their owners do and send the sums",
                ),
                Param("mixers", (1, 2, 3, 4, 6, 8, 12, 16), "warps of a block of the consumer, a 32nd of a row each"),
                Param(
                    "row_sums",
                    ("packets", "cluster"),
                    "how the warps of a row tell each other its sums: in memory, or as a cluster in shared memory",
                ),
                Param("consumer_wait", ("start", "exit"), "when the consumer waits for the producer's end"),
                PACKET,
                BACKOFF,
                Param(
                    "release",
                    ("entry", "loads", "end"),
                    "when the consumer may start: at the producer's entry, after its last weight load, at its end",
                ),
                K_ORDER,
            ),
            constraints=(
                *gemm_constraints(problem, INVARIANT),
                Constraint(
                    lambda c: gemm_registers(rows, c) <= register_limit(32 * int(c["warps_k"]), gpu),
                    "operands in flight and sums exceed a thread's registers",
                ),
                Constraint(
                    lambda c: rows <= 48 or c["depth"] == 1 or c["warps_k"] == 8,
                    f"{{warps_k}} warps with {{depth}} steps in flight and the sums of {rows} rows spill registers",
                ),
                Constraint(
                    lambda c: shared(rows, c) <= gpu.shared_per_block,
                    f"sums exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: rows * UNITS % int(c["mixers"]) == 0, f"{{mixers}} do not divide the units of {rows} rows"
                ),
                Constraint(
                    lambda c: consumer_blocks(rows, c) <= gpu.sms,
                    f"the consumer's blocks wait for each other and are more than the {gpu.sms} SMs of {gpu.name}",
                ),
                Constraint(
                    lambda c: register_limit(32 * int(c["mixers"]), gpu) >= MIXER_LEAST_REGISTERS,
                    f"so many warps leave a mixer less than {MIXER_LEAST_REGISTERS} registers",
                ),
                Constraint(
                    lambda c: c["row_sums"] == "packets" or (UNITS % int(c["mixers"]) == 0 and cluster(c) in (2, 4, 8)),
                    "{mixers} warps a block do not make a row of 32 a cluster of 2, 4 or 8 blocks",
                ),
                Constraint(
                    lambda c: c["consumer_wait"] == "start" or c["release"] != "entry",
                    "a consumer that reads before its wait needs a producer that releases after its own",
                ),
            ),
            default=self._default(problem),
        )

    @staticmethod
    def _default(problem: Problem) -> Config:
        """Eight warps where they divide K, as deep as their registers allow; the fewest units a block that fit."""
        problem = projection(problem)
        warps = 8 if problem.width % 256 == 0 else 6
        base: Config = {
            "run_bytes": 64, "warps_k": warps, "depth": 1, "exchange": "one_shot", "mixers": 16, "row_sums": "packets", "consumer_wait": "start", "packet": "bf16x7e16", "backoff": 0,
            "release": "loads", "k_order": "free",
        }  # fmt: skip
        steps = problem.width // (32 * warps)
        fits = [d for d in range(1, min(steps, 4) + 1) if gemm_registers(problem.rows, {**base, "depth": d}) <= 255]
        few = [m for m in (1, 2, 4, 8, 16) if consumer_blocks(problem.rows, {**base, "mixers": m}) <= 128]
        return {**base, "depth": max(fits, default=1), "mixers": few[0]}

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """Two launches. Not in the space: ``stores``, and ``jitter``, seed of random delays in every hand-over, for tests."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_split import launch_consumer, launch_producer

        problem = projection(problem)
        rows, hidden, tp = problem.rows, problem.hidden, problem.tp
        warps, mixers = int(config["warps_k"]), int(config["mixers"])
        depth, release = int(config["depth"]), str(config["release"])
        finishing = consumer_blocks(rows, config)
        counted = hidden // COLUMNS + finishing
        args, fakes = tensor_args(problem, config), fake_tensors(problem, config, counted)
        first = compile_cute(
            launch_producer,
            (
                *(fakes[name] for name in PRODUCER), Int32(1), rows, problem.width, hidden, tp, shard(problem, config), int(config["run_bytes"]) // 64,
                depth, x_depth(rows, depth), warps, form(config).name, stores(config), release, build_of(config),
            ),
            arch,
            grid=(hidden // COLUMNS, 1, 1),
            block=(32 * warps, 1, 1),
            shared_bytes=shared(rows, config),
            args=(*(args[name] for name in PRODUCER), Arg("int32", "rows")),
            pdl=True,
        )  # fmt: skip
        second = compile_cute(
            launch_consumer,
            (
                *(fakes[name] for name in CONSUMER), Int32(1), Int32(1), rows, hidden, tp, shard(problem, config), problem.blocks, problem.kind == "restart",
                eps_constant(problem.eps), mixers, int(config["backoff"]), form(config).name, cluster(config), str(config["consumer_wait"]), build_of(config, 1),
            ),
            arch,
            grid=(finishing, 1, 1),
            block=(32 * mixers, 1, 1),
            shared_bytes=consumer_shared(config),
            cluster=(cluster(config), 1, 1),
            args=(*(args[name] for name in CONSUMER), Arg("int32", "rows"), Arg("int32", "blocks")),
            pdl=True,
        )  # fmt: skip
        launches = (first, dataclasses.replace(second, needs_residency=True))
        return Compiled(
            self.family, self.name, problem, config, arch, launches, exchange_buffers(problem, config, counted)
        )

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads x; packets are written and read once; a launch and two hand-overs, one of them no such thing
        where a cluster makes it.
        """
        problem = projection(problem)
        hand_overs = 3 + (config["exchange"] == "two_shot") - (config["row_sums"] == "cluster")
        return exchange_work(problem, config, hand_overs=hand_overs)

    def summation_order(self, problem: Problem, config: Config) -> str:
        """As of cute_fused."""
        return exchange_order(config)
