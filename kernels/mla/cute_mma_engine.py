"""The cute_mma engine: query and cache rows, attention, merge and head values, in three CuTe DSL launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Buffer, Compiled, Engine, Launch, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..params import K_ORDER, RELEASE, pinned
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from .around import Around
from .common import MOST_SPLITS, merge_order, mla, parts_buffers, refuses_always, splits_wanted
from .family import Mla
from .layout import THREADS, WARPS, Attend

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
INVARIANT = {"cluster": 8, "splits": 16, "tile": 64, "queries": 8}
"""What the order of a row's sums depends on, pinned for batch-invariant results."""
COLUMNS = (8, 16, 32, 48, 64)
SPLITS = (1, 2, 4, 8, 16, 22, 32, 44, 66, 132, MOST_SPLITS)
EARLY = Param(
    "early", ("none", "keys"), "whether the attention asks for the keys of earlier steps before its dependency wait"
)
QUERY = ("proj", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "k_scale", "block_table", "context", "query", "cache")
ATTEND = ("query", "cache", "k_scale", "block_table", "context", "partial", "lse")
VALUE = ("partial", "lse", "w_uv", "proj", "out", "k_scale")


def attend_of(problem: Mla, config: Config) -> Attend:
    """The attention's index arithmetic."""
    return Attend(
        problem.requests, problem.rows, problem.heads, problem.q_len, problem.kv_lora, problem.rope, problem.block_size,
        problem.blocks_each, problem.fp8, *(int(config[name]) for name in ("splits", "queries", "tile", "stages")),
    )  # fmt: skip


def around_of(problem: Mla, config: Config) -> Around:
    """That of the launches before and after it."""
    return Around(
        problem.rows, problem.heads, problem.q_lora, problem.nope, problem.rope, problem.kv_lora, problem.v_dim,
        problem.q_len, problem.block_size, problem.blocks_each, problem.fp8, int(config["splits"]), int(config["cluster"]),
        problem.eps, config.get("k_order") == "invariant",
    )  # fmt: skip


def front_registers(around: Around) -> int:
    """A thread's, about: weights in flight, norms, rows, sums, and the rest."""
    return around.steps * 4 * (around.n_tiles + 1 + around.halves) + 4 * around.n_tiles + 48 + 16 * around.halves


