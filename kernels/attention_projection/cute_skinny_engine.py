"""The skinny CuTe DSL engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Compiled, Engine, Problem, Work
from ..params import K_ORDER, RELEASE
from ..space import Config, Constraint, Param, Space
from .common import FMA_ROWS, OUT, ROWS, W, X, projection, refuses_always
from .family import AttentionProjection

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
THREADS = (32, 64, 128, 224, 448, 896)
VECTORS = (4, 8, 16)
MAX_THREADS, MAX_REGISTERS = 2048, 65536
"""Of an SM, from sm_90a to sm_103a."""
CODE = 2048
"""Most products a thread: K is straight-line code that every launch fetches anew, 16 bytes an instruction."""
LATENCY_S = 0.6e-6
"""Of a load from device memory: an SM must have its share of the bandwidth times this under way."""


def order(hidden: int) -> tuple[int, int] | None:
    """(threads, vec) of the invariant choice: the summation order for every row count, N and GPU; None: none divides."""
    pairs = ((128, 8), (64, 8), (32, 8), (32, 4))
    return next((pair for pair in pairs if hidden % (pair[0] * pair[1]) == 0), None)


def x_ahead(config: Config, rows: int) -> int:
    """Tiles of x under way: as deep as the weights while they cost at most 32 registers."""
    return max(1, min(int(config["depth"]), 32 // (rows * int(config["vec"]) // 2)))


def registers(config: Config, rows: int) -> int:
    """A thread's registers: tiles under way, sums, row addresses, what every kernel takes, room to issue loads early."""
    a_block, vec, depth = (int(config[name]) for name in ("outputs_a_block", "vec", "depth"))
    return (
        vec // 2 * (depth * a_block + x_ahead(config, rows) * rows)
        + rows * a_block
        + 2 * rows
        + (40 if config["early_loads"] else 20)
    )


