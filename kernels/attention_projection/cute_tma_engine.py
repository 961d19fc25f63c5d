"""What the two TMA engines share: space, launch. The MMA, wgmma or tcgen05, is each one's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Compiled, Problem, Work
from ..params import K_ORDER, RELEASE
from ..space import Config, Constraint, Param, Space
from .common import OUT, ROWS, projection, refuses_always
from .cute_tma_tiles import BOX, GROUP, TiledEngine, TmaTiles, busy, clusters_at_once, layers, up

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import AttentionProjection

HERE = Path(__file__).parent
SHARED_SOURCES = tuple(HERE / f"cute_tma_{part}.py" for part in ("parts", "sums"))

SPLITS, MULTICASTS = (1, 2, 3, 4), (1, 2, 4)
MAX_CLUSTER = 8
"""Blocks: more are not portable."""
MAX_TILE_ROWS = 256
"""Rows of the largest box."""
LEAST_TILE_ROWS = 16
"""Below it an MMA is mostly leftovers."""
MAX_LAYERS = 2
"""Blocks an SM that are worth it."""
WORST_BUSY = 0.8
"""Of the best choice's share of busy SMs: what is worse is not worth compiling."""
INVARIANT_SPLIT, INVARIANT_K_TILE = 4, 64
"""The K ranges of the invariant choice."""
TMEM_COLUMN_BYTES = 128 * 4
"""A column of tensor memory: 32 bits in each of 128 lanes."""
DEFAULT_TILE_ROWS = 40
"""Least that the default takes: smaller tiles read x more often than a split costs (seen on one H200)."""


