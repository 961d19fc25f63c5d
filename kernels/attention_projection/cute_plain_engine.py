"""The plain CuTe DSL engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Compiled, Engine, Problem, Work
from ..space import Config, Constraint, Param, Space
from .common import FMA_ROWS, OUT, ROWS, W, X, refuses_always
from .family import AttentionProjection

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent


class CutePlainEngine(Engine):
    """The plain FMA kernel in CuTe DSL, for up to eight rows."""

    name = "cute_plain"
    family = "attention_projection"
    compiler = "cute"
    sources = (HERE / "cute_plain.py",)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16, few rows, whole vectors."""
        assert isinstance(problem, AttentionProjection)
        if problem.rows > FMA_ROWS:
            return f"{problem.rows} rows: the kernel keeps all rows in registers, at most {FMA_ROWS}"
        if problem.hidden % 128 or problem.outputs % 2:
            return f"hidden {problem.hidden} must be a multiple of 128 and outputs {problem.outputs} even"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Threads, outputs a block, vector width."""
        assert isinstance(problem, AttentionProjection)
        hidden, outputs, rows = problem.hidden, problem.outputs, problem.rows
        return Space(
            params=(
                Param("threads", (32, 64, 128, 256), "threads a block"),
                Param("outputs_a_block", (1, 2, 4, 8), "weight rows a block"),
                Param("vec", (4, 8), "elements a load"),
            ),
            constraints=(
                Constraint(
                    lambda c: hidden % (int(c["threads"]) * int(c["vec"])) == 0,
                    f"{{threads}} threads x {{vec}} elements do not divide hidden {hidden}",
                ),
                Constraint(
                    lambda c: outputs % int(c["outputs_a_block"]) == 0,
                    f"{{outputs_a_block}} does not divide {outputs} outputs",
                ),
                Constraint(
                    lambda c: rows * int(c["outputs_a_block"]) <= int(c["threads"]),
                    "one thread stores each result of a block",
                ),
                Constraint(lambda c: rows * int(c["outputs_a_block"]) <= 32, "more than 32 sums a thread spill"),
            ),
            default={"threads": 32, "outputs_a_block": 1 if rows > 4 else 2, "vec": 4},
        )

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from cutlass import BFloat16, Int32
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute
        from .cute_plain import launch

        assert isinstance(problem, AttentionProjection)
        rows, outputs, hidden = problem.rows, problem.outputs, problem.hidden
        threads, a_block, vec = (int(config[name]) for name in ("threads", "outputs_a_block", "vec"))

        def matrix(height: int, width: int) -> object:
            return make_fake_tensor(BFloat16, (height, width), stride=(width, 1), assumed_align=16)

        built = compile_cute(
            launch,
            (
                matrix(rows, hidden),
                matrix(outputs, hidden),
                matrix(rows, outputs),
                Int32(1),
                rows,
                a_block,
                threads,
                vec,
            ),
            arch,
            grid=(outputs // a_block, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=threads // 32 * rows * a_block * 4,
            args=(X, W, OUT, ROWS),
        )
        return Compiled(self.family, self.name, problem, config, arch, (built,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads x again; two unrolled vectors of each weight row are in flight."""
        assert isinstance(problem, AttentionProjection)
        a_block = int(config["outputs_a_block"])
        return Work(
            l2_bytes=problem.outputs // a_block * problem.rows * problem.hidden * 2,
            in_flight_bytes=2 * a_block * int(config["threads"]) * int(config["vec"]) * 2,
            scalar_flops=2 * problem.rows * problem.outputs * problem.hidden,
            tile_turns=problem.hidden / (int(config["threads"]) * int(config["vec"])),
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        return f"each of {config['threads']} threads its vectors of {config['vec']} ascending, lanes by butterfly, warps ascending"
