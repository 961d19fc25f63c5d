"""The Triton engine: the two halves of the router's step without the exchange."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Buffer, Compiled, Engine, Problem, Tensors, Work
from ..params import RELEASE
from ..space import Config, Constraint, Param, Space
from .common import router
from .family import Router
from .layout import power_of_two

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
FMA_ROWS = 4
"""Most rows of the FMA schedule: every row has its own products in registers."""


class TritonEngine(Engine):
    """A front that leaves the shard in plain memory, on tensor cores or by FMA; a choice with one program a row."""

    name = "triton"
    family = "router"
    compiler = "triton"
    sources = (HERE / "triton_front.py", HERE / "triton_choice.py")

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """The halves only: it publishes no packets."""
        problem = router(problem)
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        if problem.kind not in ("front", "choice"):
            return f"kind {problem.kind}: this engine publishes no packets; it has the halves, front and choice"
        if problem.kind == "front" and problem.hidden % 64:
            return f"hidden {problem.hidden} is not a multiple of 64, the smallest K tile"
        if problem.top_k & (problem.top_k - 1):
            return f"top-{problem.top_k}: the chosen scores are added in halves"
        return None

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile shapes, split, warps and stages of a front; warps of a choice."""
        problem = router(problem)
        if problem.kind == "choice":
            return Space(
                (Param("num_warps", (1, 2, 4, 8), "warps a row"), RELEASE),
                (Constraint(lambda c: c["release"] != "loads", "a choice loads no weights: entry or end"),),
                {"num_warps": 4, "release": "entry"},
            )
        return self._front_space(problem, gpu)

    @staticmethod
    def _front_space(problem: Router, gpu: GpuCard) -> Space:
        hidden, rows = problem.hidden, problem.rows
        mma_rows = power_of_two(max(rows, 16))

        def splitk(c: Config) -> bool:
            return c["schedule"] == "splitk"

        def tile_bytes(c: Config) -> int:
            return (int(c["num_stages"]) + 1) * (int(c["block_n"]) + mma_rows) * int(c["block_k"]) * 2

        def products(c: Config) -> int:
            return power_of_two(rows) * int(c["block_n"]) * int(c["block_k"]) // (32 * int(c["num_warps"]))

        block_k = next(k for k in (128, 64) if hidden % k == 0)
        return Space(
            params=(
                Param("schedule", ("fma", "splitk"), "FMA in registers, or tensor cores with a split reduction"),
                Param("block_n", (1, 2, 4, 8, 16, 32, 64), "weight rows a block"),
                Param("block_k", (64, 128, 256, 512, 1024), "K elements a tile"),
                Param("split_k", (1, 2, 4, 7, 8, 14), "blocks that share an output tile's K"),
                Param("num_warps", (2, 4, 8), "warps a block"),
                Param("num_stages", (1, 2, 3, 4), "tiles in flight"),
                RELEASE,
            ),
            constraints=(
                Constraint(lambda c: hidden % int(c["block_k"]) == 0, f"block_k {{block_k}} does not divide hidden {hidden}"),
                Constraint(lambda c: splitk(c) or rows <= FMA_ROWS, f"fma keeps all rows in registers: at most {FMA_ROWS} rows"),
                Constraint(lambda c: splitk(c) or (c["split_k"] == 1 and c["num_stages"] == 1), "fma splits no K and has no stages"),
                Constraint(lambda c: splitk(c) or 8 <= products(c) <= 128, "fma wants 8 to 128 products a thread in registers"),
                Constraint(lambda c: not splitk(c) or int(c["block_n"]) >= 16, "the MMA needs at least 16 weight rows a block"),
                Constraint(lambda c: not splitk(c) or int(c["block_k"]) <= 256, "splitk takes K tiles of at most 256"),
                Constraint(lambda c: not splitk(c) or int(c["num_stages"]) >= 2, "splitk overlaps loads with the MMA: at least 2 stages"),
                Constraint(
                    lambda c: not splitk(c) or tile_bytes(c) <= gpu.shared_per_block,
                    f"tiles in flight exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(lambda c: int(c["split_k"]) <= hidden // int(c["block_k"]), "more splits than K tiles"),
            ),
            default={
                "schedule": "splitk", "block_n": 16, "block_k": block_k, "split_k": 8 if hidden // block_k >= 8 else 1, "num_warps": 4,
                "num_stages": 3, "release": "loads",
            },
        )  # fmt: skip

    @staticmethod
    def _kernel(problem: Router, config: Config, pdl: bool) -> tuple[Any, ...]:
        """(function, run-time arguments, constants, grid, buffers), shared by compiler and interpreter."""
        release = {"PDL": pdl, "RELEASE": config["release"]}
        if problem.kind == "choice":
            from .triton_choice import k3_router_triton_choice as choice

            args = {
                "logits_ptr": ("*fp32", Arg("tensor", "all_logits")), "bias_ptr": ("*fp32", Arg("tensor", "bias")),
                "ids_ptr": ("*i32", Arg("tensor", "ids")), "weights_ptr": ("*fp32", Arg("tensor", "weights")),
                "rows": ("i32", Arg("int32", "rows")),
            }  # fmt: skip
            halvings = problem.top_k.bit_length() - 1
            sizes = {"experts": problem.all_experts, "TOP_K": problem.top_k, "BLOCK": power_of_two(problem.all_experts)}
            constants = {**sizes, "HALVINGS": halvings, "scaling": float(problem.scaling), **release}
            return choice, args, constants, (problem.rows, 1, 1), ()
        names = ("x", "w_router", "w_down")
        args = {f"{name}_ptr": ("*bf16", Arg("tensor", name)) for name in names}
        args |= {"logits_ptr": ("*fp32", Arg("tensor", "logits")), "latent_ptr": ("*bf16", Arg("tensor", "latent"))}
        args |= {"rows": ("i32", Arg("int32", "rows"))}
        outputs = problem.experts + problem.latent
        tiles = -(-outputs // int(config["block_n"]))
        sizes = {"experts": problem.experts, "latents": problem.latent, "hidden": problem.hidden}
        constants = {**sizes, "BLOCK_N": config["block_n"], "BLOCK_K": config["block_k"], **release}
        if config["schedule"] == "fma":
            from .triton_front import k3_router_triton_fma as fma

            return fma, args, {**constants, "ROWS": power_of_two(problem.rows)}, (tiles, 1, 1), ()
        from .triton_front import k3_router_triton_front as front

        split, block_m = int(config["split_k"]), power_of_two(max(problem.rows, 16))
        buffers = (
            Buffer("partial", (split, block_m, outputs) if split > 1 else (1,), "float32"),
            Buffer("arrived", (tiles,), "int32", zeroed=True),
        )
        args |= {"partial_ptr": ("*fp32", Arg("tensor", "partial")), "arrived_ptr": ("*i32", Arg("tensor", "arrived"))}
        return front, args, {**constants, "BLOCK_M": block_m, "SPLIT_K": split}, (tiles, split, 1), buffers

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch."""
        from ..triton_compile import TritonKernel, compile_triton

        problem = router(problem)
        function, args, constants, grid, buffers = self._kernel(problem, config, pdl=True)
        kernel = TritonKernel(function, args, constants, int(config["num_warps"]), int(config.get("num_stages", 1)))
        launch = dataclasses.replace(compile_triton(kernel, grid, arch), pdl=True)
        return Compiled(self.family, self.name, problem, config, arch, (launch,), buffers)

    def work(self, problem: Problem, config: Config) -> Work:
        """Every tile reads x; what is in flight in a block."""
        problem = router(problem)
        if problem.kind == "choice":
            return Work()
        block_n, block_k, split = (int(config[name]) for name in ("block_n", "block_k", "split_k"))
        outputs = problem.experts + problem.latent
        again = -(-outputs // block_n) * problem.rows * problem.hidden * 2
        if config["schedule"] == "fma":
            flops = 2 * power_of_two(problem.rows) * outputs * problem.hidden
            return Work(again, 2 * block_n * block_k * 2, flops, problem.hidden / block_k)
        partial = 2 * split * problem.rows * outputs * 4 if split > 1 else 0
        in_flight = (int(config["num_stages"]) - 1) * block_n * block_k * 2
        return Work(again + partial, in_flight, 0, problem.hidden / block_k / split, 1 if split > 1 else 0)

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1.

        It computes with NumPy, which has no BF16: operands are exact FP32 copies, and latents are rounded here.
        """
        import torch

        from .family import FAMILY

        problem = router(problem)
        function, args, constants, grid, buffers = self._kernel(problem, config, pdl=False)
        held: dict[str, Any] = {name: tensor.float() for name, tensor in inputs.items()}
        specs = FAMILY.output_specs(problem)
        for name, (shape, dtype) in specs.items():
            held[name] = torch.zeros(shape, dtype=torch.int32 if dtype == "int32" else torch.float32)
        for buffer in buffers:
            held[buffer.name] = torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
        held["rows"] = problem.rows
        function[grid](**{name: held[arg.name] for name, (_, arg) in args.items()}, **constants)
        return {name: held[name].to(getattr(torch, dtype)) for name, (_, dtype) in specs.items()}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        if router(problem).kind == "choice":
            return "the chosen scores in halves: first eight to last eight, and so on"
        if config["schedule"] == "fma":
            return f"per thread over K tiles of {config['block_k']} ascending, then one tree over the tile"
        ranges = f"each of {config['split_k']} K ranges"
        return f"MMA over K tiles of {config['block_k']} ascending in {ranges}, the first tile last; ranges added ascending"