def tile_rows_values(outputs: int, gpu: GpuCard) -> tuple[int, ...]:
    """Tile heights worth a try: those that fill the GPU with one or two layers of clusters of each size, and round ones."""
    filling = {
        -(-outputs // (layer * clusters * multicast))
        for split in SPLITS
        for multicast in MULTICASTS
        for layer in range(1, MAX_LAYERS + 1)
        if split * multicast <= MAX_CLUSTER and (clusters := clusters_at_once(gpu, split * multicast))
    }
    round_ones = {64, 128, 192, MAX_TILE_ROWS}
    return tuple(sorted(round_ones | {rows for rows in filling if LEAST_TILE_ROWS <= rows <= MAX_TILE_ROWS}))


class CuteTmaEngine(TiledEngine):
    """Weights and x by TMA through a ring in shared memory, one producer warp, K split over a cluster."""

    family = "attention_projection"
    compiler = "cute"
    other_registers: int
    """Registers of a consumer thread beside its sums."""

    @abstractmethod
    def host(self) -> Callable[..., Any]:
        """The ``@cute.jit`` host function."""

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16, whole boxes of K and at least two of them."""
        problem = projection(problem)
        if problem.hidden % BOX or problem.hidden < 2 * BOX:
            return f"hidden {problem.hidden} is not a multiple of {BOX}, the width of a copy, from {2 * BOX} on"
        return refuses_always(self, problem, arch)

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile height, cluster and ring, where weight rows and cluster sizes fit the GPU's SMs."""
        problem = projection(problem)
        hidden, outputs = problem.hidden, problem.outputs
        heights = tile_rows_values(outputs, gpu)
        share, layer = cache(partial(busy, outputs, gpu=gpu)), cache(partial(layers, outputs, gpu=gpu))
        least: dict[str, int] = {}
        enough: dict[str, float] = {}
        for kind, pairs in (
            ("free", self._pairs(problem, gpu)),
            ("invariant", self._pairs(problem, gpu, (INVARIANT_SPLIT,))),
        ):
            most = max((share(*pair, 1) for pair in pairs), default=1.0)
            least[kind] = min((layer(*pair, 1) for pair in pairs), default=1)
            # the invariant choice is worth as much, or, where it has nothing of that kind, the best that it has
            enough[kind] = min(most, enough["free"]) if enough else WORST_BUSY * most
        invariant = self._k_bounds(hidden, INVARIANT_SPLIT, INVARIANT_K_TILE)
        k_bounds = cache(partial(self._k_bounds, hidden))

        def filling(c: Config) -> tuple[int, int, int]:
            return int(c["tile_rows"]), int(c["split"]), int(c["multicast"])

        return Space(
            params=(
                Param("tile_rows", heights, "weight rows of a tile"),
                Param("split", SPLITS, "blocks of a cluster that share the K of a tile"),
                Param("multicast", MULTICASTS, "neighbouring tiles of a cluster, which share x"),
                Param("k_tile", (64, 128), "columns a stage"),
                Param("stages", tuple(range(2, 13)), "stages of the ring"),
                Param(
                    "reduce", ("pull", "push"), "pull: blocks read their peers' sums; push: they write to the owner's"
                ),
                Param("producers", (1, 2), "warps that issue copies: one for both matrices, or one each"),
                Param("k_start", ("first", "spread"), "spread: each cluster enters its K range at another tile of x"),
                RELEASE,
                K_ORDER,
            ),
            constraints=(
                Constraint(
                    lambda c: int(c["split"]) * int(c["multicast"]) <= MAX_CLUSTER,
                    f"{{split}} x {{multicast}} blocks exceed the {MAX_CLUSTER} of a portable cluster",
                ),
                Constraint(
                    lambda c: clusters_at_once(gpu, int(c["split"]) * int(c["multicast"])) > 0,
                    f"no GPC of {gpu.name} has {{split}} x {{multicast}} SMs",
                ),
                Constraint(
                    lambda c: (
                        layer(*filling(c)) <= max(MAX_LAYERS, least[str(c["k_order"])])
                        and share(*filling(c)) >= enough[str(c["k_order"])]
                    ),
                    f"tiles of {{tile_rows}} rows over {{split}} blocks leave more SMs of {gpu.name} idle than others do",
                ),
                Constraint(
                    lambda c: hidden % int(c["k_tile"]) == 0, f"k_tile {{k_tile}} does not divide hidden {hidden}"
                ),
                Constraint(
                    lambda c: int(c["stages"]) * int(c["split"]) <= hidden // int(c["k_tile"]),
                    f"{{split}} blocks share {hidden} columns: the shortest K range has fewer tiles than {{stages}} stages",
                ),
                Constraint(
                    lambda c: (
                        c["k_order"] == "free"
                        or (c["k_start"] == "first" and k_bounds(int(c["split"]), int(c["k_tile"])) == invariant)
                    ),
                    f"invariant: K is cut where {INVARIANT_SPLIT} blocks cut it in tiles of {INVARIANT_K_TILE}, "
                    "and each range begins with its first",
                ),
                Constraint(
                    lambda c: self.tiles(problem, c).shared_bytes <= gpu.shared_per_block,
                    f"the ring exceeds the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: (
                        layer(*filling(c)) <= least[str(c["k_order"])]
                        or self._blocks_a_sm(self.tiles(problem, c), gpu) >= layer(*filling(c))
                    ),
                    "tiles of {tile_rows} rows need more than one block an SM, and such rings and registers do not fit "
                    "beside each other",
                ),
            ),
            default=self._default(problem, gpu),
        )

    @classmethod
    def registers(cls, tiles: TmaTiles) -> int:
        """A thread's registers, in the eights that they are given out in."""
        return up(GROUP * tiles.register_groups + cls.other_registers, 8)

    @classmethod
    def _blocks_a_sm(cls, tiles: TmaTiles, gpu: GpuCard) -> int:
        """By shared memory, of which the system takes 1 KB for each, threads, registers, and tensor memory where there is any."""
        fits = min(
            gpu.shared_per_sm // (tiles.shared_bytes + 1024),
            gpu.max_threads_per_sm // tiles.threads,
            gpu.registers_per_sm // (tiles.threads * cls.registers(tiles)),
        )
        return min(fits, gpu.tmem_per_sm // (tiles.tmem_columns * TMEM_COLUMN_BYTES)) if gpu.tmem_per_sm else fits

    @staticmethod
    def _k_bounds(hidden: int, split: int, k_tile: int) -> list[int]:
        """First column of each block's K range, and the end."""
        return [rank * (hidden // k_tile) // split * k_tile for rank in range(split + 1)]

    @staticmethod
    def _pairs(problem: AttentionProjection, gpu: GpuCard, splits: tuple[int, ...] = SPLITS) -> list[tuple[int, int]]:
        """(tile height, split) of the fewest layers of blocks, two K tiles each, so that a ring has its least two stages.

        One layer, but for weights of more rows than all SMs have in tiles of the greatest height.
        """
        heights = tile_rows_values(problem.outputs, gpu)
        pairs = [(t, s) for t in heights for s in splits if 2 * s <= problem.hidden // BOX and clusters_at_once(gpu, s)]
        least = min((layers(problem.outputs, *pair, 1, gpu) for pair in pairs), default=1)
        return [pair for pair in pairs if layers(problem.outputs, *pair, 1, gpu) == least]

    def _default(self, problem: AttentionProjection, gpu: GpuCard) -> Config:
        """Nearly all SMs busy, tiles not too small (each reads x), then the least split; a ring of about 512 columns."""
        pairs = self._pairs(problem, gpu)
        shares = {pair: busy(problem.outputs, *pair, 1, gpu) for pair in pairs}
        good = [pair for pair in pairs if shares[pair] >= 0.95 * max(shares.values())]
        tile_rows, split = min(good, key=lambda pair: (pair[0] < DEFAULT_TILE_ROWS, pair[1], pair[0]))
        wide = problem.rows > 32 and problem.hidden % 128 == 0 and 2 * split <= problem.hidden // 128
        k_tile, most = (128, 4) if wide else (64, 9)
        config: dict[str, int | str] = {
            "tile_rows": tile_rows, "split": split, "multicast": 1, "k_tile": k_tile,
            "reduce": "pull", "producers": 1, "k_start": "first", "release": "loads", "k_order": "free",
        }  # fmt: skip
        for stages in range(min(most, problem.hidden // k_tile // split), 1, -1):
            if self.tiles(problem, {**config, "stages": stages}).shared_bytes <= gpu.shared_per_block:
                break
        return {**config, "stages": stages}

    def compile(self, problem: Problem, config: Config, arch: str) -> Compiled:
        """One launch; its tensor maps end with the live rows of x and of w."""
        from cutlass import BFloat16, Int32
        from cutlass.cute.runtime import make_fake_tensor

        from ..cute_compile import compile_cute

        problem = projection(problem)
        tiles = self.tiles(problem, config)

        def matrix(height: int, width: int) -> object:
            return make_fake_tensor(BFloat16, (height, width), stride=(width, 1), assumed_align=16)

        built = compile_cute(
            self.host(),
            (
                # rows as the MMA takes them: of a matrix of one row the compiler makes copies of one dimension, and the
                # tensor map has two
                matrix(tiles.n, problem.hidden),
                matrix(problem.outputs, problem.hidden),
                matrix(problem.rows, problem.outputs),
                Int32(1),
                tiles,
                str(config["release"]),
            ),
            arch,
            grid=(tiles.split, tiles.grid_tiles, 1),
            block=(tiles.threads, 1, 1),
            shared_bytes=tiles.shared_bytes,
            args=(
                Arg("tensor_map", "w", box=(tiles.tile_rows, BOX), swizzle=128),
                Arg("tensor_map", "x", box=(tiles.n, BOX), swizzle=128, extent="rows"),
                OUT,
                ROWS,
            ),
            cluster=(tiles.split, tiles.multicast, 1),
            pdl=True,
        )
        return Compiled(self.family, self.name, problem, config, arch, (built,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Each cluster reads x once; the ring is what is under way; a cluster hands its sums over once."""
        problem = projection(problem)
        tiles = self.tiles(problem, config)
        return Work(
            l2_bytes=tiles.grid_tiles // tiles.multicast * problem.rows * problem.hidden * 2,
            in_flight_bytes=tiles.stages * tiles.tile_rows * tiles.k_tile * 2,
            tile_turns=tiles.k_tiles / tiles.split * (1 + tiles.k_tile / 128) / 2,
            dependent_steps=1 if tiles.split > 1 else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        split, k_tile = config["split"], config["k_tile"]
        start = "" if config["k_start"] == "first" else ", begun at another tile by each cluster and closed as a ring"
        return (
            f"MMA over 16 columns at a time, ascending in each of {split} K ranges of whole {k_tile}-column tiles{start}, "
            "ranges added ascending"
        )
