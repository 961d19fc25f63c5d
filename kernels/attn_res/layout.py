"""Who loads, multiplies and tells what in AttnRes' CuTe DSL kernel: for kernel, engine and tests.

A row of tokens is a cluster's. Its columns go in steps of 32, a warp's whole steps side by side with the other warps'.
Every formula takes Python ints and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_BLOCKS = 8
"""Saved blocks: rows 0 to 7 of the MMA; row 8 is the prefix, rows 9 and 10 the two halves of the query."""
WIDTH = 32
"""Columns of a step: a lane's 16 bytes of each of its sources."""
PREFIX = 8
LAST = 88
WORDS = 92
"""Of a part: [11][8] products of rows with saved blocks; then, from ``LAST`` on, of rows 8 to 10 with the prefix; and one more,
so that all are whole packets of 16 bytes."""


@dataclass(frozen=True)
class Row:
    """A row of ``hidden`` columns over ``cluster`` blocks of ``warps`` warps."""

    hidden: int
    cluster: int
    warps: int
    depth: int
    """Steps of weights in flight before the dependency wait."""

    @property
    def threads(self) -> int:
        """A block."""
        return 32 * self.warps

    @property
    def steps(self) -> int:
        """Of a warp."""
        return self.hidden // (WIDTH * self.cluster * self.warps)

    @property
    def ahead(self) -> int:
        """Steps of weights in flight."""
        return min(self.depth, self.steps)

    def column(self, part, warp, step):
        """First column of a warp's step in block ``part`` of the cluster."""
        return ((part * self.steps + step) * self.warps + warp) * WIDTH

    # -- products of sources with each other
    @property
    def words(self) -> int:
        """Of a part."""
        return WORDS

    def word(self, row, column):
        """Where the product of MMA row ``row`` (0 to 10) and saved block ``column`` lies in a part."""
        return row * 8 + column

    def last_word(self, row):
        """Where the product of MMA row ``row`` (8 to 10) and the prefix lies in a part."""
        return LAST + row - PREFIX

    # -- what of the mix a lane ends with
    def out_column(self, lane):
        """First of the two columns of a step that a lane ends with, as the lane four away does."""
        return lane % 4 * 8 + lane // 8 * 2

    @property
    def part_words(self) -> int:
        """Shared memory of the warps' parts."""
        return self.warps * WORDS

    @property
    def told_words(self) -> int:
        """Shared memory of the blocks' parts, which every block gets from every other."""
        return self.cluster * WORDS
