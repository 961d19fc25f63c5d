"""The cute_mma engine: query and cache rows, attention, merge and head values, in three CuTe DSL launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import health
from ..contract import Arg, Buffer, Compiled, Engine, Launch, Problem, Work
from ..cute_sources import CUTE_PARTS
from ..errors import InputError
from ..params import K_ORDER, RELEASE, pinned
from ..residency import register_limit
from ..space import Config, Constraint, Param, Space
from .common import MOST_SPLITS, merge_order, mla, parts_buffers, refuses_always, splits_wanted
from .cute_mma_shapes import around_of, attend_of, front_registers, ranks_of, send_of, value_of
from .family import Mla
from .layout import THREADS, WARPS
from .ranks import MOST_RANKS

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard

HERE = Path(__file__).parent
CUTE_TOLD = tuple(HERE.parent / f"cute_{name}.py" for name in ("packets", "polls"))
"""What launches that wait for other ranks are made of besides."""
INVARIANT = {"cluster": 8, "splits": 16, "tile": 64, "queries": 8}
"""What the order of a row's sums depends on, pinned for batch-invariant results."""
COLUMNS = (8, 16, 32, 48, 64)
SPLITS = (1, 2, 4, 8, 16, 22, 32, 44, 66, 132, MOST_SPLITS)
SHORT = 4096
"""Tokens of a context up to which a block's keys are few enough to be read by several blocks, each for some of the queries."""
EARLY = Param(
    "early", ("none", "keys"), "whether the attention asks for the keys of earlier steps before its dependency wait"
)
QUERY = ("proj", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "k_scale", "block_table", "context", "query", "cache")
ATTEND = ("query", "cache", "k_scale", "block_table", "context", "partial", "lse")
VALUE = ("partial", "lse", "w_uv", "proj", "out", "k_scale")
INSERT = QUERY[:8]
"""What the first launch has before what it writes."""


def must_be_peer(config: Config) -> None:
    """Refuse other ways to publish than one store a rank; not in the space, the transport says which kernels it serves.

    Raises:
        InputError: the config asks for another one.
    """
    how = str(config.get("stores", "peer"))
    if how != "peer":
        raise InputError(f"stores {how!r}: rows go to the owners of their heads alone, so there is peer alone")


