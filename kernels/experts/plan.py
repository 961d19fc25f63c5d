"""Who does what in the routed kernel: static sizes and index arithmetic, shared by kernel, launch and tests.

An *item* is an expert and up to eight of the rows that chose it: the eight columns of an MMA. A unit of the first product is an
item and 16 hidden columns, of the second an item and ``warps * tasks`` times 32 output columns; of the shared expert's first product
four hidden columns, of its second ``warps`` times 8 output columns, for all rows. Units are numbered: shared first, routed first,
shared second, routed second, so that what a unit waits for lies as far back as it can; block b takes units b, b + blocks and so on.
Where blocks are reserved for the shared expert, the first ones share out its units alone and the others the routed ones.
Every formula takes Python ints and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GROUP = 32
"""Columns of a scale group, of a step, and rows of a block of the layout."""
TOKENS = 8
"""Rows of an item: columns of one MMA."""
PACKET = 16
"""Bytes of a packet: four BF16 numbers and twice the epoch, one access."""
PART = 160
"""FP32 words of one warp's sums of one tile: two tokens of 16 rows, eight words, the next two tokens."""
EXPERT_BITS, PLACE_BITS = 12, 12
"""Of an item's word: expert, then place of its first pair, then rows less one."""


@dataclass(frozen=True)
class Plan:
    """Sizes known when the kernel is compiled."""

    rows: int
    top_k: int
    experts: int
    latent: int
    inner: int
    """Of a routed expert on this rank."""
    warps: int
    """A block; they share the columns of the first product."""
    depth: int
    """Steps of weights in flight a warp."""
    x_depth: int
    """Steps of activations in flight, first product."""
    tasks: int
    """Times 32 output columns of a warp in one unit of the second product."""
    blocks: int
    """Of the grid."""
    hidden: int
    """Of the shared expert's input."""
    wide: int
    """Intermediate width of the shared expert on this rank; 0 leaves it out."""
    latent_rounding: str = ""
    """How MXFP8 scales of the latent are rounded, ``floor`` or ``ceil``; empty leaves it in BF16."""
    hidden_rounding: str = ""
    """The same of the hidden values."""
    reserved: int = 0
    """Blocks that take the shared expert's units alone; 0: all blocks take units of both."""

    @property
    def threads(self) -> int:
        """A block."""
        return 32 * self.warps

    @property
    def pairs(self) -> int:
        """Of a row and an expert, at most; also of items."""
        return self.rows * self.top_k

    @property
    def groups1(self) -> int:
        """Scale groups of the first product."""
        return self.latent // GROUP

    @property
    def groups2(self) -> int:
        """Scale groups of the second product."""
        return self.inner // GROUP

    @property
    def tiles(self) -> int:
        """Units of the first product an item."""
        return self.inner // 16

    @property
    def steps1(self) -> int:
        """Steps of a warp in a unit of the first product."""
        return self.groups1 // self.warps

    @property
    def steps2(self) -> int:
        """Steps of a warp in a unit of the second product."""
        return self.tasks * self.groups2

    @property
    def depth2(self) -> int:
        """Steps in flight in the second product: what divides them, and no more than the unit before it asks ahead for."""
        before = self.shared_depth2 if self.wide and not self.reserved else self.depth
        return max(size for size in range(1, before + 1) if self.steps2 % size == 0)

    @property
    def single(self) -> bool:
        """Whether there is one row: its slots are the items, and each warp reads their experts for itself."""
        return self.rows == 1

    @property
    def known(self) -> bool:
        """Whether activations may be asked for before experts are known: one row, as given; not beside addresses of a task's later steps."""
        return self.single and not self.latent_rounding and (self.depth2 == self.steps2 or not self.wide)

    @property
    def stashed(self) -> bool:
        """Whether a block takes an item's hidden values once, into shared memory, for all its warps; else each warp for itself.

        A single row has few, and warps that wait for them all at once would keep the L2 from the weights.
        """
        return self.single and not self.hidden_rounding

    @property
    def batch(self) -> int:
        """Scale groups whose hidden values a warp holds at once."""
        return max(size for size in range(1, 4) if self.groups2 % size == 0)

    @property
    def summed(self) -> int:
        """Experts' outputs that a lane of the weighted sum asks for in one round."""
        return self.top_k if self.single and self.top_k <= 16 else 8

    @property
    def hole(self) -> int:
        """Numbers left out of a single row's routed first products; 0: none.

        They would belong to the blocks that have a first product of the shared expert, as large as two routed ones: these leave
        two to the other blocks before they have their first.
        """
        others = self.blocks - self.shared_first
        fits = self.wide and not self.reserved and 0 < others < self.top_k * self.tiles
        return self.shared_first if self.single and fits else 0

    @property
    def spared(self) -> int:
        """First of the blocks that alone take routed second products, those with a unit less before; 0: all take them in turn.

        Of a single row, if two second products a block are enough then: the first has its hidden values early and fetches the code,
        the second has its weights when the last hidden values come. All blocks in turn leave second products to those that are late.
        """
        before = self.shared_first + self.hole + self.top_k * self.tiles + self.shared_second
        start = before % self.blocks
        few = self.top_k * self.chunks <= 2 * (self.blocks - start)
        return start if self.single and not self.reserved and before > self.blocks and few else 0

    @property
    def chunks(self) -> int:
        """Units of the second product an item."""
        return self.latent // (GROUP * self.warps * self.tasks)

    @property
    def shared_first(self) -> int:
        """Units of the shared expert's first product."""
        return self.wide // 4

    @property
    def shared_second(self) -> int:
        """Units of the shared expert's second product."""
        return self.hidden // (8 * self.warps) if self.wide else 0

    @property
    def shared_steps1(self) -> int:
        """Steps of a warp in a unit of the shared expert's first product."""
        return self.hidden // (GROUP * self.warps)

    @property
    def shared_steps2(self) -> int:
        """Steps of a warp in a unit of the shared expert's second product."""
        return self.wide // GROUP

    @property
    def shared_depth2(self) -> int:
        """Steps in flight in the shared expert's second product."""
        return max((size for size in range(1, self.depth + 1) if self.shared_steps2 % size == 0), default=1)

    @property
    def halves(self) -> int:
        """Times 8 rows that an MMA of the shared expert holds."""
        return 1 if self.rows <= 8 else 2

    @property
    def row_tiles(self) -> int:
        """Times 16 rows: MMAs of the shared expert for the same weights."""
        return -(-self.rows // 16)

    @property
    def eights(self) -> int:
        """Times 8 rows."""
        return -(-self.rows // 8)

    def shared_x_depth(self, steps: int) -> int:
        """Steps of activations in flight in a product of the shared expert of so many: 16 registers of them, or one step."""
        most = max(1, 4 // (self.halves * self.row_tiles))
        return max(size for size in range(1, most + 1) if steps % size == 0)

    @property
    def spans(self) -> int:
        """Warps that quantise one row of the latent, 256 columns each."""
        return self.latent // 256

    @property
    def row_packets(self) -> int:
        """Packets of an expert's output for one row."""
        return self.latent // 4

    @property
    def hidden_packets(self) -> int:
        """Packets of the hidden values of one pair."""
        return self.inner // 4

    @property
    def masks(self) -> int:
        """Words of rows an expert has: bit r for row r."""
        return -(-self.rows // 32)

    # places in the table of a block, in words
    @property
    def first_at(self) -> int:
        """Place of each expert's first pair."""
        return self.masks * self.experts

    @property
    def items_at(self) -> int:
        """Items."""
        return self.first_at + self.experts

    @property
    def rows_at(self) -> int:
        """Row of each pair."""
        return self.items_at + self.pairs

    @property
    def ids_at(self) -> int:
        """Expert of each row's slot."""
        return self.rows_at + self.pairs

    @property
    def scan_at(self) -> int:
        """Sums of the warps."""
        return self.ids_at + self.pairs

    @property
    def table_words(self) -> int:
        """Of all of it; of a single row the experts of its slots, once a warp, then what is stashed of two items."""
        if self.single:
            return self.stash_at + (4 * self.hidden_packets if self.stashed else 0)
        return self.scan_at + self.warps

    @property
    def stash_at(self) -> int:
        """Hidden values, two words a packet, 16 bytes a lane's share of a group."""
        return -(-self.warps * self.top_k // 4) * 4

    def stashed_at(self, parity: Any, packet: Any) -> Any:
        """First word of a packet of hidden values in the table."""
        return self.stash_at + (parity * self.hidden_packets + packet) * 2

    @property
    def parts(self) -> int:
        """FP32 words of the sums of all warps, two units' worth."""
        return 2 * self.warps * self.part_words

    @property
    def part_words(self) -> int:
        """FP32 words of one warp's sums of a unit: a routed one's two tiles, or the shared expert's rows of 8, 9 apart."""
        return max(2 * PART, 9 * self.rows if self.wide else 0)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 4 * self.parts + 16 * -(-self.table_words // 4)

    def item_word(self, expert: Any, place: Any, count: Any) -> Any:
        """One word for an item; ``count`` of rows from 1 to 8."""
        return expert | (place << EXPERT_BITS) | ((count - 1) << (EXPERT_BITS + PLACE_BITS))

    def item_parts(self, word: Any) -> tuple[Any, Any, Any]:
        """(expert, place, count) of an item's word."""
        place = (word >> EXPERT_BITS) & ((1 << PLACE_BITS) - 1)
        return word & ((1 << EXPERT_BITS) - 1), place, (word >> (EXPERT_BITS + PLACE_BITS)) + 1

    def first_block(self, expert: Any, tile: Any, warp: Any) -> Any:
        """Block of w13 at which a warp begins its unit; it takes ``steps1`` in a row."""
        return (expert * self.tiles + tile) * self.groups1 + warp * self.steps1

    def second_block(self, expert: Any, chunk: Any, warp: Any) -> Any:
        """Block of w2 at which a warp begins its unit; it takes ``steps2`` in a row."""
        return (expert * self.groups1 + (chunk * self.warps + warp) * self.tasks) * self.groups2

    def shared_first_block(self, unit: Any, warp: Any) -> Any:
        """Block of gate_up at which a warp begins its unit; it takes ``shared_steps1`` in a row."""
        return unit * (self.hidden // GROUP) + warp * self.shared_steps1

    def shared_second_block(self, unit: Any, warp: Any) -> Any:
        """Block of down at which a warp begins its unit; it takes ``shared_steps2`` in a row."""
        return (unit * self.warps + warp) * self.shared_steps2

    def part_at(self, parity: Any, warp: Any, tile: Any, row: Any, token: Any) -> Any:
        """Word of a sum: no two lanes of a store, or of a load of two tokens' rows, share a bank."""
        return (parity * self.warps + warp) * self.part_words + tile * PART + token // 2 * 40 + token % 2 * 16 + row

    def shared_part_at(self, parity: Any, warp: Any, row: Any, column: Any) -> Any:
        """Word of a sum of the shared expert: columns 0 to 3 of gate, then of up."""
        return (parity * self.warps + warp) * self.part_words + row * 9 + column

    def hidden_at(self, pair: Any, group: Any, quad: Any, half: Any) -> Any:
        """Packet of hidden columns ``32 group + 8 quad + 4 half`` onwards."""
        return pair * self.hidden_packets + group * 8 + quad * 2 + half

    def output_at(self, pair: Any, packet: Any) -> Any:
        """Packet of output columns ``4 packet`` onwards."""
        return pair * self.row_packets + packet

    def refusal(self) -> str | None:
        """What does not divide, or None."""
        if self.groups1 % self.warps:
            return f"{self.groups1} scale groups of the latent do not divide over {self.warps} warps"
        if self.steps1 % self.depth or self.steps1 % self.x_depth:
            return f"{self.depth} or {self.x_depth} steps in flight do not divide the {self.steps1} of a warp"
        if self.latent_rounding and (self.latent % 256 or self.rows * self.spans > self.blocks * self.warps):
            return (
                f"{self.blocks} blocks of {self.warps} warps do not quantise {self.rows} rows of {self.latent} at once"
            )
        if self.latent % 128:
            return f"latent {self.latent} is not a multiple of 128, the columns that a warp sums at once"
        if self.wide and (self.hidden % (GROUP * self.warps) or self.shared_steps1 % self.depth):
            return f"{self.depth} steps in flight do not divide the {self.hidden / GROUP / self.warps:g} of a warp"
        if self.reserved and (not self.wide or self.reserved >= self.blocks):
            return f"{self.reserved} of {self.blocks} blocks for {'the shared expert' if self.wide else 'a shared expert that is not there'}"
        if self.wide % GROUP or self.inner % GROUP:
            return f"intermediate widths {self.inner} and {self.wide} are not multiples of {GROUP}"
        if self.groups1 % (self.warps * self.tasks):
            return f"{self.warps} warps of {self.tasks} times {GROUP} columns do not divide latent {self.latent}"
        return None