def blocks_per_sm(config: Config, rows: int) -> int:
    """Blocks that live on one SM at a time: the kernel is compiled for so many. All GPUs here have these SM sizes."""
    threads = int(config["threads"])
    return min(32, MAX_THREADS // threads, MAX_REGISTERS // (threads * registers(config, rows)))


class CuteSkinnyEngine(Engine):
    """The FMA kernel in CuTe DSL for very few rows: up to eight, meant for one to four."""

    name = "cute_skinny"
    family = "attention_projection"
    compiler = "cute"
    sources = (HERE / "cute_skinny.py",)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16, few rows, whole vectors, straight-line code of bounded length."""
        problem = projection(problem)
        if problem.rows > FMA_ROWS:
            return f"{problem.rows} rows: the kernel keeps all rows in registers, at most {FMA_ROWS}"
        pair = order(problem.hidden)
        if pair is None:
            return f"hidden {problem.hidden} is not a multiple of 128, one vector of 4 for each thread of a warp"
        if problem.hidden // pair[0] * problem.rows > CODE:
            return f"hidden {problem.hidden} at {problem.rows} rows: more than {CODE} products a thread"
        if problem.outputs * problem.hidden >= 2**31:
            return f"{problem.outputs} x {problem.hidden} weights: the kernel counts elements in 32 bits"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Shape of a block, tiles under way, where the next kernel is released, cache hints."""
        problem = projection(problem)
        return Space(
            params=(
                Param("threads", THREADS, "threads a block, which split K"),
                Param("vec", VECTORS, "adjacent elements of K a thread takes of a tile (16: two loads)"),
                K_ORDER,
                Param("outputs_a_block", (1, 2, 3, 4, 6, 8), "weight rows a block"),
                Param("depth", (1, 2, 4, 7, 14), "weight tiles under way, each threads x vec columns of every output"),
                Param("preload", (0, 1, 2, 4, 7), "of them, loaded before the dependency wait"),
                Param(
                    "early_loads",
                    (False, True),
                    "registers sized for the tiles under way, or as few as the assembler likes",
                ),
                Param("weight_cache", ("plain", "stream"), "stream: not kept in L1, first to leave the L2"),
                RELEASE,
            ),
            constraints=self._constraints(problem, gpu),
            default=self._default(problem),
        )

    @staticmethod
    def _constraints(problem: AttentionProjection, gpu: GpuCard) -> tuple[Constraint, ...]:
        hidden, outputs, rows = problem.hidden, problem.outputs, problem.rows
        pair = order(hidden)

        def tiles(c: Config) -> int:
            return hidden // (int(c["threads"]) * int(c["vec"]))

        def blocks(c: Config) -> int:
            return outputs // int(c["outputs_a_block"])

        def resident_bytes(c: Config) -> int:
            resident = min(blocks_per_sm(c, rows), -(-blocks(c) // gpu.sms))
            return resident * int(c["outputs_a_block"]) * int(c["depth"]) * int(c["threads"]) * int(c["vec"]) * 2

        # a small problem cannot fill the machine: its share of the weights, or a few short rows, is all there is; and
        # where registers or short rows leave the default less than that, what it has is enough
        share = min(gpu.read_bandwidth / gpu.sms * LATENCY_S, outputs * hidden * 2 / gpu.sms, 8 * hidden * 2)
        under_way = min(share, resident_bytes(CuteSkinnyEngine._default(problem)))

        return (
            Constraint(
                lambda c: hidden % (int(c["threads"]) * int(c["vec"])) == 0,
                f"{{threads}} threads x {{vec}} elements do not divide hidden {hidden}",
            ),
            Constraint(
                lambda c: c["k_order"] == "free" or (c["threads"], c["vec"]) == pair,
                f"the invariant order of hidden {hidden} is that of {pair and pair[0]} threads x {pair and pair[1]} elements",
            ),
            Constraint(
                lambda c: outputs % int(c["outputs_a_block"]) == 0,
                f"{{outputs_a_block}} does not divide {outputs} outputs",
            ),
            Constraint(lambda c: rows * int(c["outputs_a_block"]) <= 32, "a warp sums at most 32 results"),
            Constraint(
                lambda c: rows * int(c["outputs_a_block"]) * hidden <= CODE * int(c["threads"]),
                f"more than {CODE} products a thread: too long for code that runs once",
            ),
            Constraint(
                lambda c: c["outputs_a_block"] == 1 or -(-blocks(c) // gpu.sms) * gpu.sms <= 1.5 * blocks(c),
                f"{{outputs_a_block}} outputs a block: the busiest of {gpu.sms} SMs gets over half more blocks than the mean",
            ),
            Constraint(
                lambda c: not c["early_loads"] or (rows <= 4 and int(c["depth"]) >= 2),
                "early_loads is for several tiles under way and at most 4 rows: elsewhere the assembler spills",
            ),
            Constraint(lambda c: int(c["depth"]) <= tiles(c), "more tiles under way than there are"),
            Constraint(lambda c: int(c["preload"]) <= int(c["depth"]), "preloaded tiles are among those under way"),
            Constraint(
                lambda c: registers(c, rows) <= min(255, MAX_REGISTERS // int(c["threads"])),
                "the tiles under way and the sums do not fit the registers of a thread",
            ),
            Constraint(
                lambda c: resident_bytes(c) >= under_way,
                f"the blocks that fit one SM keep less than {under_way / 1024:.0f} KB of weights under way: latency is not covered",
            ),
        )

    @staticmethod
    def _default(problem: AttentionProjection) -> Config:
        """One output a block, the invariant order, every tile under way that fits: legal everywhere."""
        pair = order(problem.hidden)
        if pair is None:
            raise ValueError(f"hidden {problem.hidden} is refused")
        threads, vec = pair
        depth = max(d for d in (1, 2, 4, 7) if d <= problem.hidden // (threads * vec))
        return {
            "threads": threads,
            "vec": vec,
            "k_order": "invariant",
            "outputs_a_block": 1,
            "depth": depth,
            "preload": min(depth, 2),
            "early_loads": False,
            "weight_cache": "stream",
            "release": "loads",
        }

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from cutlass import BFloat16, Int32
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute
        from .cute_skinny import launch

        problem = projection(problem)
        rows, outputs, hidden = problem.rows, problem.outputs, problem.hidden
        threads, a_block = int(config["threads"]), int(config["outputs_a_block"])

        def matrix(height: int, width: int) -> object:
            return make_fake_tensor(BFloat16, (height, width), stride=(width, 1), assumed_align=16)

        constants = (
            rows,
            a_block,
            threads,
            int(config["vec"]),
            int(config["depth"]),
            int(config["preload"]),
            x_ahead(config, rows),
            str(config["release"]),
            config["weight_cache"] == "stream",
            arch != "sm_90a",  # multiplies BF16 into FP32
            blocks_per_sm(config, rows) if config["early_loads"] else 0,
        )
        warps = threads // 32
        built = compile_cute(
            launch,
            (matrix(rows, hidden), matrix(outputs, hidden), matrix(rows, outputs), Int32(1), *constants),
            arch,
            grid=(outputs // a_block, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=warps * rows * a_block * 4 if warps > 1 else 0,
            args=(X, W, OUT, ROWS),
            pdl=True,
        )
        return Compiled(self.family, self.name, problem, config, arch, (built,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads x again; ``depth`` tiles of each of its weight rows are in flight."""
        problem = projection(problem)
        a_block, threads, vec, depth = (int(config[name]) for name in ("outputs_a_block", "threads", "vec", "depth"))
        return Work(
            l2_bytes=problem.outputs // a_block * problem.rows * problem.hidden * 2,
            in_flight_bytes=depth * a_block * threads * vec * 2,
            scalar_flops=2 * problem.rows * problem.outputs * problem.hidden,
            tile_turns=problem.hidden / (threads * vec),
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        threads, vec = config["threads"], config["vec"]
        pinned = ", the same for all rows and outputs" if config["k_order"] == "invariant" else ""
        return (
            f"each of {threads} threads its vectors of {vec} ascending in one FP32 chain, lanes by butterfly 16 to 1, "
            f"warps ascending{pinned}"
        )
