"""The Triton engine: plain kernels, one after the other, on the held layout; what it refuses, its space, its launches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Buffer, Compiled, Engine, Problem, Tensors, Work
from ..space import Config, Constraint, Param, Space
from .family import Experts

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
SUM_BLOCK = 256
"""Columns of a block of the weighted sum."""
Step = tuple[Any, dict[str, tuple[str, Arg]], dict[str, Any], tuple[int, int, int], int, int]
"""Function, run-time arguments, constants, grid, warps, stages."""


def experts(problem: Problem) -> Experts:
    """The problem as this family's own type."""
    assert isinstance(problem, Experts)
    return problem


class TritonEngine(Engine):
    """Three kernels for the routed experts, which read an expert for every row that chose it, and two for the shared one."""

    name = "triton"
    family = "experts"
    compiler = "triton"
    sources = (HERE / "triton_routed.py", HERE / "triton_shared.py")

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Weight-only; whole groups."""
        problem = experts(problem)
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        if problem.activations != "bf16":
            return f"activations {problem.activations}: these kernels multiply BF16 ones"
        if problem.latent % 32 or problem.intermediate % 32:
            return f"latent {problem.latent} or intermediate {problem.intermediate} is not a multiple of 32"
        if problem.has_shared and (problem.hidden % 64 or problem.shared_intermediate % 32):
            return f"hidden {problem.hidden} or shared intermediate {problem.shared_intermediate} is not whole tiles of 64 or 32"
        return None

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Groups a step and warps of each routed product; K tile, warps and stages of the shared expert."""
        problem = experts(problem)
        wide = problem.shared_intermediate

        def whole(c: Config) -> bool:
            return not problem.has_shared or (
                problem.hidden % int(c["block_k"]) == 0 and wide % int(c["block_k2"]) == 0
            )

        return Space(
            params=(
                Param("groups1", (2, 4, 8, 16, 32), "scale groups of the first product in one step"),
                Param("warps1", (1, 2, 4, 8), "warps of a block of the first product"),
                Param("groups2", (2, 4, 8, 16), "scale groups of the second product in one step"),
                Param("warps2", (1, 2, 4), "warps of a block of the second product"),
                Param("block_k", (32, 64, 128, 256), "K tile of the shared expert's first product"),
                Param("block_k2", (32, 64, 128), "K tile of the shared expert's second product"),
                Param("warps", (1, 2, 4), "warps of a block of the shared expert"),
                Param("stages", (2, 3, 4, 6), "tiles in flight of the shared expert"),
            ),
            constraints=(
                Constraint(whole, f"K tiles of {{block_k}} and {{block_k2}} do not divide hidden {problem.hidden} and {wide}"),
            ),
            default={
                "groups1": 8, "warps1": 2, "groups2": 8, "warps2": 1,
                "block_k": 128 if problem.hidden % 128 == 0 else 64, "block_k2": 64 if wide % 64 == 0 else 32, "warps": 2, "stages": 4,
            },
        )  # fmt: skip

    def _steps(self, problem: Experts, config: Config) -> list[Step]:
        """What is launched, shared by compiler and interpreter."""
        from .triton_routed import k3_experts_triton_first, k3_experts_triton_second, k3_experts_triton_sum
        from .triton_shared import k3_experts_triton_shared_first, k3_experts_triton_shared_second

        def given(**kinds: tuple[str, str]) -> dict[str, tuple[str, Arg]]:
            made = {name: (kind, Arg("tensor", tensor)) for name, (kind, tensor) in kinds.items()}
            return {**made, "rows": ("i32", Arg("int32", "rows"))}

        bf16, words = "*bf16", "*i32"
        pairs, latent, inner, wide = (
            problem.rows * problem.top_k, problem.latent, problem.intermediate, problem.shared_intermediate,
        )  # fmt: skip
        sizes = {"LATENT": latent, "INNER": inner, "TOP_K": problem.top_k}
        betas = {"BETA": problem.beta, "LINEAR": problem.linear_beta}
        ids = ("*i32", "ids")
        steps: list[Step] = [
            (
                k3_experts_triton_first,
                given(latent_ptr=(bf16, "latent"), ids_ptr=ids, w13_ptr=(words, "w13"), scale_ptr=(words, "w13_scale"), hidden_ptr=(bf16, "hidden")),
                {**sizes, **betas, "STEP": config["groups1"]}, (inner // 16, pairs, 1), int(config["warps1"]), 2,
            ),
            (
                k3_experts_triton_second,
                given(hidden_ptr=(bf16, "hidden"), ids_ptr=ids, w2_ptr=(words, "w2"), scale_ptr=(words, "w2_scale"), output_ptr=(bf16, "outputs")),
                {**sizes, "STEP": config["groups2"]}, (latent // 32, pairs, 1), int(config["warps2"]), 2,
            ),
            (
                k3_experts_triton_sum,
                given(output_ptr=(bf16, "outputs"), weights_ptr=("*fp32", "weights"), out_ptr=(bf16, "latent_partial")),
                {"LATENT": latent, "TOP_K": problem.top_k, "BLOCK": SUM_BLOCK}, (-(-latent // SUM_BLOCK), problem.rows, 1), 2, 2,
            ),
        ]  # fmt: skip
        if problem.has_shared:
            rows = 16
            while rows < problem.rows:
                rows *= 2
            tile = {"HIDDEN": problem.hidden, "WIDE": wide, "ROWS": rows}
            warps, stages = int(config["warps"]), int(config["stages"])
            steps += [
                (
                    k3_experts_triton_shared_first, given(x_ptr=(bf16, "x"), w_ptr=(bf16, "gate_up"), wide_ptr=(bf16, "wide")),
                    {**tile, **betas, "BLOCK_K": config["block_k"]}, (wide // 8, 1, 1), warps, stages,
                ),
                (
                    k3_experts_triton_shared_second, given(wide_ptr=(bf16, "wide"), w_ptr=(bf16, "down"), out_ptr=(bf16, "shared_partial")),
                    {**tile, "BLOCK_K": config["block_k2"]}, (problem.hidden // 16, 1, 1), warps, stages,
                ),
            ]  # fmt: skip
        return steps

    @staticmethod
    def _buffers(problem: Experts) -> tuple[Buffer, ...]:
        pairs = problem.rows * problem.top_k
        buffers = (
            Buffer("hidden", (pairs, problem.intermediate), "bfloat16"),
            Buffer("outputs", (pairs, problem.latent), "bfloat16"),
        )
        wide = Buffer("wide", (problem.rows, problem.shared_intermediate), "bfloat16")
        return (*buffers, wide) if problem.has_shared else buffers

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """Three launches, or five."""
        from ..triton_compile import TritonKernel, compile_triton

        problem = experts(problem)
        launches = [
            compile_triton(TritonKernel(function, args, constants, warps, stages), grid, arch)
            for function, args, constants, grid, warps, stages in self._steps(problem, config)
        ]
        return Compiled(self.family, self.name, problem, config, arch, tuple(launches), self._buffers(problem))

    def work(self, problem: Problem, config: Config) -> Work:
        """Every pair reads its expert again, through the L2; all products are FMAs."""
        problem = experts(problem)
        pairs = problem.rows * problem.top_k
        one = 3 * problem.latent * problem.intermediate
        return Work(
            l2_bytes=round((pairs - problem.distinct) * one * 17 / 32)
            + 4 * pairs * (problem.intermediate + problem.latent),
            in_flight_bytes=544 * int(config["groups1"]),
            scalar_flops=4 * pairs * one,
            dependent_steps=2,
        )

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1.

        It computes with NumPy, which has no BF16: operands are exact FP32 copies, and only what is returned is rounded.
        """
        import torch

        problem = experts(problem)
        tensors: dict[str, Any] = {
            name: tensor.view(torch.int32) if tensor.dtype == torch.uint8 else tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            for name, tensor in inputs.items()
        }  # fmt: skip
        from .family import FAMILY

        shapes = {buffer.name: buffer.shape for buffer in self._buffers(problem)}
        specs = {name: shape for name, (shape, _) in FAMILY.output_specs(problem).items()}
        tensors |= {name: torch.full(shape, float("nan")) for name, shape in {**shapes, **specs}.items()}
        tensors["rows"] = problem.rows
        for function, args, constants, grid, _, _ in self._steps(problem, config):
            function[grid](**{name: tensors[arg.name] for name, (_, arg) in args.items()}, **constants)
        return {name: tensors[name].to(torch.bfloat16) for name in specs}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        return (
            f"routed: products of a lane and group, groups over steps of {config['groups1']} (second product {config['groups2']}) ascending, "
            f"then one tree; expert outputs rounded, slots ascending; shared: K tiles of {config['block_k']} and {config['block_k2']} ascending"
        )