class CuteMmaEngine(Engine):
    """Keys are copied asynchronously into a ring of tiles; a tile meets all queries of its block in two transposed products."""

    name = "cute_mma"
    family = "mla"
    compiler = "cute"
    sources = (
        *(HERE / f"cute_mma{part}.py" for part in ("", "_dcp", "_front", "_gather", "_parts", "_sent", "_tiles", "_value")),
        *CUTE_PARTS, *CUTE_TOLD,
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
        if problem.dcp > MOST_RANKS or problem.dcp & (problem.dcp - 1):
            return f"contexts over {problem.dcp} ranks: a power of two up to {MOST_RANKS}, shared out over a block's threads"
        if problem.kind.endswith("_dcp") and problem.dcp == 1:
            return f"{problem.kind} at TP 1: one rank has nobody to share contexts with"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Blocks a head before and after; the attention's tile, ring, queries and parts."""
        problem = mla(problem)
        pairs = problem.q_len * problem.heads * problem.dcp
        queries = next(q for q in COLUMNS if q >= pairs or q == COLUMNS[-1])
        limit = register_limit(THREADS, gpu)

        def most(c: Config) -> int:
            return max(attend_of(problem, c).registers, front_registers(around_of(problem, c)))

        def room(c: Config) -> int:
            around, last = around_of(problem, c), value_of(problem, c)
            return max(
                attend_of(problem, c).shared_bytes, around.front_bytes, last.value_bytes, send_of(problem, c).send_bytes
            )

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
                Constraint(
                    lambda c: problem.dcp == 1 or problem.rope // int(c["cluster"]) % 4 == 0,
                    "{cluster} blocks do not share the rest of a query in whole words of E4M3",
                ),
                Constraint(lambda c: int(c["queries"]) <= queries, "{queries} queries a block: a request has fewer"),
                Constraint(
                    lambda c: (
                        int(c["splits"]) == 1
                        or int(c["splits"]) * 16 <= problem.held + 16
                        or (problem.dcp > 1 and c["k_order"] == "invariant")
                    ),
                    "{splits} parts: fewer than 16 tokens each",
                ),
                Constraint(
                    lambda c: room(c) <= gpu.shared_per_block,
                    f"ring, queries, weights and shares exceed the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(lambda c: most(c) <= limit, "operands, sums and scores exceed a thread's registers"),
                pinned(INVARIANT),
            ),
            default=self._default(problem, pairs, gpu),
        )  # fmt: skip

    @staticmethod
    def _default(problem: Mla, pairs: int, gpu: GpuCard) -> Config:
        """Whole clusters of eight; as few columns as hold a request's queries, in few blocks, but 16 at a short context; parts that
        fill the GPU once, of a tile each where there are as many; the largest ring of tiles that a block may have.
        """
        queries = next((one for one in COLUMNS if one >= pairs), COLUMNS[-1])
        if problem.dcp > 1:  # 64 columns of E4M3 spill
            queries = min(COLUMNS[:-1], key=lambda one: (-(-pairs // one) * one, -one))
        elif problem.held <= SHORT:
            queries = min(queries, 16)
        groups = -(-pairs // queries)
        wanted = splits_wanted(problem, groups, 64, gpu.sms)
        tiles = -(-problem.held // 64)
        # parts are whole tiles: with one part less than there are tiles most parts would have two
        splits = min(s for s in SPLITS if s >= tiles) if wanted == tiles else max(s for s in SPLITS if s <= wanted)
        long = problem.fp8 and problem.held // wanted >= 512
        for tile, stages in ((128, 2) if long else (64, 3), (64, 3), (64, 2), (32, 3)):
            config = {"cluster": 8, "queries": queries, "splits": splits, "tile": tile, "stages": stages}
            if attend_of(problem, config).shared_bytes <= gpu.shared_per_block:
                break
        return {**config, "early": "keys", "release": "loads", "k_order": "free"}

    @staticmethod
    def _buffers(problem: Mla, config: Config) -> tuple[Buffer, ...]:
        parts = parts_buffers(problem, int(config["splits"]))
        if problem.dcp > 1:
            return (*ranks_of(problem, config).buffers, health.BUFFER, *parts)
        return (Buffer("query", (problem.rows, problem.heads * problem.width), problem.cache_dtype), *parts)

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """Three launches with programmatic edges between them; four where contexts lie over ranks. Not in the space: ``stores``,
        and ``jitter``, seed of random delays in every hand-over between ranks, for tests.
        """
        problem = mla(problem)
        must_be_peer(config)
        attend, around, release = attend_of(problem, config), around_of(problem, config), str(config["release"])
        buffers = self._buffers(problem, config)
        scale, early = (problem.nope + problem.rope) ** -0.5, config["early"] == "keys"
        first_blocks = around.head_blocks + around.insert_blocks

        def build(
            host: Callable[..., Any], names: tuple[str, ...], integers: tuple[str, ...], more: tuple[Any, ...], blocks: int,
            shared: int, cluster: int,
        ) -> Launch:  # fmt: skip
            return self._built(problem, buffers, host, names, integers, more, arch, blocks, shared, cluster)

        launches: tuple[Launch, ...]
        if problem.dcp > 1:
            from . import cute_mma_dcp as over

            ranks, send, last = ranks_of(problem, config), send_of(problem, config), value_of(problem, config)
            both, told = ("rows", "rank"), ("epochs", "health")
            asked = ("queries_targets", *told)
            launches = (
                build(
                    over.launch_query, (*INSERT, *asked, "cache"), both, (around, ranks, release), first_blocks,
                    around.front_bytes, around.cluster,
                ),
                build(
                    over.launch_attend, ("queries", *told, *ATTEND[1:]), both, (attend, ranks, scale, early, release),
                    attend.blocks, attend.shared_bytes, 1,
                ),
                build(
                    over.launch_send, ("partial", "lse", "k_scale", "latents_targets", *told), ("rows",), (send, ranks, release),
                    send.head_blocks, send.send_bytes, 1,
                ),
                build(
                    over.launch_value, ("latents", *told, "w_uv", "proj", "out"), ("rows",), (last, ranks, release),
                    last.head_blocks, last.value_bytes, last.cluster,
                ),
            )  # fmt: skip
        else:
            from .cute_mma import launch_attend, launch_query, launch_value

            rows, more = ("rows",), (around, release)
            launches = (
                build(launch_query, QUERY, rows, more, first_blocks, around.front_bytes, around.cluster),
                build(
                    launch_attend, ATTEND, rows, (attend, scale, early, release), attend.blocks, attend.shared_bytes, 1
                ),
                build(
                    launch_value,
                    VALUE,
                    rows,
                    (value_of(problem, config), release),
                    around.head_blocks,
                    around.value_bytes,
                    around.cluster,
                ),
            )
        return Compiled(self.family, self.name, problem, config, arch, launches, buffers)

    @staticmethod
    def _built(
        problem: Mla, buffers: tuple[Buffer, ...], host: Callable[..., Any], names: tuple[str, ...], integers: tuple[str, ...],
        more: tuple[Any, ...], arch: str, blocks: int, shared: int, cluster: int,
    ) -> Launch:  # fmt: skip
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute
        from .family import FAMILY

        kinds = {
            "bfloat16": cutlass.BFloat16, "float32": cutlass.Float32, "int32": cutlass.Int32, "float8_e4m3fn": cutlass.Uint8,
            "int64": cutlass.Int64,
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
            host, (*fakes, *(cutlass.Int32(1) for _ in integers), *more), arch, grid=(blocks, 1, 1), block=(THREADS, 1, 1),
            shared_bytes=shared,
            args=(*(Arg("tensor", name) for name in names if name in sizes), *(Arg("int32", name) for name in integers)),
            cluster=(cluster, 1, 1), pdl=True,
        )  # fmt: skip

    def work(self, problem: Problem, config: Config) -> Work:
        """Rows and parts go through the L2; a ring's tiles are in flight but for the one that is multiplied."""
        problem = mla(problem)
        attend, around = attend_of(problem, config), around_of(problem, config)
        rows = around.cluster * problem.heads * problem.rows * problem.q_lora * 2
        weights = (around.row_tiles - 1) * problem.heads * problem.q_lora * (problem.nope + problem.rope) * 2
        parts = 2 * attend.splits * attend.slot * problem.kv_lora * 4
        keys = (attend.groups - 1) * problem.requests * (problem.held - problem.q_len) * attend.row_bytes
        over = problem.dcp > 1
        received = ranks_of(problem, config).received_bytes if over else 0
        return Work(
            l2_bytes=rows + weights + parts + keys + attend.splits * received,
            in_flight_bytes=(attend.stages - 1) * attend.tile * attend.row_bytes,
            tile_turns=-(-problem.held // attend.splits) / attend.tile,
            dependent_steps=7 if over else 4,
            link_bytes=received,
            link_hops=2 * over,
        )

    def releases_behind(self, config: Config) -> bool:
        """Other than at entry the last launch releases behind its wait, and so do those before it for its own sake."""
        return str(config["release"]) != "entry"

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        attend, around = attend_of(mla(problem), config), around_of(mla(problem), config)
        query = "query and values: MMAs ascending in an eighth of K a warp, warps ascending; absorption: MMAs ascending"
        chains = "; even and odd steps apart" if attend.chains == 2 else ""
        over = mla(problem).dcp > 1
        ranks = (
            f"; {mla(problem).dcp} ranks' rows by their shares of the whole sum of weights, ascending" if over else ""
        )
        return (
            f"{query}; scores: MMAs ascending{chains}; attention: tiles of {attend.tile} tokens ascending, a maximum a "
            f"tile, {merge_order(attend.splits)}, every {around.merge_groups}th of them first{ranks}"
        )
