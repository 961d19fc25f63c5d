"""Who makes, sends and reads what in the router's kernels: index arithmetic for kernels, launches and tests.

A rank's rows of weights are one list: its router rows, then its latent-down rows. Its results travel as words of
32 bits, one FP32 logit or two BF16 latents each, every word in a packet of 8 bytes beside all 32 bits of the launch's
epoch. Every formula takes Python ints and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..output_projection.mailbox import Layout, packet

PACKET_BYTES = 8


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least ``least``."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class Board:
    """A mailbox ``[ranks][2 parities][rows][words]`` of packets."""

    ranks: int
    rows: int
    logits: int
    """Router rows of one rank: words 0 onwards."""
    latents: int
    """Latent columns of one rank: two a word, behind the logits."""

    @property
    def words(self) -> int:
        """Of one rank and row."""
        return self.logits + self.latents // 2

    @property
    def mail(self) -> Layout:
        """The same as the mailbox of the transports sees it."""
        return Layout(self.ranks, self.rows, 2 * self.words, packet("b32e32"))

    def word(self, output):
        """First word of the pair of outputs (``output`` and the next, even): two words if they are logits."""
        return output if output < self.logits else self.logits + (output - self.logits) // 2

    def within(self, parity, row, word):
        """Byte offset in a slot."""
        return ((parity * self.rows + row) * self.words + word) * PACKET_BYTES

    @property
    def slot_bytes(self) -> int:
        """From a rank's slot to the next."""
        return self.mail.slot_bytes


@dataclass(frozen=True)
class Front:
    """The projection: clusters of ``split`` blocks own ``tile`` rows of weights each and share their K."""

    board: Board
    hidden: int
    tile: int
    split: int
    chunks: int
    depth: int
    warps_n: int
    warps_k: int

    @property
    def threads(self) -> int:
        """A block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def outputs(self) -> int:
        """Rows of weights of this rank."""
        return self.board.logits + self.board.latents

    @property
    def tiles(self) -> int:
        """Clusters."""
        return -(-self.outputs // self.tile)

    @property
    def blocks(self) -> int:
        """All clusters' blocks."""
        return self.tiles * self.split

    @property
    def tokens(self) -> int:
        """Rows of x that one chunk takes in the MMA's rows."""
        return power_of_two(self.board.rows)

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
        return self.hidden // (self.width * self.split * self.warps_k)

    @property
    def merges(self) -> bool:
        """Whether both chunks' sums of an output lie in one lane, which adds them."""
        return self.chunks == 2 and self.tokens == 8

    @property
    def parts(self) -> int:
        """Sums of one output in a block, one a warp and chunk, or one a warp."""
        return self.warps_k * (1 if self.merges else self.chunks)

    # -- what happens to the sums: pairs of neighbouring outputs of one row of x
    @property
    def columns(self) -> int:
        """Pairs of a row."""
        return self.tile // 2

    @property
    def pairs(self) -> int:
        """Of a tile."""
        return self.board.rows * self.columns

    @property
    def share(self) -> int:
        """Pairs that one block of the cluster adds up, sends and keeps: neighbours."""
        return -(-self.pairs // self.split)

    @property
    def by_warps(self) -> bool:
        """Few pairs of many parts: a warp adds those of one pair, and its lanes send it, one to each rank."""
        return self.split == 1 and self.parts >= 32 and self.pairs * 32 <= self.threads

    @property
    def run(self) -> int:
        """Neighbouring threads with neighbouring pairs and the same rank."""
        if self.by_warps:
            return 1
        run = min(4, power_of_two(self.share))
        while run > 1 and run * self.board.ranks > self.threads:
            run //= 2
        return run

    @property
    def lane_ranks(self) -> int:
        """Ranks' runs that lie side by side: as many as there are ranks, or a warp's lanes."""
        return 32 if self.by_warps else self.board.ranks

    @property
    def groups(self) -> int:
        """Runs a rank has; threads beyond all ranks' send nothing."""
        return self.threads // (self.run * self.lane_ranks)

    @property
    def turns(self) -> int:
        """Pairs a thread sends, at most."""
        return -(-self.share // (self.run * self.groups))

    def rank(self, thread):
        """Rank that a thread sends to; none if it is no rank's number."""
        return thread // self.run % self.lane_ranks

    def place(self, thread, turn):
        """Which pair of its block's share a thread sends in a turn; none if it is beyond the share."""
        group = thread // (self.run * self.lane_ranks)
        idle = group // self.groups * self.share
        return thread % self.run + self.run * group + turn * self.run * self.groups + idle

    @property
    def sum_bytes(self) -> int:
        """Shared memory of the sums of one block."""
        return self.parts * self.board.rows * self.tile * 4

    @property
    def pushed_bytes(self) -> int:
        """Shared memory of the sums that the cluster's blocks send to one of them."""
        return self.split * self.share * 8 if self.split > 1 else 0

    @property
    def word_bytes(self) -> int:
        """Shared memory of finished pairs, where a thread sends more than one."""
        return self.share * 8 if self.turns > 1 else 0

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Where pushed sums, finished pairs and the barrier begin in shared memory, behind the sums; whole 16 bytes."""
        sums, pushed, words = (-(-size // 16) * 16 for size in (self.sum_bytes, self.pushed_bytes, self.word_bytes))
        return sums, sums + pushed, sums + pushed + words

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.offsets[2] + 16
