"""The cute_fused engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_MIX, CUTE_TILES
from ..output_projection.common import BACKOFF
from ..params import K_ORDER, RELEASE, pinned
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import (
    buffers,
    crowded,
    cut,
    eps_constant,
    fake_tensors,
    must_be_peer,
    refuses_always,
    shared_bytes,
    tail,
    tensor_args,
)
from .layout import THREADS, WARPS

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import MoeTail

HERE = Path(__file__).parent
INVARIANT = {"split_k": 8}
"""What the order of the up-projection's sum depends on, pinned for batch-invariant results."""
ONE_SHOT_ROWS = 2
"""Rows up to which every block sums all ranks' latents by itself in the default config."""


class CuteFusedEngine(Engine):
    """One launch: clusters sum the latents, multiply and publish this rank's columns; a block finishes a row."""

    name = "cute_fused"
    family = "moe_tail"
    compiler = "cute"
    sources = (
        *(HERE / f"cute_{name}.py" for name in ("fused", "next", "send", "sum", "up")),
        *CUTE_TILES,
        *CUTE_MIX,
    )

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Latents in runs of 32 for a cluster of eight."""
        problem = tail(problem)
        if problem.latent % 256:
            return f"latent {problem.latent} is not a multiple of 256, runs of 32 for each of eight blocks"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Blocks a cluster, how latents are summed, rows a finishing block takes, how waits poll, when the next kernel starts."""
        problem = tail(problem)

        def blocks(c: Config) -> int:
            return cut(problem, c).blocks

        return Space(
            params=(
                Param("split_k", (4, 8), "blocks of a cluster, which share the latents"),
                Param(
                    "exchange",
                    ("one_shot", "two_shot"),
                    "whether every cluster sums all ranks' latents, or their owners do and send the sums",
                ),
                Param("rows_each", (1, 2, 4, 8), "rows that a finishing block takes, one after the other"),
                Param("at_once", (4, 8, 16), "ranks whose packets a lane polls in one round"),
                BACKOFF,
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                pinned(INVARIANT),
                Constraint(lambda c: problem.rows > 1 or c["rows_each"] == 1, "one row has one block that finishes it"),
                Constraint(
                    lambda c: blocks(c) <= gpu.sms,
                    f"the blocks wait for each other and are more than the {gpu.sms} SMs of {gpu.name}",
                ),
                Constraint(
                    lambda c: blocks(c) // int(c["split_k"]) <= sum(sms // int(c["split_k"]) for sms in gpu.gpc_sms),
                    f"more clusters of {{split_k}} than the GPCs of {gpu.name} hold at one block an SM",
                ),
                Constraint(
                    lambda c: not crowded(cut(problem, c), int(c["at_once"])),
                    "the packets of {at_once} ranks beside several passes of two runs of latents exceed a thread's registers",
                ),
                Constraint(
                    lambda c: int(c["at_once"]) <= max(problem.tp, 4), f"{{at_once}} at once of TP {problem.tp}"
                ),
                Constraint(
                    lambda c: shared_bytes(cut(problem, c)) <= gpu.shared_per_block,
                    f"weights and sums exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
            ),
            default=self._default(problem, gpu),
        )

    @staticmethod
    def _default(problem: MoeTail, gpu: GpuCard) -> Config:
        """Clusters of eight where they fit, one shot for few rows, and as few rows a finishing block as fit."""
        base: Config = {
            "split_k": 8, "exchange": "one_shot" if problem.rows <= ONE_SHOT_ROWS else "two_shot", "rows_each": 1,
            "at_once": min(16, max(4, problem.tp)), "backoff": 0, "release": "loads", "k_order": "free",
        }  # fmt: skip

        def fits(c: Config) -> bool:
            split = int(c["split_k"])
            return cut(problem, c).blocks // split <= sum(sms // split for sms in gpu.gpc_sms)

        choices = [{**base, "split_k": split, "rows_each": each} for each in (1, 2, 4, 8) for split in (8, 4)]
        return next((c for c in choices if fits(c)), base)

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. Not in the space: ``stores``, and ``jitter``, seed of random delays in every hand-over, for tests."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_fused import launch

        problem = tail(problem)
        must_be_peer(config)
        shape = cut(problem, config)
        args, fakes = tensor_args(shape), fake_tensors(shape)
        built = compile_cute(
            launch,
            (
                *(fakes[name] for name in args), Int32(1), Int32(1), shape, eps_constant(problem.eps), int(config["at_once"]),
                int(config["backoff"]), str(config["release"]), build_of(config),
            ),
            arch,
            grid=(shape.blocks, 1, 1),
            block=(THREADS, 1, 1),
            shared_bytes=shared_bytes(shape),
            cluster=(shape.split, 1, 1),
            args=(*args.values(), Arg("int32", "rows"), Arg("int32", "blocks")),
            pdl=True,
        )  # fmt: skip
        built = dataclasses.replace(built, needs_residency=True)
        return Compiled(self.family, self.name, problem, config, arch, (built,), buffers(shape))

    def work(self, problem: Problem, config: Config) -> Work:
        """Packets are written once; every cluster reads the latents; hand-overs one after the other."""
        problem = tail(problem)
        shape = cut(problem, config)
        boxes = [shape.box(name) for name in shape.tables]
        clusters, others = shape.making // shape.split, problem.tp - 1
        read = shape.totals if shape.two_shot else shape.latents
        return Work(
            l2_bytes=sum(2 * box.received_bytes for box in boxes) + (clusters - 1) * read.received_bytes,
            in_flight_bytes=shape.chunks_each * 32 * 4 * 32 * shape.warps_k,
            tile_turns=float(shape.passes * shape.chunks_each),
            dependent_steps=2 + shape.two_shot + 2 * shape.passes,
            link_bytes=sum(box.received_bytes // problem.tp * others for box in boxes),
            link_hops=(2 + shape.two_shot) if others else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """Of the latents, the up-projection, a row's scalars."""
        shape = cut(tail(problem), config)
        return (
            f"ranks ascending, whoever adds them; up-projection of latents rounded after the norm's weight: {shape.split} runs of "
            f"{shape.span} latents, in each MMAs over every {shape.warps_k}th block of 32 ascending, then {shape.warps_k} warps, then "
            f"the runs ascending, times the row's factor; squares: 4 latents, 32 lanes by butterfly, {shape.row_warps} warps, "
            f"{shape.split} runs ascending; AttnRes' scalars: 16 columns ascending, 32 lanes, then {WARPS} warps by butterfly"
        )
