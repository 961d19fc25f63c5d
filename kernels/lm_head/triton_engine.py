"""The Triton engine: this rank's logits, without an exchange."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Compiled, Engine, Problem, Tensors, Work
from ..params import RELEASE
from ..space import Config, Constraint, Param, Space
from .common import head, refuses_always
from .layout import power_of_two

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard
    from .family import LmHead

HERE = Path(__file__).parent


class TritonEngine(Engine):
    """A tile of the vocabulary's rows a block, the M operand of ``tl.dot``; all of K in one loop."""

    name = "triton"
    family = "lm_head"
    compiler = "triton"
    sources = (HERE / "triton_shard.py",)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """The shard only: it tells no other rank anything. Whole K tiles."""
        problem = head(problem)
        if problem.kind != "shard":
            return f"kind {problem.kind}: this engine publishes no packets; it has the shard"
        if problem.hidden % 64:
            return f"hidden {problem.hidden} is not a multiple of 64, the smallest K tile"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile shape, warps and pipeline depth."""
        problem = head(problem)
        hidden, mma_rows = problem.hidden, power_of_two(max(problem.rows, 16))

        def tile_bytes(c: Config) -> int:
            # the pipeline's tiles, and the first one, which goes from registers to the MMA by shared memory
            return (int(c["num_stages"]) + 1) * (int(c["block_n"]) + mma_rows) * int(c["block_k"]) * 2

        return Space(
            params=(
                Param("block_n", (16, 32, 64, 128), "vocabulary rows a block"),
                Param("block_k", (64, 128, 256), "K elements a tile"),
                Param("num_warps", (2, 4, 8), "warps a block"),
                Param("num_stages", (2, 3, 4, 5, 6), "tiles in flight"),
                RELEASE,
            ),
            constraints=(
                Constraint(
                    lambda c: hidden % int(c["block_k"]) == 0, f"block_k {{block_k}} does not divide hidden {hidden}"
                ),
                Constraint(
                    lambda c: tile_bytes(c) <= gpu.shared_per_block,
                    f"tiles in flight exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
            ),
            default={
                "block_n": 64, "block_k": 128 if hidden % 128 == 0 else 64, "num_warps": 4, "num_stages": 3, "release": "loads",
            },
        )  # fmt: skip

    @staticmethod
    def _kernel(problem: LmHead, config: Config, pdl: bool) -> tuple[Any, ...]:
        """(function, run-time arguments, constants, grid), shared by compiler and interpreter."""
        from .triton_shard import k3_lm_head_triton_shard as shard

        args = {f"{name}_ptr": ("*bf16", Arg("tensor", name)) for name in ("h", "w", "logits")}
        args["rows"] = ("i32", Arg("int32", "rows"))
        constants = {
            "vocab": problem.vocab, "hidden": problem.hidden, "BLOCK_M": power_of_two(max(problem.rows, 16)),
            "BLOCK_N": config["block_n"], "BLOCK_K": config["block_k"], "PDL": pdl, "RELEASE": config["release"],
        }  # fmt: skip
        return shard, args, constants, (-(-problem.vocab // int(config["block_n"])), 1, 1)

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from ..triton_compile import TritonKernel, compile_triton

        problem = head(problem)
        function, args, constants, grid = self._kernel(problem, config, pdl=True)
        kernel = TritonKernel(function, args, constants, int(config["num_warps"]), int(config["num_stages"]))
        launch = dataclasses.replace(compile_triton(kernel, grid, arch), pdl=True)
        return Compiled(self.family, self.name, problem, config, arch, (launch,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads h; what is in flight in a block."""
        problem = head(problem)
        block_n, block_k = int(config["block_n"]), int(config["block_k"])
        again = -(-problem.vocab // block_n) * problem.rows * problem.hidden * 2
        in_flight = (int(config["num_stages"]) - 1) * block_n * block_k * 2
        return Work(l2_bytes=again, in_flight_bytes=in_flight, tile_turns=problem.hidden / block_k)

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1.

        It computes with NumPy, which has no BF16: operands are exact FP32 copies, and the result is rounded here.
        """
        import torch

        problem = head(problem)
        function, args, constants, grid = self._kernel(problem, config, pdl=False)
        held: dict[str, Any] = {name: tensor.float() for name, tensor in inputs.items()}
        held["logits"] = torch.full((problem.rows, problem.vocab), float("nan"))
        held["rows"] = problem.rows
        function[grid](**{name: held[arg.name] for name, (_, arg) in args.items()}, **constants)
        return {"logits": held["logits"].to(torch.bfloat16)}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernel's docstring."""
        return f"MMA over K tiles of {config['block_k']} ascending, the first tile last"
