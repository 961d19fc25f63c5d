"""Index arithmetic of the CuTe DSL launches before and after the attention; see :mod:`.layout`."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import THREADS, WARPS


@dataclass(frozen=True)
class Around:
    """The launches before and after the attention: a cluster for each head and tile of 16 token rows.

    Before: block r of a cluster makes its share of the head's query, of what meets the latent and of the rest, all get
    the first whole, and block r absorbs it into its share of the latent. After: block r merges its share of the latent,
    all get it whole, and block r makes its share of the head's values.
    """

    rows: int
    heads: int
    q_lora: int
    nope: int
    rope: int
    latent: int
    v_dim: int
    q_len: int
    page: int
    pages: int
    fp8: bool
    splits: int
    cluster: int
    eps: float
    invariant: bool
    """One order of the parts' sum for all row counts."""
    ranks: int = 1
    """After: whose rows a head's block merges, each one for each (row, head); one: parts of the own attention."""
    build: int = 0
    """With stamps where it is not zero (:mod:`..stamps`)."""

    @property
    def width(self) -> int:
        """Values of a key."""
        return self.latent + self.rope

    @property
    def columns(self) -> int:
        """Of the input projection."""
        return self.q_lora + self.width + self.heads * self.v_dim

    @property
    def slot(self) -> int:
        """(Row, head) pairs."""
        return self.rows * self.heads

    @property
    def row_tiles(self) -> int:
        """Of 16 token rows, the rows of an MMA."""
        return -(-self.rows // 16)

    @property
    def halves(self) -> int:
        """Eight rows or sixteen count."""
        return 1 if self.rows <= 8 else 2

    @property
    def head_blocks(self) -> int:
        """Blocks that work on heads."""
        return self.heads * self.row_tiles * self.cluster

    @property
    def insert_blocks(self) -> int:
        """Whole clusters of blocks whose warps insert a row each."""
        return -(-self.rows // (WARPS * self.cluster)) * self.cluster

    # -- before
    @property
    def own_nope(self) -> int:
        """Outputs of a block that meet the latent."""
        return self.nope // self.cluster

    @property
    def own_rope(self) -> int:
        """The others."""
        return self.rope // self.cluster

    @property
    def outputs(self) -> int:
        """Of a block."""
        return self.own_nope + self.own_rope

    @property
    def n_tiles(self) -> int:
        """Eight outputs each; the last may repeat one."""
        return -(-self.outputs // 8)

    @property
    def steps(self) -> int:
        """Blocks of 32 columns of the query's latent that a warp takes."""
        return self.q_lora // (32 * WARPS)

    @property
    def own_latent(self) -> int:
        """Latents of a block."""
        return self.latent // self.cluster

    @property
    def uk_pitch(self) -> int:
        """Bytes from a row of W_UK's share to the next in shared memory."""
        return (self.own_latent // 8 | 1) * 16

    @property
    def nope_pitch(self) -> int:
        """The same of a row of the head's query."""
        return (self.nope // 8 | 1) * 16

    @property
    def nope_at(self) -> int:
        """The head's query [16][nope_pitch], behind W_UK's share [nope][uk_pitch]."""
        return self.nope * self.uk_pitch

    @property
    def squares_at(self) -> int:
        """Sums of squares [warps][16] FP32."""
        return self.nope_at + 16 * self.nope_pitch

    @property
    def sums_at(self) -> int:
        """Sums of the warps [warps][16][outputs] FP32."""
        return self.squares_at + WARPS * 16 * 4

    @property
    def front_bytes(self) -> int:
        """Shared memory of a block before the attention."""
        return self.sums_at + WARPS * 16 * self.outputs * 4

    # -- after
    @property
    def tile_rows(self) -> int:
        """Token rows of a tile that may live: a power of two."""
        return 1 << max(min(self.rows, 16) - 1, 0).bit_length()

    @property
    def lanes(self) -> int:
        """Threads that merge a row's share of the latent, four values each."""
        return self.own_latent // 4

    @property
    def merge_groups(self) -> int:
        """Groups of those that share a row's parts."""
        return 1 if self.invariant else max(THREADS // self.lanes // self.tile_rows, 1)

    @property
    def merge_turns(self) -> int:
        """Rows that a group merges one after the other."""
        return -(-self.tile_rows * self.merge_groups * self.lanes // THREADS)

    @property
    def own_v(self) -> int:
        """Head values of a block."""
        return self.v_dim // self.cluster

    @property
    def v_tiles(self) -> int:
        """Eight of them each."""
        return self.own_v // 8

    @property
    def v_steps(self) -> int:
        """Blocks of 32 latents that a warp takes."""
        return self.latent // (32 * WARPS)

    @property
    def latent_pitch(self) -> int:
        """Bytes from a merged row to the next in shared memory."""
        return (self.latent // 8 | 1) * 16

    @property
    def shares_at(self) -> int:
        """Shares of the parts [tile_rows][splits] FP32, behind the merged rows [16][latent_pitch]; of ranks, logarithms [tile_rows][ranks]."""
        return 16 * self.latent_pitch

    @property
    def totals_at(self) -> int:
        """Sums of the shares [tile_rows] FP32, to whole 16 bytes."""
        return self.shares_at + -(-self.tile_rows * max(self.splits, self.ranks) * 4 // 16) * 16

    @property
    def merged_at(self) -> int:
        """What groups merged [merge_groups][tile_rows][own_latent] FP32; of ranks, their rows [tile_rows][ranks][own_latent] BF16."""
        return self.totals_at + 64

    @property
    def value_sums_at(self) -> int:
        """Sums of the warps [warps][16][own_v] FP32; in the launch that sends rows, their logarithms [tile_rows]."""
        if self.ranks > 1:
            return self.merged_at + self.tile_rows * self.ranks * self.own_latent * 2
        return self.merged_at + self.merge_groups * self.tile_rows * self.own_latent * 4

    @property
    def send_bytes(self) -> int:
        """Shared memory of a block that merges the own parts and sends the rows."""
        return self.value_sums_at + 64

    @property
    def rank_groups(self) -> int:
        """Groups of threads, of :attr:`lanes` each, that share the ranks of a row."""
        return min(self.ranks, max(THREADS // self.lanes // self.tile_rows, 1))

    @property
    def rank_turns(self) -> int:
        """Rows that a group takes one after the other."""
        return -(-self.tile_rows * self.rank_groups * self.lanes // THREADS)

    @property
    def ranks_each(self) -> int:
        """Ranks of a group."""
        return self.ranks // self.rank_groups

    @property
    def value_bytes(self) -> int:
        """Shared memory of a block after the attention."""
        return self.value_sums_at + WARPS * 16 * self.own_v * 4