class CuteMmaEngine(Engine):
    """Keys are copied asynchronously into a ring of tiles; a tile meets all queries of its block in two transposed products."""

    name = "cute_mma"
    family = "mla"
    compiler = "cute"
    sources = (
        *(HERE / f"cute_mma{part}.py" for part in ("", "_front", "_parts", "_tiles", "_value")), *CUTE_PARTS,
    )  # fmt: skip

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """Sizes that eight warps and a cluster's blocks cannot share."""
        problem = mla(problem)
        if problem.kv_lora % (32 * WARPS):
            return f"kv_lora {problem.kv_lora} is not a multiple of {32 * WARPS}, 32 latents for each of {WARPS} warps"
        if problem.q_lora % (32 * WARPS):
            return f"q_lora {problem.q_lora} is not a multiple of {32 * WARPS}, 32 columns for each of {WARPS} warps"
        if problem.width % 32 or problem.nope % 32:
            return f"keys of {problem.width} values, queries of {problem.nope}: no multiples of 32, two steps of an MMA"
        if problem.nope % 64 or problem.v_dim % 64 or problem.rope % 32:
            return f"heads of {problem.nope} + {problem.rope} and {problem.v_dim} do not go in eights over clusters"
        if problem.rope // 8 > 32:
            return f"rope {problem.rope}: one warp inserts at most 256 values of it"
        if problem.block_size % 64:
            return f"cache blocks of {problem.block_size} tokens: a copy's keys lie in one of 64 at least"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Blocks a head before and after; the attention's tile, ring, queries and parts."""
        problem = mla(problem)
        pairs = problem.q_len * problem.heads
        queries = next(q for q in COLUMNS if q >= pairs or q == COLUMNS[-1])
        limit = register_limit(THREADS, gpu)

        def most(c: Config) -> int:
            return max(attend_of(problem, c).registers, front_registers(around_of(problem, c)))

        def room(c: Config) -> int:
            around = around_of(problem, c)
            return max(attend_of(problem, c).shared_bytes, around.front_bytes, around.value_bytes)

        return Space(
            params=(
                Param("cluster", (4, 8, 16), "blocks that share a head before and after the attention"),
                Param("queries", COLUMNS, "(row, head) pairs that share a block's keys"),
                Param("splits", SPLITS, "parts of a context"),
                Param("tile", (32, 64, 128), "tokens a tile"),
                Param("stages", (2, 3, 4, 5, 6), "tiles in shared memory"),
                EARLY,
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                Constraint(
                    lambda c: c["early"] == "none" or c["release"] != "entry",
                    "early keys: the query's launch must release behind its own wait, not at entry",
                ),
                Constraint(
                    lambda c: problem.nope % (8 * int(c["cluster"])) == 0 and problem.v_dim % (8 * int(c["cluster"])) == 0,
                    "{cluster} blocks do not share a head's query and values in eights",
                ),
                Constraint(
                    lambda c: problem.kv_lora % (8 * int(c["cluster"])) == 0 and problem.rope % (2 * int(c["cluster"])) == 0,
                    "{cluster} blocks do not share the latent in eights and the rest in pairs",
                ),
                Constraint(lambda c: int(c["queries"]) <= queries, "{queries} queries a block: a request has fewer"),
                Constraint(
                    lambda c: int(c["splits"]) == 1 or int(c["splits"]) * 16 <= problem.context + problem.q_len + 16,
                    "{splits} parts: fewer than 16 tokens each",
                ),
                Constraint(
                    lambda c: room(c) <= gpu.shared_per_block,
                    f"ring, queries, weights and shares exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(lambda c: most(c) <= limit, "operands, sums and scores exceed a thread's registers"),
                pinned(INVARIANT),
            ),
            default=self._default(problem, queries, gpu),
        )  # fmt: skip

    @staticmethod
    def _default(problem: Mla, queries: int, gpu: GpuCard) -> Config:
        """Whole clusters of eight; parts that fill the GPU once; the largest ring of tiles that a block may have."""
        groups = -(-problem.q_len * problem.heads // queries)
        wanted = splits_wanted(problem, groups, 64, gpu.sms)
        splits = max(s for s in SPLITS if s <= wanted)
        long = problem.fp8 and problem.context // wanted >= 512
        for tile, stages in ((128, 2) if long else (64, 3), (64, 3), (64, 2), (32, 3)):
            config = {"cluster": 8, "queries": queries, "splits": splits, "tile": tile, "stages": stages}
            if attend_of(problem, config).shared_bytes <= gpu.shared_per_block:
                break
        return {**config, "early": "keys", "release": "loads", "k_order": "free"}

    @staticmethod
    def _buffers(problem: Mla, config: Config) -> tuple[Buffer, ...]:
        query = Buffer("query", (problem.rows, problem.heads * problem.width), problem.cache_dtype)
        return (query, *parts_buffers(problem, int(config["splits"])))

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """Three launches with programmatic edges between them."""
        from .cute_mma import launch_attend, launch_query, launch_value

        problem = mla(problem)
        attend, around, release = attend_of(problem, config), around_of(problem, config), str(config["release"])
        buffers = self._buffers(problem, config)
        scale, early = (problem.nope + problem.rope) ** -0.5, config["early"] == "keys"

        def build(
            host: Callable[..., Any],
            names: tuple[str, ...],
            more: tuple[Any, ...],
            blocks: int,
            shared: int,
            cluster: int,
        ) -> Launch:
            return self._built(problem, buffers, host, names, more, arch, blocks, shared, cluster)

        launches = (
            build(
                launch_query, QUERY, (around, release), around.head_blocks + around.insert_blocks, around.front_bytes,
                around.cluster,
            ),
            build(launch_attend, ATTEND, (attend, scale, early, release), attend.blocks, attend.shared_bytes, 1),
            build(launch_value, VALUE, (around, release), around.head_blocks, around.value_bytes, around.cluster),
        )  # fmt: skip
        return Compiled(self.family, self.name, problem, config, arch, launches, buffers)

    @staticmethod
    def _built(
        problem: Mla, buffers: tuple[Buffer, ...], host: Callable[..., Any], names: tuple[str, ...], more: tuple[Any, ...],
        arch: str, blocks: int, shared: int, cluster: int,
    ) -> Launch:  # fmt: skip
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute
        from .family import FAMILY

        kinds = {
            "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32, "int32": cutlass.Int32, "float8_e4m3fn": cutlass.Uint8,
        }  # fmt: skip
        sizes = {name: (draw.dtype, draw.shape) for name, draw in FAMILY.draws(problem).items()}
        sizes |= {name: (dtype, shape) for name, (shape, dtype) in FAMILY.output_specs(problem).items()}
        sizes |= {buffer.name: (buffer.dtype, buffer.shape) for buffer in buffers}
        # kernels take addresses; shapes they know from their index arithmetic, and a cache may have more blocks
        fakes = [
            make_fake_tensor(kinds[sizes[name][0]], (min(math.prod(sizes[name][1]), 1 << 30),), stride=(1,), assumed_align=16)
            if name in sizes else None
            for name in names
        ]  # fmt: skip
        return compile_cute(
            host, (*fakes, cutlass.Int32(1), *more), arch, grid=(blocks, 1, 1), block=(THREADS, 1, 1), shared_bytes=shared,
            args=(*(Arg("tensor", name) for name in names if name in sizes), Arg("int32", "rows")),
            cluster=(cluster, 1, 1), pdl=True,
        )  # fmt: skip

    def work(self, problem: Problem, config: Config) -> Work:
        """Rows and parts go through the L2; a ring's tiles are in flight but for the one that is multiplied."""
        problem = mla(problem)
        attend, around = attend_of(problem, config), around_of(problem, config)
        rows = around.cluster * problem.heads * problem.rows * problem.q_lora * 2
        weights = (around.row_tiles - 1) * problem.heads * problem.q_lora * (problem.nope + problem.rope) * 2
        parts = 2 * attend.splits * attend.slot * problem.kv_lora * 4
        keys = (attend.groups - 1) * problem.requests * problem.context * attend.row_bytes
        return Work(
            l2_bytes=rows + weights + parts + keys,
            in_flight_bytes=(attend.stages - 1) * attend.tile * attend.row_bytes,
            tile_turns=-(-problem.context // attend.splits) / attend.tile,
            dependent_steps=4,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        attend, around = attend_of(mla(problem), config), around_of(mla(problem), config)
        query = "query and values: MMAs ascending in an eighth of K a warp, warps ascending; absorption: MMAs ascending"
        chains = "; even and odd steps apart" if attend.chains == 2 else ""
        return (
            f"{query}; scores: MMAs ascending{chains}; attention: tiles of {attend.tile} tokens ascending, a maximum a "
            f"tile, {merge_order(attend.splits)}, every {around.merge_groups}th of them first"
        )
