"""Index arithmetic of the CuTe DSL attention: where keys, queries, weights and sums lie, the same for kernel, launch and tests.

Every formula takes Python integers and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 8
"""Of a block."""
THREADS = 32 * WARPS


@dataclass(frozen=True)
class Attend:
    """One block: up to ``queries`` (row, head) pairs of one request over one part of its context.

    Scores are made transposed, S^T = K Q^T with tokens as the rows of an MMA and queries as its columns, and so are the
    sums, O^T = V^T P^T: a multiple of eight queries wastes nothing. In a tile's first half warps share its tokens and
    queries, in the second its latents.
    """

    requests: int
    rows: int
    """Rows compiled for."""
    heads: int
    q_len: int
    latent: int
    rope: int
    page: int
    """Tokens of a cache block."""
    pages: int
    """Blocks of a request in the table."""
    fp8: bool
    splits: int
    queries: int
    """Columns of a block: 8 times 1, 2, 4, 6 or 8."""
    tile: int
    """Tokens in shared memory at once: 32, 64 or 128."""
    stages: int
    build: int = 0
    """With stamps where it is not zero (:mod:`..stamps`)."""

    @property
    def width(self) -> int:
        """Values of a key."""
        return self.latent + self.rope

    @property
    def item(self) -> int:
        """Bytes of a value in the cache and in the query."""
        return 1 if self.fp8 else 2

    @property
    def row_bytes(self) -> int:
        """Of a key in memory."""
        return self.width * self.item

    @property
    def pitch(self) -> int:
        """Bytes from a key to the next in shared memory: an odd number of 16-byte chunks, so that eight rows meet no bank twice."""
        return (self.row_bytes // 16 | 1) * 16

    @property
    def query_pitch(self) -> int:
        """The same of a query, of 16-bit values."""
        return (self.width // 8 | 1) * 16

    @property
    def weight_pitch(self) -> int:
        """The same of a token's weights for all queries."""
        return (self.queries // 8 | 1) * 16

    @property
    def groups(self) -> int:
        """Blocks that share a part of a request."""
        return -(-self.q_len * self.heads // self.queries)

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.requests * self.groups * self.splits

    @property
    def slot(self) -> int:
        """Queries of a split in the parts' buffers."""
        return self.rows * self.heads

    # -- who does what
    @property
    def n_tiles(self) -> int:
        """MMA columns of eight queries."""
        return self.queries // 8

    @property
    def warps_n(self) -> int:
        """Warps that share the queries of a token in the first half."""
        return 1 if self.n_tiles == 1 else 2

    @property
    def n_own(self) -> int:
        """MMA columns of a warp there."""
        return self.n_tiles // self.warps_n

    @property
    def warps_m(self) -> int:
        """Warps that share the tokens there; the others wait."""
        return min(WARPS // self.warps_n, self.tile // 16)

    @property
    def m_own(self) -> int:
        """MMA rows of 16 tokens of a warp there."""
        return self.tile // 16 // self.warps_m

    @property
    def latents(self) -> int:
        """Latents of a warp in the second half."""
        return self.latent // WARPS

    @property
    def m_sums(self) -> int:
        """MMA rows of 16 latents of a warp there."""
        return self.latents // 16

    @property
    def chains(self) -> int:
        """Sums of one score that run side by side, so that an MMA need not wait for the one before."""
        return 2 if self.m_own * self.n_own == 1 else 1

    # -- copies
    @property
    def threads_a_row(self) -> int:
        """Threads that copy a key together."""
        chunks = self.row_bytes // 16
        return next(n for n in (8, 4, 2, 1) if chunks % n == 0)

    @property
    def chunks_a_thread(self) -> int:
        """Chunks of 16 bytes a thread and pass."""
        return self.row_bytes // 16 // self.threads_a_row

    @property
    def rows_a_pass(self) -> int:
        """Keys that the block copies at once."""
        return min(self.tile, THREADS // self.threads_a_row)

    @property
    def passes(self) -> int:
        """Of a tile."""
        return self.tile // self.rows_a_pass

    # -- shared memory, in bytes from its start
    @property
    def stage_bytes(self) -> int:
        """Of a tile of keys."""
        return self.tile * self.pitch

    @property
    def query_at(self) -> int:
        """Queries [queries][query_pitch]."""
        return self.stages * self.stage_bytes

    @property
    def weights_at(self) -> int:
        """Weights [tile][weight_pitch]."""
        return self.query_at + self.queries * self.query_pitch

    @property
    def highest_at(self) -> int:
        """Highest scores [warps_m][queries] FP32, and at the end sums of weights."""
        return self.weights_at + self.tile * self.weight_pitch

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.highest_at + self.warps_m * self.queries * 4

    def part(self, tokens):  # type: ignore[no-untyped-def]  # traced integers too
        """Tokens of a part: whole tiles."""
        step = self.splits * self.tile
        return (tokens + step - 1) // step * self.tile

    @property
    def registers(self) -> int:
        """A thread's, about: sums, scores, highest scores and limits, and the rest."""
        scores = 4 * self.m_own * self.n_own * self.chains
        return 4 * self.m_sums * self.n_tiles + scores + 2 * self.n_tiles + 2 * self.n_own * 2 + 56
