"""Index arithmetic of contexts over ranks: who holds which token, and where queries and rows lie in the mailboxes.

Every formula takes Python integers and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Buffer
from ..output_projection.mailbox import PARITIES, epochs_buffer

MOST_RANKS = 16
LAUNCHES = ("query", "attend", "send", "value")
"""In their order; each block of each has a counter of its own."""


@dataclass(frozen=True)
class Ranks:
    """Token t of a context lies with rank ``t % size``, there as number ``t // size``.

    Two mailboxes, slot r of each written by rank r: queries ``[ranks][parity][row][head][word]``, all of rank r's heads, a
    word of the query (two BF16 values or four E4M3 codes) and the epoch a packet; rows ``[ranks][parity][row][head][quad]``,
    what rank r has for this rank's heads, four BF16 latents, the logarithm of the row's weight and the epoch a packet.
    """

    size: int
    rows: int
    """Rows compiled for."""
    heads: int
    """Of one rank."""
    width: int
    """Values of a query."""
    latent: int
    fp8: bool
    blocks: tuple[int, int, int, int]
    """Of the grids of :data:`LAUNCHES`, those that keep a counter."""
    jitter: int = 0
    """Tests only: seed of random delays at every hand-over."""

    @property
    def all_heads(self) -> int:
        """Of all ranks."""
        return self.size * self.heads

    def held(self, tokens, rank):  # type: ignore[no-untyped-def]  # traced integers too
        """How many of the first ``tokens`` tokens lie with a rank."""
        return (tokens + (self.size - 1) - rank) // self.size

    # -- queries
    @property
    def query_words(self) -> int:
        """Words of one head's query."""
        return self.width // (4 if self.fp8 else 2)

    @property
    def query_bytes(self) -> int:
        """Of one head's packets."""
        return self.query_words * 8

    @property
    def query_slot(self) -> int:
        """Bytes from a rank's slot to the next."""
        return PARITIES * self.rows * self.heads * self.query_bytes

    def query_within(self, parity, row, head):  # type: ignore[no-untyped-def]
        """Byte in a slot where a row's query of a rank's own head begins."""
        return ((parity * self.rows + row) * self.heads + head) * self.query_bytes

    # -- rows
    @property
    def quads(self) -> int:
        """Packets of one row of a head."""
        return self.latent // 4

    @property
    def row_slot(self) -> int:
        """Bytes from a rank's slot to the next."""
        return PARITIES * self.rows * self.heads * self.quads * 16

    def row_within(self, parity, row, head, quad):  # type: ignore[no-untyped-def]
        """Byte in a slot of four latents of a row of the owner's own head."""
        return (((parity * self.rows + row) * self.heads + head) * self.quads + quad) * 16

    # -- counters
    @property
    def counters(self) -> int:
        """Blocks that count launches."""
        return sum(self.blocks)

    def counters_at(self, launch: str) -> int:
        """Byte where a launch's counters begin."""
        return 4 * sum(self.blocks[: LAUNCHES.index(launch)])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Mailboxes, tables of targets, counters; the health record is the engine's to list."""
        return (
            Buffer("queries", (self.size, self.query_slot // 4), "int32", persistent=True),
            Buffer("queries_targets", (self.size, 2), "int64", targets_of="queries"),
            Buffer("latents", (self.size, self.row_slot // 4), "int32", persistent=True),
            Buffer("latents_targets", (self.size, 2), "int64", targets_of="latents"),
            epochs_buffer("epochs", self.counters),
        )

    @property
    def received_bytes(self) -> int:
        """What one rank receives from the others in a step of all rows."""
        return (self.size - 1) * (self.query_slot + self.row_slot) // PARITIES
