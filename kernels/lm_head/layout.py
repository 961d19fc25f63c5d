"""Who reads and adds what in the head's CuTe DSL kernel, and where ranks' best tokens lie: for kernel, engine and tests.

Every formula takes Python ints and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Buffer

PARITIES = 2
PACKET_BYTES = 16
"""A rank's best token of a row: FP32 value, id, a zero, all 32 bits of the launch's epoch; one .b128 access."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least ``least``."""
    return 1 << (least - 1).bit_length()


def mailbox_buffers(name: str, ranks: int, slot_bytes: int) -> tuple[Buffer, Buffer]:
    """A mailbox of so many slots, and its table of targets."""
    return (
        Buffer(name, (ranks, slot_bytes // 4), "int32", persistent=True),
        Buffer(f"{name}_targets", (ranks, 2), "int64", targets_of=name),
    )


@dataclass(frozen=True)
class Board:
    """A mailbox ``[ranks][2 parities][rows]`` of packets: slot r is written by rank r."""

    ranks: int
    rows: int

    def within(self, parity, row):
        """Byte offset in a slot."""
        return (parity * self.rows + row) * PACKET_BYTES

    def offset(self, slot, parity, row):
        """Byte offset in the mailbox."""
        return slot * self.slot_bytes + self.within(parity, row)

    @property
    def slot_bytes(self) -> int:
        """From a rank's slot to the next."""
        return PARITIES * self.rows * PACKET_BYTES

    def buffers(self, name: str) -> tuple[Buffer, Buffer]:
        """The mailbox and its table of targets."""
        return mailbox_buffers(name, self.ranks, self.slot_bytes)


@dataclass(frozen=True)
class Head:
    """Blocks own ``tile`` rows of the vocabulary each, whole K; ``warps_k`` warps share it, ``warps_n`` share the rows."""

    rows: int
    hidden: int
    vocab: int
    ranks: int
    tile: int
    chunks: int
    depth: int
    warps_n: int
    warps_k: int

    @property
    def warps(self) -> int:
        """A block."""
        return self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        """A block."""
        return 32 * self.warps

    @property
    def tiles(self) -> int:
        """Blocks."""
        return -(-self.vocab // self.tile)

    @property
    def tokens(self) -> int:
        """Rows of h that one chunk takes in the MMA's rows."""
        return power_of_two(self.rows)

    @property
    def per_tile(self) -> int:
        """Rows of weights in the MMA's 8 columns."""
        return 8 // self.chunks

    @property
    def n_tiles(self) -> int:
        """Of 8 columns, a warp."""
        return -(-self.tile // (self.per_tile * self.warps_n))

    @property
    def m_tiles(self) -> int:
        """Of 16 rows, a warp."""
        return -(-self.chunks * self.tokens // 16)

    @property
    def halves(self) -> int:
        """Eights of rows in a tile of 16 that hold something."""
        return 1 if self.chunks * self.tokens <= 8 else 2

    @property
    def width(self) -> int:
        """Columns of K that a warp takes in one step."""
        return 32 * self.chunks

    @property
    def steps(self) -> int:
        """Of a warp."""
        return self.hidden // (self.width * self.warps_k)

    # -- what a lane holds, and where its sums go
    def weight_row(self, warp, lane, j):
        """Which of the tile's rows a lane's load ``j`` is of; none if beyond the tile."""
        return (warp % self.warps_n * self.n_tiles + j) * self.per_tile + lane // 4 // self.chunks

    def weight_column(self, warp, lane):
        """First of the 8 columns that a lane loads in the first step; ``width * warps_k`` further in each next one."""
        return warp // self.warps_n * self.width + lane % 4 * 8 + lane // 4 % self.chunks * 32

    def input_row(self, lane, m, half):
        """(row of h, chunk) of the MMA's row that a lane loads; either may be beyond what there is."""
        a = m * 16 + half * 8 + lane // 4
        return a % self.tokens, a // self.tokens

    def input_column(self, warp, lane, chunk):
        """First of the 8 columns of h that go with it."""
        return warp // self.warps_n * self.width + lane % 4 * 8 + chunk * 32

    def sum_place(self, warp, lane, m, j, e):
        """(row of h, row of the tile, chunk of h, chunk of w) of accumulator ``e`` of tiles m and j."""
        a, column = m * 16 + e // 2 * 8 + lane // 4, lane % 4 * 2 + e % 2
        n = (warp % self.warps_n * self.n_tiles + j) * self.per_tile + column // self.chunks
        return a % self.tokens, n, a // self.tokens, column % self.chunks

    def part(self, warp, chunk):
        """Which of an output's sums a warp's chunk is."""
        return warp // self.warps_n * self.chunks + chunk

    @property
    def parts(self) -> int:
        """Sums of one output in a block."""
        return self.warps_k * self.chunks

    @property
    def size(self) -> int:
        """Outputs of a block."""
        return self.rows * self.tile

    @property
    def columns(self) -> int:
        """Pairs of neighbouring outputs of a row in a tile."""
        return self.tile // 2

    @property
    def sum_words(self) -> int:
        """FP32 words of the sums in shared memory."""
        return self.parts * self.size

    @property
    def best_words(self) -> int:
        """Words of the better of each pair in shared memory: its order and its place."""
        return self.size

    @property
    def board(self) -> Board:
        """Where ranks' best tokens are told."""
        return Board(self.ranks, self.rows)


@dataclass(frozen=True)
class Lookup:
    """Rows of the embedding table to every rank: a block takes ``threads`` packets of a row, four BF16 values each.

    A slot of the mailbox is ``[2 parities][rows][packets]`` of 16 bytes, two words of values and an epoch beside each; then
    a beacon for each parity, by which ranks that own no row say that they are there.
    """

    rows: int
    hidden: int
    vocab: int
    ranks: int
    threads: int

    @property
    def packets(self) -> int:
        """Of a row."""
        return self.hidden // 4

    @property
    def parts(self) -> int:
        """Blocks a row."""
        return -(-self.packets // self.threads)

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.rows * self.parts

    def within(self, parity, row, index):
        """Byte offset of a packet in a slot."""
        return ((parity * self.rows + row) * self.packets + index) * PACKET_BYTES

    def beacon(self, parity):
        """Byte offset of a beacon in a slot."""
        return (PARITIES * self.rows * self.packets + parity) * PACKET_BYTES

    @property
    def slot_bytes(self) -> int:
        """From a rank's slot to the next."""
        return PARITIES * (self.rows * self.packets + 1) * PACKET_BYTES

    def buffers(self, name: str) -> tuple[Buffer, Buffer]:
        """The mailbox and its table of targets."""
        return mailbox_buffers(name, self.ranks, self.slot_bytes)
