"""Index arithmetic of the two TMA engines: kernels, launches and tests share :class:`TmaTiles`.

Every formula takes Python integers and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..contract import Engine
from ..space import Config
from .common import power_of_two

if TYPE_CHECKING:
    from ..gpu_cards import GpuCard
    from .family import AttentionProjection

BOX = 64
"""Columns of one copy: 128 bytes of BF16, the longest row that shared memory swizzles."""
BOX_BYTES = 2 * BOX
GROUP = 4
"""Sums that move together: 16 bytes."""


def up(size: int, step: int) -> int:
    """``size`` rounded up to a multiple of ``step``."""
    return -(-size // step) * step


@dataclass(frozen=True)
class TmaTiles:
    """One config of a TMA engine on one problem.

    A cluster is ``split`` x ``multicast`` blocks. Its ``split`` ranks share the K of a tile; its ``multicast``
    places are neighbouring tiles, and the blocks of one rank in all places share the x of their K range.
    """

    outputs: int
    hidden: int
    rows: int
    """Most token rows."""
    tile_rows: int
    """Weight rows of a tile, and of a copy's box; at most 256."""
    split: int
    """Blocks that share a tile's K."""
    k_tile: int
    """Columns of a stage."""
    stages: int
    multicast: int
    """Neighbouring tiles of a cluster."""
    reduce: str
    """How sums meet: ``pull`` (each block reads its peers' shared memory) or ``push`` (it writes to the owner's)."""
    producers: int
    """Warps that issue copies: one for both matrices, or one each."""
    k_start: str
    """Where a block's K range is entered: ``first``, or ``spread`` over it by cluster."""
    mma_rows: int
    """Weight rows of one MMA."""
    n_step: int
    """Multiple that the MMA's N comes in."""
    mma_warps: int
    """Warps beside consumers and producers."""

    def __repr__(self) -> str:  # part of a file name inside the DSL
        return "_".join(str(getattr(self, name)) for name in self.__dataclass_fields__)

    # --- what a block works on

    @property
    def n(self) -> int:
        """Token rows of the MMA: its N."""
        return up(self.rows, self.n_step)

    @property
    def tiles(self) -> int:
        """Tiles of weight rows that hold outputs."""
        return -(-self.outputs // self.tile_rows)

    @property
    def grid_tiles(self) -> int:
        """Tiles of the grid: whole clusters. What lies beyond the outputs reads zeros, and keeps the protocol."""
        return up(self.tiles, self.multicast)

    def place(self, tile: Any) -> Any:
        """Which of its cluster's tiles a tile is."""
        return tile % self.multicast

    def peer(self, rank: Any, place: Any) -> Any:
        """A block's number in its cluster."""
        return rank + place * self.split

    @property
    def places_mask(self) -> int:
        """Blocks of rank 0 in all places, as bits of their numbers; shifted by another rank: that one's."""
        return sum(1 << place * self.split for place in range(self.multicast))

    @property
    def k_tiles(self) -> int:
        """Stages of all blocks of a tile together."""
        return self.hidden // self.k_tile

    def first(self, rank: Any) -> Any:
        """First K tile of a block's range; it ends where the next one begins."""
        return rank * self.k_tiles // self.split

    def start(self, first: Any, last: Any, tile: Any) -> Any:
        """The K tile that a block begins with; behind the last one it goes on with the first."""
        return first + tile // self.multicast % (last - first) if self.k_start == "spread" else first

    # --- warps

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
        """Threads a block: consumer warps, producers, the warp that issues MMAs where there is one."""
        return 32 * (self.consumers + self.producers + self.mma_warps)

    # --- ring

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
        """Bytes whose arrival completes a stage, whoever sent them; rows outside a matrix arrive as zeros and count."""
        return self.boxes * (self.tile_rows + self.n) * BOX_BYTES

    def sender(self, stage: Any) -> Any:
        """The place whose block sends the x of a stage to all places: whole boxes in turn, also where rows are few."""
        return stage % self.multicast

    @property
    def pitch(self) -> int:
        """Floats between two token rows of the partial sums: 4 modulo 16, so that a warp's stores meet 32 banks."""
        return self.mma_tile + 4

    @property
    def ring_bytes(self) -> int:
        """Both rings, at least what the MMA reads beyond the last box of w, and partial sums that follow in their place."""
        rings = self.stages * self.boxes * (self.w_rows + self.n) * BOX_BYTES
        beyond = ((self.stages * self.boxes - 1) * self.w_rows + self.mma_tile) * BOX_BYTES
        sums = self.n * self.pitch * 4 if self.reduce == "pull" else 0
        return up(max(rings, beyond, sums), 1024)

    # --- barriers: full and empty ones of each stage, then

    @property
    def x_empty(self) -> int:
        """First barrier by which a stage's sender learns that x may be overwritten in all places."""
        return 2 * self.stages if self.multicast > 1 else self.stages

    @property
    def finished(self) -> int:
        """Barrier of finished accumulators (tcgen05 only)."""
        return 3 * self.stages

    @property
    def arrived(self) -> int:
        """Barrier of the sums that peers pushed."""
        return 3 * self.stages + 1

    @property
    def barriers(self) -> int:
        """All of them, used or not."""
        return 3 * self.stages + 2

    @property
    def greets(self) -> bool:
        """Whether blocks write to their peers, so that all must know that the others' barriers are there."""
        return self.multicast > 1 or (self.reduce == "push" and self.split > 1)

    @property
    def pulls(self) -> bool:
        """Whether blocks read their peers' sums, between cluster barriers of their own."""
        return self.reduce == "pull" and self.split > 1

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory for the sums, as they are given out: a power of two, at least 32 (tcgen05 only)."""
        return power_of_two(self.mma_tile // self.mma_rows * self.n, 32)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings, barriers, the word that holds the address of tensor memory, pushed sums."""
        return self.ring_bytes + up(8 * self.barriers + 8, 16) + self.incoming_bytes

    # --- reduction "pull": groups are neighbouring outputs of one token row in shared memory

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

    def at(self, group: Any) -> tuple[Any, Any]:
        """(token row, first weight row within the tile) of a group."""
        return group // self.groups, group % self.groups * GROUP

    # --- reduction "push": groups are neighbouring registers of a thread, the same in all ranks

    @property
    def register_groups(self) -> int:
        """Groups of sums in a consumer thread's registers."""
        return self.mma_tile * self.n // (32 * self.consumers * GROUP)

    @property
    def live_warps(self) -> int:
        """Consumer warps that have rows of the tile: a quarter of an MMA's rows each."""
        return -(-self.tile_rows // (self.mma_rows // 4))

    def owner(self, group: Any) -> Any:
        """The rank that adds a group up and stores it."""
        return group % self.split

    def owned(self, rank: Any) -> Any:
        """Groups that a rank owns."""
        return (self.register_groups - rank + self.split - 1) // self.split

    def slot(self, group: Any, source: Any, thread: Any) -> Any:
        """Where a group of ``source`` lies among the pushed sums of its owner, in floats: [source, owned, thread, 4]."""
        after = (source + self.split - self.owner(group) - 1) % self.split
        return ((after * self.owned(0) + group // self.split) * 32 * self.live_warps + thread) * GROUP

    def pushed_bytes(self, rank: Any) -> Any:
        """Bytes that all peers of a rank push to it."""
        return (self.split - 1) * 32 * self.live_warps * GROUP * 4 * self.owned(rank)

    @property
    def incoming_bytes(self) -> int:
        """Room for pushed sums: the most that a rank gets. No part of the ring: peers finish earlier than the owner."""
        return self.pushed_bytes(0) if self.reduce == "push" else 0


class TiledEngine(Engine):
    """An engine whose launches these formulas make: what a config compiles to depends on this module, too."""

    mma_rows: int
    """Weight rows of one MMA."""
    n_step: int
    """Multiple that the MMA's N comes in."""
    mma_warps: int
    """Warps beside consumers and producers."""

    def tiles(self, problem: AttentionProjection, config: Config) -> TmaTiles:
        """The index arithmetic of a config."""
        tile_rows, split, k_tile, stages, multicast, producers = (
            int(config[name]) for name in ("tile_rows", "split", "k_tile", "stages", "multicast", "producers")
        )
        return TmaTiles(
            problem.outputs, problem.hidden, problem.rows, tile_rows, split, k_tile, stages, multicast,
            str(config["reduce"]), producers, str(config["k_start"]), self.mma_rows, self.n_step, self.mma_warps,
        )  # fmt: skip


# --- how tiles fill a GPU


@cache
def _clusters_at_once(gpc_sms: tuple[int, ...], blocks: int) -> int:
    return sum(gpc_sms) if blocks == 1 else sum(sms // blocks for sms in gpc_sms)


def clusters_at_once(gpu: GpuCard, blocks: int) -> int:
    """Clusters of so many blocks, one an SM, that lie on the GPU together: none spans two GPCs."""
    return _clusters_at_once(gpu.gpc_sms, blocks)


def layers(outputs: int, tile_rows: int, split: int, multicast: int, gpu: GpuCard) -> int:
    """Blocks of the fullest SM."""
    clusters = -(-outputs // (tile_rows * multicast))
    return -(-clusters // clusters_at_once(gpu, split * multicast))


def busy(outputs: int, tile_rows: int, split: int, multicast: int, gpu: GpuCard) -> float:
    """Share of the SMs' time that reads weights, if each SM takes as many blocks as the fullest one does."""
    return outputs * split / (layers(outputs, tile_rows, split, multicast, gpu) * tile_rows * gpu.sms)
