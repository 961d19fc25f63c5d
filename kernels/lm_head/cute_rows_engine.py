"""The cute_rows engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from .. import health
from ..contract import Arg, Buffer, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..params import RELEASE
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import fake_tensors, head, refuses_always
from .cute_mma_engine import BACKOFF, MOST_RANKS
from .layout import Lookup

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import LmHead

HERE = Path(__file__).parent
TENSORS = ("tokens", "table", "peers", "x", "mailbox", "mailbox_targets", "epochs", "health")


def lookup(problem: LmHead, config: Config) -> Lookup:
    """Who does what under a config."""
    return Lookup(problem.rows, problem.hidden, problem.vocab, problem.tp, int(config["threads"]))


def buffers_of(one: Lookup) -> tuple[Buffer, ...]:
    """What launches, and the ranks, leave to each other."""
    return (*one.buffers("mailbox"), Buffer("epochs", (one.blocks,), "int32", persistent=True), health.BUFFER)


class CuteRowsEngine(Engine):
    """Each row from the rank that holds it, packets to every rank; no sum, because all other ranks' parts would be zeros."""

    name = "cute_rows"
    family = "lm_head"
    compiler = "cute"
    sources = (HERE / "cute_rows.py", HERE.parent / "cute_polls.py", *CUTE_PARTS)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """The embedding alone."""
        problem = head(problem)
        if problem.kind != "embed":
            return f"kind {problem.kind}: this engine looks rows up; cute_mma makes logits"
        if problem.hidden % 8:
            return f"hidden {problem.hidden} is not a multiple of 8, a whole 16 bytes of a row"
        if problem.tp > MOST_RANKS:
            return f"TP {problem.tp}: a late rank is named in the lower half of a word"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Threads a block, how waits poll, when the next kernel may start."""
        problem = head(problem)
        rows, packets = problem.rows, problem.hidden // 4
        return Space(
            (Param("threads", (64, 128, 256, 512, 1024), "packets a block"), RELEASE, BACKOFF),
            (
                Constraint(lambda c: c["release"] != "loads", "no load of this kernel goes before the wait: entry or end"),
                Constraint(
                    lambda c: rows * -(-packets // int(c["threads"])) <= gpu.sms * (gpu.max_threads_per_sm // int(c["threads"])),
                    f"more blocks of {{threads}} threads than {gpu.name} holds at once",
                ),
            ),
            {"threads": 256, "release": "entry", "backoff": 0},
        )  # fmt: skip

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. Not in the space: ``jitter``, seed of random delays in the exchange, for tests."""
        from cutlass import Int32

        from ..cute_compile import compile_cute
        from .cute_rows import launch

        problem = head(problem)
        one = lookup(problem, config)
        buffers = buffers_of(one)
        fakes = fake_tensors(problem, buffers)
        built = compile_cute(
            launch,
            (
                *(fakes[name] for name in TENSORS), Int32(1), Int32(1), one, str(config["release"]), int(config["backoff"]),
                build_of(config),
            ),
            arch,
            grid=(one.blocks, 1, 1),
            block=(one.threads, 1, 1),
            shared_bytes=0,
            args=(*(Arg("tensor", name) for name in TENSORS), Arg("int32", "rows"), Arg("int32", "rank")),
            pdl=True,
        )  # fmt: skip
        # blocks wait for the same blocks of other ranks
        built = dataclasses.replace(built, needs_residency=True)
        return Compiled(self.family, self.name, problem, config, arch, (built,), buffers)

    def work(self, problem: Problem, config: Config) -> Work:
        """A row's packets are written to every rank and read once."""
        problem = head(problem)
        one = lookup(problem, config)
        size = one.rows * one.packets * 16
        return Work(
            l2_bytes=2 * size, in_flight_bytes=one.threads * 8, link_bytes=size, link_hops=1 if problem.tp > 1 else 0
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """Nothing is summed."""
        return "none: a row is one rank's"
