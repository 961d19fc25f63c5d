"""The Triton engine: a head of a request a program, so that no program waits for another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Compiled, Engine, Problem, Tensors, Work
from ..params import RELEASE
from ..space import Config, Constraint, Param, Space
from .common import TENSORS, kda
from .family import Kda

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
KINDS = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32"}


class TritonEngine(Engine):
    """The state in registers, read before the dependency wait; sums by Triton's own trees."""

    name = "triton"
    family = "kda"
    compiler = "triton"
    sources = (HERE / "triton_step.py",)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Heads and gates whose widths are powers of two, four taps."""
        problem = kda(problem)
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        for name, size in (("heads of", problem.head_dim), ("a gate of rank", problem.gate_rank)):
            if size & (size - 1):
                return f"{name} {size}: a block of Triton has a power of two of elements"
        if problem.head_dim > 128 or problem.gate_rank > 512:
            return f"heads of {problem.head_dim} with a gate of rank {problem.gate_rank} do not fit in a program's registers"
        if problem.conv_size != 4:
            return f"{problem.conv_size} taps: the kernel keeps a history of three rows"
        return None

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Warps a program."""
        problem = kda(problem)
        values = problem.head_dim * (problem.head_dim + problem.gate_rank // 2)

        def a_thread(c: Config) -> int:
            return values // (32 * int(c["num_warps"]))

        return Space(
            (Param("num_warps", (4, 8, 16), "warps a head and request"), RELEASE),
            (
                Constraint(
                    lambda c: a_thread(c) <= 200,
                    "the state and the gate's weights exceed the registers of {num_warps} warps",
                ),
            ),
            {"num_warps": 8, "release": "loads"},
        )

    @staticmethod
    def _kernel(problem: Kda, config: Config, pdl: bool) -> tuple[Any, dict[str, tuple[str, Arg]], dict[str, Any]]:
        """(function, run-time arguments, constants), shared by compiler and interpreter."""
        from .family import FAMILY
        from .triton_step import k3_kda_triton_step

        kinds = {name: draw.dtype for name, draw in FAMILY.draws(problem).items()}
        kinds |= {name: dtype for name, (_, dtype) in FAMILY.output_specs(problem).items()}
        args = {f"{name}_ptr": (KINDS[kinds[name]], Arg("tensor", name)) for name in TENSORS}
        args |= {"rows": ("i32", Arg("int32", "rows"))}
        constants = {
            "heads": problem.heads, "columns": problem.columns, "D": problem.head_dim, "RANK": problem.gate_rank,
            "TAPS": problem.conv_size, "TOKENS": problem.q_len, "bound": float(problem.lower_bound), "eps": float(problem.eps),
            "PDL": pdl, "RELEASE": config["release"],
        }  # fmt: skip
        return k3_kda_triton_step, args, constants

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from ..triton_compile import TritonKernel, compile_triton

        problem = kda(problem)
        function, args, constants = self._kernel(problem, config, pdl=True)
        kernel = TritonKernel(function, args, constants, int(config["num_warps"]), 1)
        launch = compile_triton(kernel, (problem.requests * problem.heads, 1, 1), arch)
        return Compiled(self.family, self.name, problem, config, arch, (dataclasses.replace(launch, pdl=True),))

    def releases_behind(self, config: Config) -> bool:
        """Other than at entry a block releases behind its wait."""
        return str(config["release"]) != "entry"

    def work(self, problem: Problem, config: Config) -> Work:
        """Every program reads the gate rows, taps and projections of its head."""
        problem = kda(problem)
        dim = problem.head_dim
        a_program = (
            dim * problem.gate_rank * 2
            + 3 * dim * problem.conv_size * 4
            + problem.q_len * (3 * dim + problem.gate_rank) * 2
        )
        return Work(
            l2_bytes=problem.requests * problem.heads * a_program, in_flight_bytes=dim * (4 * dim + 2 * problem.gate_rank),
            scalar_flops=self._flops(problem), tile_turns=float(problem.q_len),
        )  # fmt: skip

    @staticmethod
    def _flops(problem: Kda) -> int:
        from .family import FAMILY

        return FAMILY.flops(problem)

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1.

        It computes with NumPy, which has no BF16: operands are exact FP32 copies, and what is stored in BF16 is rounded here;
        the gate is not.
        """
        import torch

        from .family import FAMILY

        problem = kda(problem)
        function, args, constants = self._kernel(problem, config, pdl=False)
        held: dict[str, Any] = {
            name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()
        }
        specs = FAMILY.output_specs(problem)
        for name, (shape, _) in specs.items():
            held[name] = torch.full(shape, float("nan"))
        held["rows"] = problem.rows
        function[(problem.requests * problem.heads,)](
            **{name: held[arg.name] for name, (_, arg) in args.items()}, **constants
        )
        return {name: held[name].to(getattr(torch, dtype)) for name, (_, dtype) in specs.items()}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """As Triton lays out a tile."""
        return (
            f"Triton's trees over {config['num_warps']} warps: gate over its rank, S k, S q over keys, norms over a head; "
            "convolution: taps ascending"
        )
