"""Who chooses what in the router's kernels: index arithmetic, as in :mod:`.layout`."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import Board, power_of_two


@dataclass(frozen=True)
class Choice:
    """The choice: block i of ``blocks`` takes ``rows_a_block`` rows, some warps a row.

    A thread holds ``pairs_a_lane`` pairs of neighbouring experts, in ascending order.
    """

    board: Board
    top_k: int
    blocks: int
    warps: int

    @property
    def experts(self) -> int:
        """All ranks'."""
        return self.board.ranks * self.board.logits

    @property
    def rows_a_block(self) -> int:
        """Rows that a block takes, at once."""
        return -(-self.board.rows // self.blocks)

    @property
    def warps_a_row(self) -> int:
        """Warps that share a row."""
        return self.warps // self.rows_a_block

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return 32 * self.warps_a_row

    @property
    def pairs(self) -> int:
        """Of experts."""
        return self.experts // 2

    @property
    def pairs_a_lane(self) -> int:
        """At most: the last may be beyond the experts."""
        return -(-self.pairs // self.lanes)

    def pair(self, lane, index):
        """Which pair of experts a thread of the row holds."""
        return index * self.lanes + lane

    def place(self, pair):
        """(rank, first word) of a pair of experts."""
        half = self.board.logits // 2
        return pair // half, pair % half * 2

    @property
    def groups_a_warp(self) -> int:
        """Sets of lanes of a warp whose best expert is looked for first."""
        return power_of_two(32 // self.warps_a_row + 1) // 2 if self.warps_a_row <= 32 else 1

    @property
    def groups(self) -> int:
        """Of a row: at least as many as experts are chosen, at most 32."""
        return self.warps_a_row * self.groups_a_warp

    @property
    def filled(self) -> int:
        """Groups that have an expert."""
        return -(-min(self.pairs, self.lanes) // 32) * self.groups_a_warp

    @property
    def most(self) -> int:
        """Candidates of a row, in whole eights: all experts of as many groups as experts are chosen."""
        return max(32, -(-self.top_k * (32 // self.groups_a_warp) * 2 * self.pairs_a_lane // 8) * 8)

    def sizes(self) -> tuple[int, ...]:
        """Bytes of shared memory, in whole 16, piece by piece: best of each group; candidates; their scores; counts."""
        rows = self.rows_a_block
        pieces = (rows * 32 * 8, rows * self.most * 8, rows * self.most * 4, rows * 2 * 4)
        return tuple(-(-size // 16) * 16 for size in pieces)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return sum(self.sizes())
