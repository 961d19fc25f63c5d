"""What the two TMA engines share: index arithmetic, space, launch. The MMA, wgmma or tcgen05, is each one's own.

Kernels, launches and tests share :class:`TmaTiles`: every formula takes Python integers and traced ones alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract import Arg, Compiled, Engine, Problem, Work
from ..space import Config, Constraint, Param, Space
from .common import OUT, ROWS, power_of_two, projection, refuses_always

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import AttentionProjection

HERE = Path(__file__).parent

BOX = 64
"""Columns of one copy: 128 bytes of BF16, the longest row that shared memory swizzles."""
BOX_BYTES = 2 * BOX
GROUP = 4
"""Neighbouring outputs that one thread sums and stores."""


def up(size: int, step: int) -> int:
    """``size`` rounded up to a multiple of ``step``."""
    return -(-size // step) * step


@dataclass(frozen=True)
class TmaTiles:
    """One config of a TMA engine on one problem."""

    outputs: int
    hidden: int
    rows: int
    """Most token rows."""
    tile_rows: int
    """Weight rows of a tile: of a cluster, and of a copy's box; at most 256."""
    split: int
    """Blocks of a cluster: they share a tile's K."""
    k_tile: int
    """Columns of a stage."""
    stages: int
    mma_rows: int
    """Weight rows of one MMA."""
    n_step: int
    """Multiple that the MMA's N comes in."""
    extra_warps: int
    """Warps beside the consumers."""

    def __repr__(self) -> str:  # part of a file name inside the DSL
        return "_".join(str(getattr(self, name)) for name in self.__dataclass_fields__)

    @property
    def n(self) -> int:
        """Token rows of the MMA: its N."""
        return up(self.rows, self.n_step)

    @property
    def tiles(self) -> int:
        """Tiles of weight rows: clusters of the grid."""
        return -(-self.outputs // self.tile_rows)

    @property
    def k_tiles(self) -> int:
        """Stages of all blocks of a cluster together."""
        return self.hidden // self.k_tile

    def first(self, rank: Any) -> Any:
        """First K tile of a block of the cluster; it ends where the next one begins."""
        return rank * self.k_tiles // self.split

    @property
    def mma_tile(self) -> int:
        """Weight rows that the MMAs of a block take; those beyond ``tile_rows`` hold leftovers and are not stored."""
        return up(self.tile_rows, self.mma_rows)

    @property
    def consumers(self) -> int:
        """Consumer warps, four to each ``mma_rows``."""
        return 4 * self.mma_tile // self.mma_rows

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * (self.consumers + self.extra_warps)

    @property
    def boxes(self) -> int:
        """Copies of w, and of x, a stage."""
        return self.k_tile // BOX

    @property
    def w_rows(self) -> int:
        """Rows that a box of w takes in shared memory: whole swizzle atoms of 8 rows."""
        return up(self.tile_rows, 8)

    @property
    def x_offset(self) -> int:
        """Where the ring of x begins, in elements: behind the ring of w."""
        return self.stages * self.boxes * self.w_rows * BOX

    @property
    def expected_bytes(self) -> int:
        """Bytes whose arrival completes a stage; rows outside a matrix arrive as zeros and count."""
        return self.boxes * (self.tile_rows + self.n) * BOX_BYTES

    @property
    def pitch(self) -> int:
        """Floats between two token rows of the partial sums: 4 modulo 16, so that a warp's stores meet 32 banks."""
        return self.mma_tile + 4

    @property
    def ring_bytes(self) -> int:
        """Both rings, at least what the MMA reads beyond the last box of w, and the partial sums that follow in their place."""
        rings = self.stages * self.boxes * (self.w_rows + self.n) * BOX_BYTES
        beyond = ((self.stages * self.boxes - 1) * self.w_rows + self.mma_tile) * BOX_BYTES
        return up(max(rings, beyond, self.n * self.pitch * 4), 1024)

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory for the sums, as they are given out: a power of two, at least 32 (tcgen05 only)."""
        return power_of_two(self.mma_tile // self.mma_rows * self.n, 32)

    @property
    def barriers(self) -> int:
        """Full and empty ones of each stage, and one for finished accumulators."""
        return 2 * self.stages + 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings, barriers, and the word that holds the address of tensor memory."""
        return self.ring_bytes + up(8 * self.barriers + 8, 16)

    @property
    def groups(self) -> int:
        """Groups of neighbouring outputs of one token row of a tile."""
        return -(-self.tile_rows // GROUP)

    @property
    def turns(self) -> int:
        """Groups that one thread sums at most."""
        return -(-self.n * self.groups // (self.split * self.threads))

    def group(self, turn: Any, rank: Any, thread: Any) -> Any:
        """Which group of the tile a thread sums: all of them in turn, whoever is the owner, so that few rows spread too."""
        return (turn * self.split + rank) * self.threads + thread

    def place(self, group: Any) -> tuple[Any, Any]:
        """(token row, first weight row within the tile) of a group."""
        return group // self.groups, group % self.groups * GROUP


SPLITS = (1, 2, 3, 4, 5, 6, 8)
MAX_TILE_ROWS = 256
"""Rows of the largest box."""
LEAST_TILE_ROWS = 32
"""Below it the blocks of a GPU read x more often than it is worth."""
WORST_BUSY = 0.8
"""Of the best choice's share of busy SMs: what is worse is not worth compiling."""
INVARIANT_SPLIT, INVARIANT_K_TILE = 4, 64
"""The K ranges of the invariant choice."""


def clusters_at_once(gpu: GpuCard, split: int) -> int:
    """Clusters of ``split`` blocks, one an SM, that lie on the GPU together: none spans two GPCs."""
    return gpu.sms if split == 1 else sum(sms // split for sms in gpu.gpc_sms)


def busy(outputs: int, tile_rows: int, split: int, gpu: GpuCard) -> float:
    """Share of the SMs' time that reads weights, if each SM takes as many blocks as the fullest one does."""
    tiles = -(-outputs // tile_rows)
    layers = -(-tiles // clusters_at_once(gpu, split))
    return outputs * split / (layers * tile_rows * gpu.sms)


def tile_rows_values(outputs: int, gpu: GpuCard) -> tuple[int, ...]:
    """Tile heights worth a try: those that fill the GPU once or twice with clusters of each size, and round ones."""
    filling = {
        -(-outputs // (layers * clusters_at_once(gpu, split)))
        for split in SPLITS
        for layers in (1, 2)
        if clusters_at_once(gpu, split)
    }
    round_ones = {64, 128, 192, MAX_TILE_ROWS}
    return tuple(sorted(round_ones | {rows for rows in filling if LEAST_TILE_ROWS <= rows <= MAX_TILE_ROWS}))


class CuteTmaEngine(Engine):
    """Weights and x by TMA through a ring in shared memory, one producer warp, K split over a cluster."""

    family = "attention_projection"
    compiler = "cute"
    mma_rows: int
    """Weight rows of one MMA."""
    n_step: int
    """Multiple that the MMA's N comes in."""
    extra_warps: int
    """Warps beside the consumers."""

    @abstractmethod
    def host(self) -> Callable[..., Any]:
        """The ``@cute.jit`` host function."""

    def refuses(self, problem: Problem, arch: str) -> str | None:
        """BF16, whole boxes of K and at least two of them."""
        problem = projection(problem)
        if problem.hidden % BOX or problem.hidden < 2 * BOX:
            return f"hidden {problem.hidden} is not a multiple of {BOX}, the width of a copy, from {2 * BOX} on"
        return refuses_always(self, problem, arch)

    def tiles(self, problem: AttentionProjection, config: Config) -> TmaTiles:
        """The index arithmetic of a config."""
        tile_rows, split, k_tile, stages = (int(config[name]) for name in ("tile_rows", "split", "k_tile", "stages"))
        return TmaTiles(
            problem.outputs, problem.hidden, problem.rows, tile_rows, split, k_tile, stages,
            self.mma_rows, self.n_step, self.extra_warps,
        )  # fmt: skip

    def space(self, problem: Problem, gpu: GpuCard) -> Space:
        """Tile height, split and ring, where weight rows and cluster sizes fit the GPU's SMs."""
        problem = projection(problem)
        hidden, outputs = problem.hidden, problem.outputs
        heights = tile_rows_values(outputs, gpu)
        share = partial(busy, outputs, gpu=gpu)
        enough = WORST_BUSY * max(share(rows, split) for rows in heights for split in self._splits(hidden, gpu))
        invariant = self._k_bounds(hidden, INVARIANT_SPLIT, INVARIANT_K_TILE)
        return Space(
            params=(
                Param("tile_rows", heights, "weight rows of a cluster"),
                Param("split", SPLITS, "blocks of a cluster, which share K"),
                Param("k_tile", (64, 128), "columns a stage"),
                Param("stages", tuple(range(2, 13)), "stages of the ring"),
                Param("release", ("entry", "loads", "end"), "when the next kernel may start"),
                Param("k_order", ("free", "invariant"), "invariant: one summation order for all rows and outputs"),
            ),
            constraints=(
                Constraint(
                    lambda c: hidden % int(c["k_tile"]) == 0, f"k_tile {{k_tile}} does not divide hidden {hidden}"
                ),
                Constraint(
                    lambda c: int(c["stages"]) * int(c["split"]) <= hidden // int(c["k_tile"]),
                    f"{{split}} blocks share {hidden} columns: the shortest K range has fewer tiles than {{stages}} stages",
                ),
                Constraint(
                    lambda c: self.tiles(problem, c).shared_bytes <= gpu.shared_per_block,
                    f"the ring exceeds the {gpu.shared_per_block} bytes of shared memory a block may have on {gpu.name}",
                ),
                Constraint(
                    lambda c: clusters_at_once(gpu, int(c["split"])) > 0, f"no GPC of {gpu.name} has {{split}} SMs"
                ),
                Constraint(
                    lambda c: share(int(c["tile_rows"]), int(c["split"])) >= enough,
                    f"tiles of {{tile_rows}} rows over {{split}} blocks leave more SMs of {gpu.name} idle than others do",
                ),
                Constraint(
                    lambda c: (
                        c["k_order"] == "free" or self._k_bounds(hidden, int(c["split"]), int(c["k_tile"])) == invariant
                    ),
                    f"invariant: K is cut where {INVARIANT_SPLIT} blocks cut it in tiles of {INVARIANT_K_TILE}",
                ),
            ),
            default=self._default(problem, gpu),
        )

    @staticmethod
    def _k_bounds(hidden: int, split: int, k_tile: int) -> list[int]:
        """First column of each block's K range, and the end."""
        return [rank * (hidden // k_tile) // split * k_tile for rank in range(split + 1)]

    @staticmethod
    def _splits(hidden: int, gpu: GpuCard) -> tuple[int, ...]:
        """Splits that leave every block two K tiles, so that a ring has its least two stages."""
        return tuple(s for s in SPLITS if 2 * s <= hidden // BOX and clusters_at_once(gpu, s))

    def _default(self, problem: AttentionProjection, gpu: GpuCard) -> Config:
        """Nearly all SMs busy, then as few clusters as that allows (each reads x), then the deepest ring that fits."""
        pairs = [(t, s) for t in tile_rows_values(problem.outputs, gpu) for s in self._splits(problem.hidden, gpu)]
        shares = {pair: busy(problem.outputs, *pair, gpu) for pair in pairs}
        good = [pair for pair in pairs if shares[pair] >= 0.95 * max(shares.values())]
        tile_rows, split = min(good, key=lambda pair: (-(-problem.outputs // pair[0]), pair[1], pair[0]))
        config: dict[str, int | str] = {
            "tile_rows": tile_rows,
            "split": split,
            "k_tile": 64,
            "release": "loads",
            "k_order": "free",
        }
        for stages in range(min(12, problem.hidden // BOX // split), 1, -1):
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
                matrix(problem.rows, problem.hidden),
                matrix(problem.outputs, problem.hidden),
                matrix(problem.rows, problem.outputs),
                Int32(1),
                tiles,
                str(config["release"]),
            ),
            arch,
            grid=(tiles.split, tiles.tiles, 1),
            block=(tiles.threads, 1, 1),
            shared_bytes=tiles.shared_bytes,
            args=(
                Arg("tensor_map", "w", box=(tiles.tile_rows, BOX), swizzle=128),
                Arg("tensor_map", "x", box=(tiles.n, BOX), swizzle=128, extent="rows"),
                OUT,
                ROWS,
            ),
            cluster=(tiles.split, 1, 1),
            pdl=True,
        )
        return Compiled(self.family, self.name, problem, config, arch, (built,))

    def work(self, problem: Problem, config: Config) -> Work:
        """Each cluster reads x once; the ring is what is under way; a cluster hands its sums over once."""
        problem = projection(problem)
        tiles = self.tiles(problem, config)
        return Work(
            l2_bytes=tiles.tiles * problem.rows * problem.hidden * 2,
            in_flight_bytes=tiles.stages * tiles.tile_rows * tiles.k_tile * 2,
            tile_turns=tiles.k_tiles / tiles.split * (1 + tiles.k_tile / 128) / 2,
            dependent_steps=1 if tiles.split > 1 else 0,
        )

    def summation_order(self, problem: Problem, config: Config) -> str:
        """See the kernels' docstrings."""
        split, k_tile = config["split"], config["k_tile"]
        return f"MMA over 16 columns at a time, ascending in each of {split} K ranges of whole {k_tile}-column tiles, ranges added ascending"
