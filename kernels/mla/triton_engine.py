"""The Triton engine: query, absorption, attention over parts of the context, merge and head values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Buffer, Compiled, Engine, Problem, Tensors, Work
from ..params import K_ORDER, RELEASE, pinned
from ..space import Config, Constraint, Param, Space
from .common import MOST_SPLITS, merge_order, mla, parts_buffers, power_of_two, refuses_always, splits_wanted
from .family import Mla

if TYPE_CHECKING:
    import torch

    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"block_k": 128, "splits": 16, "block_n": 64}
"""What the order of a row's sums depends on, pinned for batch-invariant results."""
ROW_TILE = 64
"""Most token rows of a tile in the kernels that multiply by weights."""
_Launch = tuple[Any, dict[str, tuple[str, Arg]], dict[str, Any], tuple[int, int, int], int, int]


class TritonEngine(Engine):
    """Four launches, or five: with the parts merged in a launch of their own where there are many."""

    name = "triton"
    family = "mla"
    compiler = "triton"
    sources = (HERE / "triton_query.py", HERE / "triton_attend.py")

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Sizes that are no whole tiles."""
        problem = mla(problem)
        if problem.dcp > 1:
            return "contexts over ranks are cute_mma's alone"
        if problem.q_lora % 64:
            return f"q_lora {problem.q_lora} is not a multiple of 64, the smallest K tile"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tiles of every launch, parts of a context, warps and stages of the attention."""
        problem = mla(problem)
        pairs = problem.q_len * problem.heads
        # 64 with keys that are widened spill
        queries = min(32 if problem.fp8 else 64, power_of_two(max(pairs, 16)))
        item = 1 if problem.fp8 else 2

        def shared(c: Config) -> int:
            # Triton keeps a tile of widened keys beside those under way, and the weights of one
            stages = max(int(c["stages"]), 1) + problem.fp8
            tile = int(c["block_n"]) * problem.width
            return stages * tile * (2 if problem.fp8 else item) + int(c["queries"]) * problem.width * 2

        groups = -(-pairs // queries)
        splits = splits_wanted(problem, groups, 64, gpu.sms)
        choices = (1, 2, 4, 8, 16, 32, 64, 128, MOST_SPLITS)
        default = {
            "block_q": 16, "block_k": next(k for k in (128, 64) if problem.q_lora % k == 0),
            "block_c": min(64, problem.kv_lora), "queries": queries, "splits": max(s for s in choices if s <= splits),
            "block_n": 16 if problem.fp8 else 32, "warps": 8 if queries > 16 else 4, "stages": 3 if queries <= 32 else 2,
            "merge": "own" if splits > 16 else "value", "block_v": 16, "release": "loads", "k_order": "free",
        }  # fmt: skip
        return Space(
            params=(
                Param("block_q", (16, 32), "outputs of the query's up-projection a block"),
                Param("block_k", (64, 128, 256), "columns of it a tile"),
                Param("block_c", (32, 64, 128), "absorbed columns a block"),
                Param("queries", (16, 32, 64), "(row, head) pairs that share a block's keys"),
                Param("splits", choices, "parts of a context"),
                Param("block_n", (16, 32, 64), "tokens a tile"),
                Param("warps", (4, 8, 16), "of the attention"),
                Param("stages", (1, 2, 3), "tiles of keys in flight, and the one that is multiplied"),
                Param("merge", ("value", "own"), "merge the parts with the head values, or in a launch before"),
                Param("block_v", (16, 32, 64), "head values a block"),
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                Constraint(
                    lambda c: problem.q_lora % int(c["block_k"]) == 0,
                    f"block_k {{block_k}} does not divide q_lora {problem.q_lora}",
                ),
                Constraint(lambda c: int(c["block_c"]) <= problem.kv_lora, "block_c {block_c} exceeds the latent"),
                Constraint(
                    lambda c: int(c["queries"]) <= power_of_two(max(pairs, 16)), "{queries} queries a block: a request has fewer"
                ),
                Constraint(lambda c: problem.v_dim % int(c["block_v"]) == 0, "block_v {block_v} does not divide the head"),
                Constraint(
                    lambda c: int(c["splits"]) == 1 or int(c["splits"]) * 16 <= problem.context + problem.q_len + 16,
                    "{splits} parts: fewer than 16 tokens each",
                ),
                Constraint(
                    lambda c: shared(c) <= gpu.shared_per_block,
                    f"tiles of keys exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: int(c["queries"]) * problem.kv_lora // (32 * int(c["warps"])) <= 160,
                    "{queries} queries exceed the registers of {warps} warps",
                ),
                pinned(INVARIANT),
            ),
            default=default,
        )  # fmt: skip

    @staticmethod
    def _buffers(problem: Mla, config: Config) -> tuple[Buffer, ...]:
        rows, heads = problem.rows, problem.heads
        latent = (rows * heads, problem.kv_lora) if config["merge"] == "own" else (1,)
        return (
            Buffer("q", (rows, heads * (problem.nope + problem.rope)), "bfloat16"),
            Buffer("query", (rows, heads * problem.width), problem.cache_dtype),
            *parts_buffers(problem, int(config["splits"])),
            Buffer("latent", latent, "bfloat16"),
        )

    @staticmethod
    def _launches(problem: Mla, config: Config, pdl: bool, wide: Any) -> list[_Launch]:
        """(function, run-time arguments, constants, grid, warps, stages) of each, shared by compiler and interpreter."""
        from .triton_attend import k3_mla_triton_attend, k3_mla_triton_merge, k3_mla_triton_value
        from .triton_query import k3_mla_triton_absorb, k3_mla_triton_query

        kinds = dict.fromkeys(("k_scale", "partial", "lse"), "*fp32") | dict.fromkeys(
            ("block_table", "context"), "*i32"
        )
        if problem.fp8:
            kinds |= dict.fromkeys(("cache", "query"), "*fp8e4nv")

        def args(**names: str) -> dict[str, tuple[str, Arg]]:
            given = {
                f"{to}_ptr": (
                    kinds.get(name, "*bf16"),
                    Arg("null") if name == "k_scale" and not problem.fp8 else Arg("tensor", name),
                )
                for to, name in names.items()
            }
            return {**given, "rows": ("i32", Arg("int32", "rows"))}

        heads, rows, latent = problem.heads, problem.rows, problem.kv_lora
        names = ("block_q", "block_k", "block_c", "block_v", "splits", "queries", "block_n", "warps", "stages")
        block_q, block_k, block_c, block_v, splits, queries, block_n, warps, stages = (int(config[n]) for n in names)
        block_m = min(ROW_TILE, power_of_two(max(rows, 16)))
        row_tiles = -(-rows // block_m)
        outputs = heads * (problem.nope + problem.rope)
        shape = {"HEADS": heads, "LATENT": latent, "FP8": problem.fp8}
        edges = {"PDL": pdl, "RELEASE": config["release"]}
        paging = {"Q_LEN": problem.q_len, "PAGE": problem.block_size, "pages": problem.blocks_each}
        parts = {"most": rows, "SPLITS": splits}
        found: list[_Launch] = [
            (
                k3_mla_triton_query,
                args(
                    proj="proj", q_a_norm="q_a_norm", kv_a_norm="kv_a_norm", q_b="q_b", k_scale="k_scale", table="block_table",
                    context="context", q="q", cache="cache",
                ),
                {
                    "eps": problem.eps, "columns": problem.columns, "LORA": problem.q_lora, "LATENT": latent,
                    "ROPE": problem.rope, "outputs": outputs, **paging, "FP8": problem.fp8, "BLOCK_M": block_m,
                    "BLOCK_N": block_q, "BLOCK_K": block_k, **edges,
                },
                (-(-outputs // block_q) + rows, row_tiles, 1), 4, 3,
            ),
            (
                k3_mla_triton_absorb, args(q="q", w_uk="w_uk", query="query"),
                {**shape, "NOPE": problem.nope, "ROPE": problem.rope, "BLOCK_M": block_m, "BLOCK_C": block_c, **edges},
                (latent // block_c, heads, row_tiles), 4, 1,
            ),
            (
                k3_mla_triton_attend,
                args(
                    query="query", cache="cache", k_scale="k_scale", table="block_table", context="context", partial="partial",
                    lse="lse",
                ),
                {
                    **shape, **parts, **paging, "softmax_scale": (problem.nope + problem.rope) ** -0.5, "ROPE": problem.rope,
                    "QUERIES": queries, "BLOCK_N": block_n, "WIDE": wide, **edges,
                },
                (splits, -(-problem.q_len * heads // queries), problem.requests), warps, stages,
            ),
        ]  # fmt: skip
        own = config["merge"] == "own"
        if own:
            merge = args(partial="partial", lse="lse", k_scale="k_scale", latent="latent")
            block = min(256, latent)
            grid = (latent // block, rows * heads, 1)
            found.append((k3_mla_triton_merge, merge, {**shape, **parts, "BLOCK_C": block, **edges}, grid, 2, 1))
        value = args(
            partial="partial", lse="lse", latent="latent", k_scale="k_scale", w_uv="w_uv", proj="proj", out="out"
        )
        sizes = {
            **shape, **parts, "columns": problem.columns, "GATE": problem.q_lora + problem.width, "V": problem.v_dim,
            "MERGED": own, "BLOCK_M": min(16, block_m), "BLOCK_V": block_v, **edges,
        }  # fmt: skip
        grid = (problem.v_dim // block_v, heads, -(-rows // min(16, block_m)))
        found.append((k3_mla_triton_value, value, sizes, grid, 4, 1))
        return found

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """Launches with programmatic edges between them."""
        import triton.language as tl

        from ..triton_compile import TritonKernel, compile_triton

        problem = mla(problem)
        launches = tuple(
            dataclasses.replace(
                compile_triton(TritonKernel(function, args, constants, warps, stages), grid, arch), pdl=True
            )
            for function, args, constants, grid, warps, stages in self._launches(problem, config, True, tl.bfloat16)
        )
        return Compiled(self.family, self.name, problem, config, arch, launches, self._buffers(problem, config))

    def releases_behind(self, config: Config) -> bool:
        """Other than at entry the last launch releases behind its wait."""
        return str(config["release"]) != "entry"

    def work(self, problem: Problem, config: Config) -> Work:
        """Every tile of the query reads the rows; parts go through the L2 and back; launches follow each other."""
        problem = mla(problem)
        splits, block_n = int(config["splits"]), int(config["block_n"])
        outputs = problem.heads * (problem.nope + problem.rope)
        again = -(-outputs // int(config["block_q"])) * problem.rows * problem.q_lora * 2 * 2
        queries = problem.rows * problem.heads
        reads = 1 if config["merge"] == "own" else problem.v_dim // int(config["block_v"])
        parts = splits * queries * problem.kv_lora * 4 * (1 + reads)
        groups = -(-problem.q_len * problem.heads // int(config["queries"]))
        item = 1 if problem.fp8 else 2
        keys = (groups - 1) * problem.requests * problem.context * problem.width * item
        return Work(
            l2_bytes=again + parts + keys,
            in_flight_bytes=max(int(config["stages"]) - 1, 1) * block_n * problem.width * item,
            tile_turns=-(-problem.context // splits) / block_n,
            dependent_steps=4 if config["merge"] == "own" else 3,
        )

    def interpret(self, problem: Problem, config: Config, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Run on Triton's interpreter; the process must have been started with TRITON_INTERPRET=1. The cache is copied first.

        It computes with NumPy, which has no BF16, and rounds to E4M3 in its own way: operands are exact FP32 copies, the
        kernels round to E4M3 themselves, and outputs are rounded here.
        """
        return {"out": self.interpreted(mla(problem), config, inputs)["out"]}

    def interpreted(
        self, problem: Mla, config: Config, inputs: Tensors, rows: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Every tensor the interpreter leaves, the cache too, with ``rows`` live rows; what was not written is NaN."""
        import torch
        import triton.language as tl

        held: dict[str, Any] = {
            name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in inputs.items()
        }
        for buffer in self._buffers(problem, config):
            held[buffer.name] = torch.full(buffer.shape, torch.nan)
        held["out"] = torch.full((problem.rows, problem.heads * problem.v_dim), torch.nan)
        held["rows"] = problem.rows if rows is None else rows
        held[""] = torch.ones(1)  # where the compiled kernel gets a null pointer
        for function, args, constants, grid, _, _ in self._launches(problem, config, False, tl.float32):
            function[grid](**{name: held[arg.name] for name, (_, arg) in args.items()}, **constants)
        return {**held, "out": held["out"].to(torch.bfloat16)}

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        tiles = (
            f"query: MMA over K tiles of {config['block_k']} ascending, the first last; absorption and values: one MMA"
        )
        attend = f"attention: tiles of {config['block_n']} tokens ascending"
        return f"{tiles}; {attend} in {merge_order(int(config['splits']))}"
