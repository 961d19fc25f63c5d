"""The Triton engine: what it refuses, its space, and how a config becomes a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Buffer, Compiled, Engine, Problem, Tensors, Work
from ..params import RELEASE
from ..space import Config, Constraint, Param, Space
from .common import FMA_ROWS, OUT, ROWS, W, X, power_of_two, refuses_always
from .family import AttentionProjection

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent


class TritonEngine(Engine):
    """Two schedules: ``fma`` for very few rows, ``splitk`` on the tensor cores for up to 64."""

    name = "triton"
    family = "attention_projection"
    compiler = "triton"
    sources = (HERE / "triton_fma.py", HERE / "triton_splitk.py")

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16 and whole K tiles only."""
        assert isinstance(problem, AttentionProjection)
        if problem.hidden % 64:
            return f"hidden {problem.hidden} is not a multiple of 64, the smallest K tile"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile shapes, split, warps and pipeline depth."""
        assert isinstance(problem, AttentionProjection)
        hidden, rows = problem.hidden, problem.rows
        fma_rows, mma_rows = power_of_two(rows), power_of_two(rows, 16)

        def tile_bytes(c: Config) -> int:
            # the pipeline's tiles, and the first one, which goes from registers to the MMA by shared memory
            return (int(c["num_stages"]) + 1) * (int(c["block_n"]) + mma_rows) * int(c["block_k"]) * 2

        def products(c: Config) -> int:
            return fma_rows * int(c["block_n"]) * int(c["block_k"]) // (32 * int(c["num_warps"]))

        fma, splitk = (lambda c: c["schedule"] == "fma"), (lambda c: c["schedule"] == "splitk")
        return Space(
            params=(
                Param("schedule", ("fma", "splitk"), "FMA in registers, or tensor cores with a split reduction"),
                Param("block_n", (2, 4, 8, 16, 32, 64, 128), "weight rows a block"),
                Param("block_k", (64, 128, 256, 512, 1024), "K elements a tile"),
                Param("split_k", (1, 2, 3, 4, 5, 6, 8), "blocks that share an output tile's K"),
                Param("num_warps", (2, 4, 8), "warps a block"),
                Param("num_stages", (1, 2, 3, 4, 5, 6), "tiles in flight"),
                RELEASE,
            ),
            constraints=(
                Constraint(
                    lambda c: hidden % int(c["block_k"]) == 0, f"block_k {{block_k}} does not divide hidden {hidden}"
                ),
                Constraint(
                    lambda c: splitk(c) or rows <= FMA_ROWS, f"fma keeps all rows in registers: at most {FMA_ROWS} rows"
                ),
                Constraint(lambda c: splitk(c) or c["split_k"] == 1, "fma does not split K"),
                Constraint(
                    lambda c: splitk(c) or c["num_stages"] == 1, "fma keeps loads in flight by unrolling, not by stages"
                ),
                Constraint(
                    lambda c: splitk(c) or 8 <= products(c) <= 128, "fma wants 8 to 128 products a thread in registers"
                ),
                Constraint(
                    lambda c: fma(c) or int(c["block_n"]) >= 16, "the MMA needs at least 16 weight rows a block"
                ),
                Constraint(lambda c: fma(c) or int(c["block_k"]) <= 256, "splitk takes K tiles of at most 256"),
                Constraint(
                    lambda c: fma(c) or int(c["num_stages"]) >= 2,
                    "splitk overlaps loads with the MMA: at least 2 stages",
                ),
                Constraint(
                    lambda c: fma(c) or tile_bytes(c) <= gpu.shared_per_block,
                    f"tiles in flight exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: fma(c) or int(c["split_k"]) <= hidden // int(c["block_k"]),
                    "more splits than K tiles",
                ),
            ),
            default=self._default(hidden, rows),
        )

    @staticmethod
    def _default(hidden: int, rows: int) -> Config:
        """One choice for all shapes, as an author writes it first: small enough to be legal for any of them."""
        block_k = next(k for k in (128, 64) if hidden % k == 0)
        split = 2 if hidden // block_k >= 2 else 1
        return {
            "schedule": "splitk",
            "block_n": 64,
            "block_k": block_k,
            "split_k": split,
            "num_warps": 4,
            "num_stages": 4,
            "release": "loads",
        }

    def _kernel(self, problem: AttentionProjection, config: Config, pdl: bool) -> tuple:
        """(function, run-time arguments, constants, grid, buffers), shared by compiler and interpreter."""
        bf16, out_tiles = "*bf16", -(-problem.outputs // int(config["block_n"]))
        args = {"x_ptr": (bf16, X), "w_ptr": (bf16, W), "out_ptr": (bf16, OUT), "rows": ("i32", ROWS)}
        sizes = {"outputs": problem.outputs, "hidden": problem.hidden}
        tiles = {"BLOCK_N": config["block_n"], "BLOCK_K": config["block_k"]}
        tiles |= {"PDL": pdl, "RELEASE": config["release"]}
        if config["schedule"] == "fma":
            from .triton_fma import k3_attention_projection_triton_fma as fma

            return fma, args, {**sizes, **tiles, "ROWS": power_of_two(problem.rows)}, (out_tiles, 1, 1), ()
        from .triton_splitk import k3_attention_projection_triton_splitk as splitk

        split, block_m = int(config["split_k"]), power_of_two(problem.rows, 16)
        buffers = (
            Buffer("partial", (split, block_m, problem.outputs) if split > 1 else (1,), "float32"),
            Buffer("arrived", (out_tiles,), "int32", zeroed=True),
        )
        args |= {"partial_ptr": ("*fp32", Arg("tensor", "partial")), "arrived_ptr": ("*i32", Arg("tensor", "arrived"))}
        return splitk, args, {**sizes, **tiles, "BLOCK_M": block_m, "SPLIT_K": split}, (out_tiles, split, 1), buffers

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from ..triton_compile import TritonKernel, compile_triton

        assert isinstance(problem, AttentionProjection)
        function, args, constants, grid, buffers = self._kernel(problem, config, pdl=True)
        kernel = TritonKernel(function, args, constants, int(config["num_warps"]), int(config["num_stages"]))
        launch = dataclasses.replace(compile_triton(kernel, grid, arch), pdl=True)
        return Compiled(self.family, self.name, problem, config, arch, (launch,), buffers)

    def work(self, problem: Problem, config: Config) -> Work:
        """Every block reads x again; splitk keeps its stages in flight, fma what it unrolls."""
        assert isinstance(problem, AttentionProjection)
        block_n, block_k, split = (int(config[name]) for name in ("block_n", "block_k", "split_k"))
        x_again = -(-problem.outputs // block_n) * problem.rows * problem.hidden * 2
        if config["schedule"] == "fma":
            flops = 2 * power_of_two(problem.rows) * problem.outputs * problem.hidden
            return Work(x_again, 2 * block_n * block_k * 2, flops, problem.hidden / block_k)
        stages = int(config["num_stages"]) - 1
        partial = 2 * split * problem.rows * problem.outputs * 4 if split > 1 else 0
        # an MMA takes 16 weight rows x 8 token rows x 16: more warps than those repeat each other's work,
        # few warps on a large tile issue theirs one after the other
        share = block_n * power_of_two(problem.rows, 16) / (16 * 8) / int(config["num_warps"])
        turn = max((1 + block_k / 128) / 2 * max(1.0, 1 / share), share * block_k / 16 / 40)
        tiles = -(-problem.hidden // block_k // split) * turn
        return Work(x_again + partial, stages * block_n * block_k * 2, 0, tiles, 1 if split > 1 else 0)

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1.

        The interpreter computes with NumPy, which has no BF16: operands are passed as exact FP32 copies
        and the FP32 result is rounded here, as the kernels' one rounding does.
        """
        import torch

        assert isinstance(problem, AttentionProjection)
        function, args, constants, grid, buffers = self._kernel(problem, config, pdl=False)
        out = torch.full((problem.rows, problem.outputs), float("nan"))
        tensors = {"x": inputs["x"].float(), "w": inputs["w"].float(), "out": out, "rows": problem.rows}
        for buffer in buffers:
            dtype = getattr(torch, buffer.dtype)
            tensors[buffer.name] = (
                torch.zeros(buffer.shape, dtype=dtype) if buffer.zeroed else torch.empty(buffer.shape, dtype=dtype)
            )
        function[grid](**{name: tensors[arg.name] for name, (_, arg) in args.items()}, **constants)
        return {"out": out.to(torch.bfloat16)}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        assert isinstance(problem, AttentionProjection)
        if config["schedule"] == "fma":
            return f"per thread over K tiles of {config['block_k']} ascending, then one tree over the tile"
        ranges = f"each of {config['split_k']} K ranges"
        return f"MMA over K tiles of {config['block_k']} ascending in {ranges}, the first tile last; ranges added ascending"
