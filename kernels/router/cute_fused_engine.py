"""The cute_fused engine: shard, exchange and choice in one launch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..contract import Compiled, Engine, Problem, Work
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import (
    FRONT_PARAMS,
    HERE,
    PARTS,
    board,
    built,
    choice_buffers,
    choice_faults,
    choice_of,
    choice_registers,
    clusters_that_fit,
    first_legal,
    front_of,
    front_rules,
    refuses_always,
    router,
    shard_buffers,
    sum_order,
)

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

STEP = (
    "x", "w_router", "w_down", "peers", "bias", "logits", "latent", "ids", "weights", "nans", "mailbox",
    "mailbox_targets", "epochs", "health",
)  # fmt: skip


CHOOSERS = Param(
    "choosers",
    (1, 2, 4),
    "clusters that choose, and as many that bring the latents together, beside those of the front",
)


class CuteFusedEngine(Engine):
    """The clusters of the front, more of them that choose from all ranks' packets, and as many that bring the latents together."""

    name = "cute_fused"
    family = "router"
    compiler = "cute"
    sources = (HERE / "cute_fused.py", *PARTS)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """The halves alone are another engine's."""
        problem = router(problem)
        if problem.kind in ("front", "choice"):
            return f"kind {problem.kind}: this engine has the whole step; cute_mma has its halves"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """As of the front; the choice is made by clusters of the same size, and all blocks must be there at once."""
        problem = router(problem)
        can_choose, *others = (
            Constraint(
                lambda c: choice_faults(choice_of(problem, c)) is None,
                f"{{split_k}} blocks of {{warps_n}} x {{warps_k}} warps cannot share the choice of {problem.rows} rows",
            ),
            Constraint(
                lambda c: (
                    choice_registers(choice_of(problem, c), polls=True)
                    <= register_limit(front_of(problem, c).threads, gpu)
                ),
                "the experts a thread holds exceed its registers",
            ),
            Constraint(
                lambda c: choice_of(problem, c).shared_bytes <= gpu.shared_per_block,
                "the candidates of a block's rows exceed its shared memory",
            ),
            Constraint(
                lambda c: (
                    front_of(problem, c).tiles + 2 * int(c["choosers"])
                    <= clusters_that_fit(front_of(problem, c), choice_of(problem, c), gpu)
                ),
                f"all blocks wait for each other, and {gpu.name} does not hold their clusters of {{split_k}} at once",
            ),
        )
        with_rows = Constraint(
            lambda c: c["choosers"] == 1 or int(c["split_k"]) * (int(c["choosers"]) - 1) < problem.rows,
            f"{{choosers}} clusters of {{split_k}} blocks: some without one of {problem.rows} rows",
        )
        rules = (with_rows, can_choose, *front_rules(problem, gpu), *others)
        more = [{"choosers": count} for count in reversed(CHOOSERS.values)]
        return Space((*FRONT_PARAMS, CHOOSERS), rules, first_legal(problem, rules, more))

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. Not in the space: ``backoff``, nanoseconds between two rounds of polls, of which none was the best in the first
        measured configs; ``jitter``, seed of random delays in every hand-over, for tests.
        """
        from .cute_fused import launch

        problem = router(problem)
        front, choice = front_of(problem, config), choice_of(problem, config)
        blocks = front.blocks + 2 * choice.blocks
        buffers = (*choice_buffers(problem), *shard_buffers(problem, blocks))
        more = (
            front, choice, problem.scaling, int(config.get("backoff", 0)), str(config["release"]), build_of(config),
        )  # fmt: skip
        made = built(
            launch, STEP, more, problem, buffers, arch, blocks=blocks, threads=front.threads, cluster=front.split,
            shared_bytes=max(front.shared_bytes, choice.shared_bytes),
        )  # fmt: skip
        made = dataclasses.replace(made, needs_residency=True)
        return Compiled(self.family, self.name, problem, config, arch, (made,), buffers)

    def releases_behind(self, config: Config) -> bool:
        """Other than at entry all blocks release behind their wait."""
        return str(config["release"]) != "entry"

    def work(self, problem: Problem, config: Config) -> Work:
        """Every cluster reads x; packets are written and read once; cluster and ranks hand over one after the other."""
        problem = router(problem)
        front = front_of(problem, config)
        return Work(
            l2_bytes=front.tiles * problem.rows * problem.hidden * 2 + 2 * board(problem).mail.received_bytes,
            in_flight_bytes=front.depth * front.n_tiles * 512 * front.threads // 32,
            tile_turns=float(front.steps),
            dependent_steps=(1 if front.split > 1 else 0) + 1,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """Of the shard, and of the weights."""
        order = sum_order(front_of(router(problem), config))
        return f"{order}; the chosen scores in halves: first eight to last eight, and so on"
