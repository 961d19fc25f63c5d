"""Who sends, sums, multiplies and finishes what in the tail's kernel: index arithmetic for kernel, launch and tests.

A rank owns ``shard`` columns of the hidden size. A cluster makes 64 of them, its blocks share the latents: block s has ``span``
of them, and at the end the columns ``own s`` onwards of the cluster's. Rows go in passes of at most 16. One block finishes a
row. Every formula takes Python ints and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..output_projection.mailbox import Layout, packet

THREADS, WARPS = 512, 16
"""Of every block."""
TILE, RUN = 64, 32
"""Columns of a cluster; latents that a warp multiplies at once."""
TILE_BYTES = TILE * RUN * 2
"""Of their weights: rows of 64 bytes."""
MMA_WARPS = 14
"""Most warps that share a block's latents; the two others add up the shared expert meanwhile."""
QUAD = 4
"""Columns of one access of 16 bytes: two packets of two values."""
PASS_ROWS = 16
"""Most rows of a pass: those of an MMA."""
UNIT = 512
"""Columns of a row that one warp finishes, 16 a lane."""
LANE_BYTES = 32
"""Sixteen BF16 values."""
ROW_SUM_BYTES = 8 * 32 * 16
"""In which the warps of a row tell each other its sums."""
SUM_WORDS = 72
"""FP32 words from a row of a warp's sums to the next: 64, and 8 so that rows fall on other banks."""
FORM = "b32e32"
"""Of all packets: 32 bits of data and all 32 of the epoch."""


