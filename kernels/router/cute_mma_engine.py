"""The cute_mma engine: the two halves of the router's step, each in a launch of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract import Compiled, Engine, Problem, Work
from ..params import RELEASE
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from ..stamps import build_of
from .common import (
    FRONT_PARAMS,
    HERE,
    PARTS,
    built,
    choice_buffers,
    choice_faults,
    choice_of,
    choice_registers,
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
    from .family import Router

FRONT = ("x", "w_router", "w_down", "peers", "logits", "latent", "mailbox_targets", "epochs", "health")
CHOICE = ("all_logits", "bias", "ids", "weights", "nans")


class CuteMmaEngine(Engine):
    """The front: weights from memory straight into MMA registers, K split over warps and a cluster, packets to every
    rank. The choice: some rows a block, some warps a row.
    """

    name = "cute_mma"
    family = "router"
    compiler = "cute"
    sources = (HERE / "cute_mma.py", *PARTS)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """The whole step is another engine's."""
        problem = router(problem)
        if problem.kind not in ("front", "choice"):
            return f"kind {problem.kind}: this engine has the halves, front and choice; cute_fused has the whole step"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Of a front: how K is split, loads in flight, warps; of a choice: blocks and warps."""
        problem = router(problem)
        if problem.kind == "choice":
            return self._choice_space(problem, gpu)
        rules = front_rules(problem, gpu)
        return Space(FRONT_PARAMS, rules, first_legal(problem, rules, [{}]))

    @staticmethod
    def _choice_space(problem: Router, gpu: GpuCard) -> Space:
        rows = problem.rows
        blocks = next(b for b in (1, 2, 4, 8, 16) if b >= rows or b == 16 or (b == 8 and rows <= 16))
        return Space(
            params=(
                Param("blocks", (1, 2, 4, 8, 16), "blocks that share the rows"),
                Param("warps", (4, 7, 8, 14, 16, 28, 32), "warps a block, shared out over its rows"),
                RELEASE,
            ),
            constraints=(
                Constraint(lambda c: int(c["blocks"]) < 2 * rows, "blocks without a row"),
                Constraint(
                    lambda c: choice_faults(choice_of(problem, c)) is None,
                    "{blocks} blocks of {warps} warps cannot share the rows: too many rows for warps, barriers or groups",
                ),
                Constraint(
                    lambda c: (
                        choice_registers(choice_of(problem, c), polls=False)
                        <= register_limit(32 * int(c["warps"]), gpu)
                    ),
                    "the experts a thread holds exceed its registers",
                ),
                Constraint(lambda c: c["release"] != "loads", "a choice loads no weights: entry or end"),
            ),
            default={"blocks": blocks, "warps": 28 if -(-rows // blocks) > 2 else 14, "release": "entry"},
        )

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch. ``jitter``, not in the space: seed of random delays in every hand-over, for tests."""
        from .cute_mma import launch_choice, launch_front

        problem = router(problem)
        release = str(config["release"])
        if problem.kind == "choice":
            choice, buffers = choice_of(problem, config), choice_buffers(problem)
            launch = built(
                launch_choice, CHOICE, (choice, problem.scaling, release, build_of(config)), problem, buffers, arch, blocks=choice.blocks,
                threads=32 * choice.warps, cluster=1, shared_bytes=choice.shared_bytes,
            )  # fmt: skip
        else:
            front = front_of(problem, config)
            buffers = shard_buffers(problem, front.blocks)
            launch = built(
                launch_front, FRONT, (front, release, build_of(config)), problem, buffers, arch,
                blocks=front.blocks, threads=front.threads, cluster=front.split, shared_bytes=front.shared_bytes,
            )  # fmt: skip
        return Compiled(self.family, self.name, problem, config, arch, (launch,), buffers)

    def work(self, problem: Problem, config: Config) -> Work:
        """Of a front: every cluster reads x; its blocks hand over once."""
        problem = router(problem)
        if problem.kind == "choice":
            return Work()
        front = front_of(problem, config)
        return Work(
            l2_bytes=front.tiles * problem.rows * problem.hidden * 2,
            in_flight_bytes=front.depth * front.n_tiles * 512 * front.threads // 32,
            tile_turns=float(front.steps),
            dependent_steps=1 if front.split > 1 else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        problem = router(problem)
        if problem.kind == "choice":
            return "the chosen scores in halves: first eight to last eight, and so on"
        return sum_order(front_of(problem, config))
