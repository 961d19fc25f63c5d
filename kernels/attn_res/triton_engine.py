"""The Triton engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Compiled, Engine, Problem, Tensors, Work
from ..params import RELEASE
from ..space import Config, Constraint, Param, Space
from .common import eps_constant, mixing, refuses_always, tensor_args

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard
    from .family import AttnRes

HERE = Path(__file__).parent


class TritonEngine(Engine):
    """A row a program: scores source by source, then the mix from the sources read again."""

    name = "triton"
    family = "attn_res"
    compiler = "triton"
    sources = (HERE / "triton_row.py",)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Sources of which a lane each holds the score."""
        problem = mixing(problem)
        if problem.blocks > 15:
            return f"{problem.blocks} saved blocks: scores of at most 16 sources lie side by side"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Warps a row, and when the next kernel may start."""
        return Space(
            (Param("num_warps", (4, 8, 16, 32), "warps a row"), RELEASE),
            (Constraint(lambda c: c["release"] != "loads", "weights are loaded at its start: entry or end"),),
            {"num_warps": 16, "release": "entry"},
        )

    @staticmethod
    def _kernel(problem: AttnRes, config: Config, pdl: bool) -> tuple[Any, ...]:
        """(function, run-time arguments, constants, grid), shared by compiler and interpreter."""
        from .triton_row import k3_attn_res_triton_row as row

        args: dict[str, tuple[str, Arg]] = {f"{name}_ptr": ("*bf16", arg) for name, arg in tensor_args(problem).items()}
        args |= {"rows": ("i32", Arg("int32", "rows")), "saved": ("i32", Arg("int32", "blocks"))}
        constants = {
            "ROWS": problem.rows, "HIDDEN": problem.hidden, "BLOCK": 1 << (problem.hidden - 1).bit_length(), "BLOCKS": problem.blocks,
            "EPS": eps_constant(problem.eps), "ROUNDS": problem.kind == "final", "PDL": pdl, "RELEASE": config["release"],
        }  # fmt: skip
        return row, args, constants, (problem.rows, 1, 1)

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from ..triton_compile import TritonKernel, compile_triton

        problem = mixing(problem)
        function, args, constants, grid = self._kernel(problem, config, pdl=True)
        launch = dataclasses.replace(
            compile_triton(TritonKernel(function, args, constants, int(config["num_warps"]), 1), grid, arch), pdl=True
        )
        return Compiled(self.family, self.name, problem, config, arch, (launch,))

    def work(self, problem: Problem, config: Config) -> Work:
        """One SM reads a row's sources, and again for the mix."""
        problem = mixing(problem)
        return Work(
            l2_bytes=problem.rows * problem.hidden * 2 * (problem.blocks + 4),
            in_flight_bytes=problem.hidden * 2,
            tile_turns=2 * problem.blocks + 1,
        )

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1.

        It computes with NumPy, which has no BF16: operands are exact FP32 copies, and results are rounded as the kernel
        says.
        """
        import torch

        problem = mixing(problem)
        function, args, constants, grid = self._kernel(problem, config, pdl=False)
        held: dict[str, Any] = {name: tensor.float() for name, tensor in inputs.items()}
        held["out"] = torch.full((problem.rows, problem.hidden), float("nan"))
        numbers = {"rows": problem.rows, "blocks": problem.blocks}
        # where there is nothing to weigh, any tensor will do: it is not read
        found = {
            name: numbers[arg.name] if arg.kind == "int32" else held[arg.name or "norm_w"]
            for name, (_, arg) in args.items()
        }
        function[grid](**found, **constants)
        return {"out": held["out"].to(torch.bfloat16)}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        return "sums over a row's columns by one tree; the mix over the sources ascending, the prefix last"