@dataclass(frozen=True)
class Cut:
    """How one problem and config are shared out."""

    tp: int
    rows: int
    """Compiled for."""
    hidden: int
    latent: int
    saved: int
    """Saved blocks."""
    split: int
    """Blocks of a cluster."""
    two_shot: bool
    """Latents are summed by the owners of their columns, who send the sums to all; or by everyone."""
    finishing: int
    """Blocks that finish rows, whole clusters."""

    # blocks
    @property
    def shard(self) -> int:
        """Columns that a rank owns."""
        return self.hidden // self.tp

    @property
    def shard_latents(self) -> int:
        """Latents that a rank owns where there are two shots."""
        return self.latent // self.tp

    @property
    def making(self) -> int:
        """Blocks that make the rank's columns: the first ones."""
        return self.shard // TILE * self.split

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.making + self.finishing

    @property
    def own(self) -> int:
        """Columns that a block ends up with."""
        return TILE // self.split

    @property
    def span(self) -> int:
        """Latents of a block."""
        return self.latent // self.split

    # rows
    @property
    def pass_rows(self) -> int:
        """Rows of a pass."""
        return min(self.rows, PASS_ROWS)

    @property
    def passes(self) -> int:
        """Passes that all rows take."""
        return -(-self.rows // self.pass_rows)

    @property
    def padded(self) -> int:
        """Rows of whole passes: as many have places in the mailboxes."""
        return self.passes * self.pass_rows

    def live_passes(self, rows):
        """Passes of a launch with so many rows."""
        return (rows + self.pass_rows - 1) // self.pass_rows

    @property
    def halves(self) -> int:
        """Halves of an MMA's 16 rows that a pass needs."""
        return 1 if self.pass_rows <= 8 else 2

    # the latents of a block
    @property
    def chunks(self) -> int:
        """Runs of 32 latents."""
        return self.span // RUN

    @property
    def warps_k(self) -> int:
        """Warps that share them."""
        return max(w for w in range(1, MMA_WARPS + 1) if self.chunks % w == 0)

    @property
    def chunks_each(self) -> int:
        """Runs of one warp: chunk c of warp w is ``c warps_k + w``."""
        return self.chunks // self.warps_k

    @property
    def row_warps(self) -> int:
        """Warps that sum a row's latents, a quad a lane."""
        return -(-self.span // QUAD // 32)

    @property
    def beside(self) -> int:
        """Rows that are summed at once."""
        return WARPS // self.row_warps

    @property
    def rounds(self) -> int:
        """Rounds of so many rows in a pass."""
        return -(-self.pass_rows // self.beside)

    @property
    def rounds_at_once(self) -> int:
        """Rounds of which an owner's sums are polled together."""
        if not self.two_shot or self.pass_rows % self.beside:
            return 1
        return max(count for count in range(1, 5) if self.rounds % count == 0)

    @property
    def x_words(self) -> int:
        """32-bit words from a row of normed latents in shared memory to the next: those of eight lanes fall on other banks."""
        return self.span // 2 + (16 - self.span // 2) % 32

    @property
    def quads_own(self) -> int:
        """Quads of a row of the shared expert that a block adds up."""
        return self.own // QUAD

    @property
    def share_first(self) -> bool:
        """Whether the shared expert is added up before the latents: its packets come a hand-over before owners' sums, or its warps
        have no latents to sum. Where there are several passes it is not, for its place is read until a pass has ended.
        """
        idle = MMA_WARPS // self.row_warps >= self.pass_rows
        return self.passes == 1 and (self.two_shot or idle)

    # what the blocks of a cluster send each other
    @property
    def packet_words(self) -> int:
        """FP32 words of a row from one block to another: its columns, the latents' squares and whether a wait gave up."""
        return self.own + 4

    @property
    def quads_each(self) -> int:
        """Quads of the block's own columns that a thread publishes to one rank: one, where there are threads for all."""
        return max(1, self.pass_rows * self.tp * self.quads_own // THREADS)

    @property
    def publishing(self) -> int:
        """Threads that publish: of a row, a rank and some quads."""
        return self.pass_rows * self.tp * self.quads_own // self.quads_each

    def published(self, thread):
        """(row of the pass, rank, first of its quads) of one of them."""
        shares, rest = self.quads_own // self.quads_each, thread // self.tp
        return rest // shares, thread % self.tp, rest % shares * self.quads_each

    def pushed(self, half, source, row):
        """Word where a row of a block's lies, in one of two halves."""
        return ((half * self.split + source) * self.pass_rows + row) * self.packet_words

    @property
    def pushed_bytes(self) -> int:
        """That come for one pass."""
        return 4 * self.split * self.pass_rows * self.packet_words

    # mailboxes
    @property
    def latents(self) -> Layout:
        """Partial latents: of all columns, or with two shots of this rank's."""
        return self._box(self.shard_latents if self.two_shot else self.latent)

    @property
    def shares(self) -> Layout:
        """The shared expert's partials of this rank's columns, and each rank's columns of the result."""
        return self._box(self.shard)

    @property
    def totals(self) -> Layout:
        """Sums of each rank's latents."""
        return self._box(self.shard_latents)

    def _box(self, columns: int) -> Layout:
        return Layout(self.tp, self.padded, columns, packet(FORM))

    def within(self, columns, parity, row, column):
        """Byte in a slot of a mailbox of so many columns."""
        return ((parity * self.padded + row) * columns + column) * 4

    def slot_bytes(self, columns):
        """From a slot to the next."""
        return 2 * self.padded * columns * 4

    # sending: a warp takes 128 columns of a row, a quad a lane
    @property
    def rank_groups(self) -> int:
        """Warps that send the same latents to all ranks: warp g of them to ranks g, g + groups and so on."""
        return 1 if self.two_shot else min(4, self.tp)

    @property
    def ranks_each(self) -> int:
        """Ranks of one of them."""
        return 1 if self.two_shot else self.tp // self.rank_groups

    def latent_tasks(self, rows):
        """Warps' worth of latents to send."""
        return rows * (self.latent // 128) * self.rank_groups

    def tasks(self, rows):
        """The same with the shared expert's."""
        return self.latent_tasks(rows) + rows * (self.hidden // 128)

    @property
    def turns(self) -> int:
        """Tasks of one warp at most."""
        return -(-self.tasks(self.padded) // (self.making * WARPS))

    @property
    def tasks_ahead(self) -> int:
        """Tasks of which all loads are asked for before the first store."""
        return 2

    def latent_task(self, task):
        """(row, first column, group of ranks) of one of the first tasks."""
        run = task // self.rank_groups
        return run // (self.latent // 128), run % (self.latent // 128) * 128, task % self.rank_groups

    def share_task(self, task):
        """(row, first column) of one of the others, counted from the first of them."""
        return task // (self.hidden // 128), task % (self.hidden // 128) * 128

    # with two shots: the sums of the latents that a rank owns, of a quad for a rank a lane
    @property
    def total_lanes(self) -> int:
        """Neighbouring quads of a warp, for as many ranks as its other lanes are: 128 bytes a load, to each rank as many."""
        return 32 // min(4, self.tp)

    def total_tasks(self, rows):
        """Warps' worth of such sums."""
        quads = rows * (self.shard_latents // QUAD)
        return (quads + self.total_lanes - 1) // self.total_lanes * max(1, self.tp // 4)

    def total_task(self, task, lane):
        """(quad of all rows, rank it goes to) of a lane; its rank is the same in all tasks of a warp."""
        groups, beside = max(1, self.tp // 4), min(4, self.tp)
        return (
            task // groups * self.total_lanes + lane % self.total_lanes,
            task % groups * beside + lane // self.total_lanes,
        )

    # summing
    def quad(self, round_, warp, lane):
        """(row of the pass, quad of the block's span, whether there is such) of a lane."""
        row, place = round_ * self.beside + warp // self.row_warps, warp % self.row_warps * 32 + lane
        there = (place < self.span // QUAD) & (row < self.pass_rows) & (warp < self.beside * self.row_warps)
        return row, place, there

    @property
    def tables(self) -> tuple[str, ...]:
        """Mailboxes by name."""
        return ("latents", "shares", "totals", "deltas") if self.two_shot else ("latents", "shares", "deltas")

    def box(self, name: str) -> Layout:
        """A mailbox of that name."""
        return self.shares if name == "deltas" else getattr(self, name)

    @property
    def units(self) -> int:
        """Warps that finish a row."""
        return self.hidden // UNIT

    # shared memory of a block
    @property
    def making_bytes(self) -> tuple[int, ...]:
        """Of a making block: tiles of weights, which copies want aligned to 128; normed latents, sums, squares and lateness of the
        warps, the shared expert's columns and lateness, each thread's weights of the norm, what other blocks push, two barriers
        of pushes and one a warp of weights; each a multiple of 16.
        """
        return (
            self.chunks * TILE_BYTES,
            8 * self.halves * self.x_words * 4,
            self.warps_k * self.pass_rows * SUM_WORDS * 4,
            (self.pass_rows * self.row_warps + WARPS + 3) // 4 * 16,
            (self.pass_rows * self.own // 2 + 2 + 3) // 4 * 16,
            THREADS * 8,
            2 * self.pushed_bytes,
            (2 + self.warps_k + 1) // 2 * 16,
        )

    @property
    def kept_bytes(self) -> int:
        """Of a finishing block: each lane's weights, of norm, query and AttnRes norm."""
        return THREADS * 3 * LANE_BYTES

    @property
    def memory_bytes(self) -> int:
        """Of a block, whichever it is, but for a row's sums."""
        return max(sum(self.making_bytes), self.kept_bytes)
