"""The engines: what they refuse, their spaces, and how a config becomes launches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import Arg, Buffer, Compiled, Engine, Problem, Tensors, Work
from ..space import Config, Constraint, Param, Space
from .family import AttentionProjection

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
X, W, OUT, ROWS = Arg("tensor", "x"), Arg("tensor", "w"), Arg("tensor", "out"), Arg("int32", "rows")
FMA_ROWS = 8


def power_of_two(rows: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``rows`` and ``least``."""
    size = least
    while size < rows:
        size *= 2
    return size


class TritonEngine(Engine):
    """Two schedules: ``fma`` for very few rows, ``splitk`` on the tensor cores for up to 64."""

    name = "triton"
    family = "attention_projection"
    compiler = "triton"
    sources = (HERE / "triton_fma.py", HERE / "triton_splitk.py")

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16 and whole K tiles only."""
        assert isinstance(problem, AttentionProjection)
        if problem.dtype != "bfloat16":
            return f"dtype {problem.dtype}: the kernels read bfloat16"
        if problem.hidden % 64:
            return f"hidden {problem.hidden} is not a multiple of 64, the smallest K tile"
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        return None

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile shapes, split, warps and pipeline depth."""
        assert isinstance(problem, AttentionProjection)
        hidden, rows = problem.hidden, problem.rows
        fma_rows, mma_rows = power_of_two(rows), power_of_two(rows, 16)

        def tile_bytes(c: Config) -> int:
            return int(c["num_stages"]) * (int(c["block_n"]) + mma_rows) * int(c["block_k"]) * 2

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
        }

    def _kernel(self, problem: AttentionProjection, config: Config) -> tuple:
        """(function, run-time arguments, constants, grid, buffers), shared by compiler and interpreter."""
        bf16, out_tiles = "*bf16", -(-problem.outputs // int(config["block_n"]))
        args = {"x_ptr": (bf16, X), "w_ptr": (bf16, W), "out_ptr": (bf16, OUT), "rows": ("i32", ROWS)}
        sizes = {"outputs": problem.outputs, "hidden": problem.hidden}
        tiles = {"BLOCK_N": config["block_n"], "BLOCK_K": config["block_k"]}
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
        function, args, constants, grid, buffers = self._kernel(problem, config)
        kernel = TritonKernel(function, args, constants, int(config["num_warps"]), int(config["num_stages"]))
        launch = compile_triton(kernel, grid, arch)
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
        function, args, constants, grid, buffers = self._kernel(problem, config)
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
        return f"MMA over K tiles of {config['block_k']} ascending in each of {config['split_k']} K ranges, ranges added ascending"


class CutePlainEngine(Engine):
    """The plain FMA kernel in CuTe DSL, for up to eight rows."""

    name = "cute_plain"
    family = "attention_projection"
    compiler = "cute"
    sources = (HERE / "cute_plain.py",)

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16, few rows, whole vectors."""
        assert isinstance(problem, AttentionProjection)
        if problem.dtype != "bfloat16":
            return f"dtype {problem.dtype}: the kernel reads bfloat16"
        if problem.rows > FMA_ROWS:
            return f"{problem.rows} rows: the kernel keeps all rows in registers, at most {FMA_ROWS}"
        if problem.hidden % 128 or problem.outputs % 2:
            return f"hidden {problem.hidden} must be a multiple of 128 and outputs {problem.outputs} even"
        if arch not in self.archs:
            return f"architecture {arch} is not among {', '.join(self.archs)}"
        return None

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


ENGINES: tuple[Engine, ...] = (TritonEngine(), CutePlainEngine())
