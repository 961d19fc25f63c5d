"""The cute_cluster engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..params import K_ORDER, RELEASE, pinned
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from .common import eps_constant, mixing, refuses_always, tensor_args
from .layout import MOST_BLOCKS, WIDTH, Row

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import AttnRes

HERE = Path(__file__).parent
INVARIANT = {"cluster": 8, "warps": 7}
"""What the order of a row's sums depends on, pinned for batch-invariant results."""
MOST_STEPS = 7
"""Of a warp: its sources stay in registers from the scores to the mix."""
CLUSTERS, WARPS = (1, 2, 4, 8, 16), (2, 4, 7, 8, 14, 16, 28, 32)
RESERVED_REGISTERS = 30
"""Sums of products and the allocator's slack, beside what is loaded and where from."""


def row_of(problem: AttnRes, config: Config) -> Row:
    """Who does what under a config."""
    return Row(problem.hidden, int(config["cluster"]), int(config["warps"]), int(config["depth"]))


def registers(one: Row) -> int:
    """Registers a thread: sources, a norm weight and addresses of all steps, weights in flight, and the rest."""
    return 14 * one.steps + 8 * one.ahead + RESERVED_REGISTERS


def shared(one: Row) -> int:
    """Dynamic shared memory of a block, as the kernel allocates it."""
    return 4 * (one.part_words + one.told_words + one.words + 12) + 16


def cut(hidden: int, *, many: bool) -> tuple[int, int] | None:
    """(blocks, warps a block) of a row, where nothing is known; None where its columns do not divide.

    Clusters of eight if they can be, so that a block's share of a row comes in one short burst; fewer warps a block where
    there are more blocks than the GPU has room for at once.
    """
    for steps in (4, MOST_STEPS):
        for cluster in (8, 4, 2, 1, 16):
            for warps in (7, 14, 8, 4, 2) if many else (14, 7, 16, 8, 4, 2):
                columns = WIDTH * cluster * warps
                few = hidden // columns <= 4 or warps <= 8  # many warps have few registers each
                if hidden % columns == 0 and hidden // columns <= steps and few:
                    return cluster, warps
    return None


class CuteClusterEngine(Engine):
    """A row a cluster: every source against every source on the tensor cores, so that one exchange has all sums."""

    name = "cute_cluster"
    family = "attn_res"
    compiler = "cute"
    sources = (HERE / "cute_cluster.py", *CUTE_PARTS)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Whole steps of 32 columns for the warps of a row, and as many sources as an MMA has rows for."""
        problem = mixing(problem)
        if problem.blocks > MOST_BLOCKS:
            return f"{problem.blocks} saved blocks: the MMA holds {MOST_BLOCKS} beside the residual and the query"
        if cut(problem.hidden, many=False) is None:
            return (
                f"hidden {problem.hidden}: no 1 to 16 blocks of 2 to 16 warps divide it into at most {MOST_STEPS} steps "
                f"of {WIDTH} columns"
            )
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Blocks and warps of a row, weights in flight, when the next kernel may start."""
        problem = mixing(problem)
        hidden = problem.hidden

        def one(c: Config) -> Row:
            return row_of(problem, c)

        def whole(c: Config) -> bool:
            return hidden % (WIDTH * int(c["cluster"]) * int(c["warps"])) == 0

        return Space(
            params=(
                Param("cluster", CLUSTERS, "blocks that share a row"),
                Param("warps", WARPS, "warps a block"),
                Param("depth", (1, 2, 4, 8), "steps of weights in flight a warp"),
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                *((pinned(INVARIANT),) if hidden % (WIDTH * INVARIANT["cluster"] * INVARIANT["warps"]) == 0 else (
                    Constraint(lambda c: c["k_order"] == "free", f"k_order invariant cuts rows of whole 1792 columns, not {hidden}"),
                )),
                Constraint(whole, f"{{cluster}} blocks of {{warps}} warps of {WIDTH} columns do not divide hidden {hidden}"),
                Constraint(lambda c: int(c["depth"]) <= one(c).steps, "more steps of weights in flight than a warp has"),
                Constraint(
                    lambda c: registers(one(c)) <= register_limit(32 * one(c).warps, gpu),
                    "a row's sources and the weights in flight exceed a thread's registers",
                ),
                Constraint(
                    lambda c: int(c["cluster"]) <= max(gpu.gpc_sms),
                    f"no GPC of {gpu.name} has SMs for a cluster of {{cluster}}",
                ),
            ),
            default=self._default(problem, gpu),
        )  # fmt: skip

    @staticmethod
    def _default(problem: AttnRes, gpu: GpuCard) -> Config:
        """See :func:`cut`; two steps of weights ahead."""
        found = cut(problem.hidden, many=problem.rows * 8 > 2 * gpu.sms)
        assert found is not None  # or refuses() says so
        cluster, warps = found
        depth = 2 if problem.hidden > WIDTH * cluster * warps else 1
        return {"cluster": cluster, "warps": warps, "depth": depth, "release": "loads", "k_order": "free"}

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from cutlass import BFloat16, Int32
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute
        from .cute_cluster import launch

        problem = mixing(problem)
        rows, hidden, one = problem.rows, problem.hidden, row_of(problem, config)
        shapes: tuple[tuple[int, ...], ...] = (
            (rows, hidden), (max(problem.blocks, 1), rows, hidden), (hidden,), (1, hidden), (hidden,), (rows, hidden),
        )  # fmt: skip
        fakes = []
        for shape in shapes:
            strides = [1]
            for extent in reversed(shape[1:]):
                strides.insert(0, strides[0] * extent)
            fakes.append(make_fake_tensor(BFloat16, shape, stride=tuple(strides), assumed_align=16))
        built = compile_cute(
            launch,
            (
                *fakes, Int32(1), Int32(1), one, rows, problem.blocks, eps_constant(problem.eps), problem.kind == "final",
                str(config["release"]),
            ),
            arch,
            grid=(rows * one.cluster, 1, 1),
            block=(one.threads, 1, 1),
            shared_bytes=shared(one),
            args=(*tensor_args(problem).values(), Arg("int32", "rows"), Arg("int32", "blocks")),
            cluster=(one.cluster, 1, 1),
            pdl=True,
        )  # fmt: skip
        return Compiled(self.family, self.name, problem, config, arch, (built,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Rows beyond the first read the weights from the L2; one exchange inside a cluster."""
        problem = mixing(problem)
        one = row_of(problem, config)
        return Work(
            l2_bytes=(problem.rows - 1) * 3 * problem.hidden * 2,
            in_flight_bytes=one.warps * (one.steps * 1024 + one.ahead * 128),
            tile_turns=one.steps,
            dependent_steps=1 if one.cluster > 1 else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        return (
            f"products of sources: MMAs over every {config['warps']}th 32 columns of a block's share ascending, even and odd halves "
            f"apart, then {config['warps']} warps, then {config['cluster']} blocks ascending; weights and the norm's square over the "
            "sources by butterfly; a column's mix by butterfly over the sources"
        )
