"""Who does what in the CuTe DSL kernel of KDA: index arithmetic for kernel, launch and tests.

A block owns ``slice_rows`` value rows of one head's state, for the steps of one group of requests. A *step* is one token
of one request; the steps of a group are neighbouring token rows. Every formula takes Python ints and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

DIM, RANK, TAPS = 128, 128, 4
"""Head width, rank of the decay gate's projection, taps of the convolution: what the kernel is written for."""
MOST_STEPS = 8
"""Steps a block: the columns of one MMA of the gate projection."""
GATE_TILES = DIM // 16
"""Tiles of 16 gate rows a head."""
VECTORS = {"serial": 3, "rolled": 3, "wy": 5}
"""Form to vectors a step that all rows of a state share: decay, key, query; key times and over all decays so far."""


@dataclass(frozen=True)
class Split:
    """How one step of the model is shared out."""

    heads: int
    requests: int
    """Compiled for."""
    tokens: int
    """New tokens a request."""
    columns: int
    """Of a row of the fused projection."""
    parts: int
    """Blocks a head: a cluster, each with its own value rows."""
    together: int
    """Requests a block takes one after the other."""
    warps: int
    lanes: int
    """Lanes that share a row of the state."""
    depth: int
    """States of requests in flight before the first is used."""
    run: int = 4
    """Neighbouring channels that a thread convolves."""
    form: str = "serial"
    """``serial``, ``rolled`` or ``wy``: see :mod:`.cute_forms`."""

    @property
    def threads(self) -> int:
        """A block."""
        return 32 * self.warps

    @property
    def steps(self) -> int:
        """A block."""
        return self.together * self.tokens

    @property
    def groups(self) -> int:
        """Of requests."""
        return -(-self.requests // self.together)

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.groups * self.heads * self.parts

    @property
    def width(self) -> int:
        """Columns of q, of k, of v and of g."""
        return self.heads * DIM

    @property
    def slots(self) -> int:
        """Slots a request: the one it reads, and one a token that it writes."""
        return 1 + self.tokens

    def place(self, block):
        """(group of requests, head, part of the head)."""
        return block // (self.heads * self.parts), block // self.parts % self.heads, block % self.parts

    # -- the state
    @property
    def slice_rows(self) -> int:
        """Value rows a block."""
        return DIM // self.parts

    @property
    def turns(self) -> int:
        """Rows a thread has a share of."""
        return self.slice_rows * self.lanes // self.threads

    @property
    def quads(self) -> int:
        """Runs of four neighbouring keys a thread has of each of its rows."""
        return DIM // (4 * self.lanes)

    @property
    def state_words(self) -> int:
        """Of one state, a thread."""
        return 4 * self.turns * self.quads

    @property
    def state_stride(self) -> int:
        """Bytes from a slot's states to the next one's."""
        return self.heads * DIM * DIM * 4

    def row(self, thread, turn):
        """Value row of the block's slice."""
        return thread // self.lanes + turn * (self.threads // self.lanes)

    def quad(self, thread, index):
        """Number of a run of four keys: neighbouring lanes have neighbouring runs."""
        return index * self.lanes + thread % self.lanes

    @property
    def vectors(self) -> int:
        """A step, in shared memory."""
        return VECTORS[self.form]

    # -- all tokens of a request at once
    @property
    def lanes_a_sum(self) -> int:
        """Of a row: keys' sums first, then queries', two times ``padded_steps``."""
        return self.lanes // (2 * self.padded_steps)

    def dealt(self, lane):
        """(0: the key's, 1: the query's sum, step) of what a lane is dealt."""
        number = lane % self.lanes // self.lanes_a_sum
        return number // self.padded_steps, number % self.padded_steps

    def holder(self, lane, kind, step):
        """First lane of ``lane``'s row that is dealt this."""
        return lane // self.lanes * self.lanes + (kind * self.padded_steps + step) * self.lanes_a_sum

    @property
    def key_turns(self) -> int:
        """Keys over their decays that the lanes of a row take as further rows."""
        return -(-self.steps * self.lanes // self.threads)

    def key_row(self, thread, turn):
        """Step whose key that is; those from ``steps`` on are none."""
        return thread // self.lanes + turn * (self.threads // self.lanes)

    # -- what is made of a token's projections
    @property
    def spread(self) -> int:
        """Warps that share a step's query and key."""
        return 4 // self.run

    @property
    def query_turns(self) -> int:
        """Shares of a query and a key that a warp makes."""
        return -(-self.steps * self.spread // self.warps)

    def query(self, warp, turn):
        """(step, which of its shares) whose query and key a warp makes: of 16 warps those begin that have no gate rows."""
        index = (warp + max(self.warps - GATE_TILES, 0)) % self.warps + turn * self.warps
        return index // self.spread, index % self.spread

    @property
    def slice_runs(self) -> int:
        """Runs of values of the block's slice."""
        return self.slice_rows // self.run

    @property
    def value_turns(self) -> int:
        """Runs of values a thread makes."""
        return -(-self.steps * self.slice_runs // self.threads)

    def value(self, thread, turn):
        """(step, run of values): the last warps first, since the first ones make queries and keys."""
        index = turn * self.threads + self.threads - 1 - thread
        return index // self.slice_runs, index % self.slice_runs

    @property
    def gate_turns(self) -> int:
        """Tiles of 16 gate rows a warp."""
        return -(-GATE_TILES // self.warps)

    # -- the norm's sums
    @property
    def padded_steps(self) -> int:
        """Sums of a packet and its like: two, four, or twice four."""
        return 2 if self.steps <= 2 else 4 if self.steps <= 4 else 8

    @property
    def packets(self) -> int:
        """Packets a block sends each block of its cluster; one warp sends each."""
        return -(-self.padded_steps // 4)

    @property
    def expected_bytes(self) -> int:
        """What a block gets from its cluster, itself included."""
        return self.parts * self.padded_steps * 4

    # -- shared memory, in bytes from its start
    @property
    def values_at(self) -> int:
        """Behind the vectors: values [steps][slice_rows]."""
        return self.steps * self.vectors * DIM * 4

    @property
    def scalars_at(self) -> int:
        """Beta and key . query of each step."""
        return self.values_at + self.steps * self.slice_rows * 4

    @property
    def factors_at(self) -> int:
        """Of all tokens at once: what a token's u and output have of the u of others [2][padded_steps][padded_steps]."""
        return self.scalars_at + 2 * MOST_STEPS * 4

    @property
    def sums_at(self) -> int:
        """Sums of squares [warps][padded_steps]."""
        return self.factors_at + (8 * self.padded_steps**2 if self.form == "wy" else 0)

    @property
    def pushed_at(self) -> int:
        """Sums of squares of the cluster's blocks [parts][padded_steps]."""
        return self.sums_at + self.warps * self.padded_steps * 4

    @property
    def taps_at(self) -> int:
        """Taps of the block's channels: its head's queries and keys, its own values; 16 bytes a channel."""
        return -(-(self.pushed_at + self.parts * self.padded_steps * 4) // 16) * 16

    @property
    def channels(self) -> int:
        """Whose taps a block has: queries, keys, values."""
        return 2 * DIM + self.slice_rows

    @staticmethod
    def tap_place(channel):
        """Where a channel's taps lie: lanes that read every fourth channel meet no bank twice."""
        return channel ^ (channel >> 3 & 3)

    @property
    def tap_turns(self) -> int:
        """Channels whose taps a thread copies."""
        return -(-self.channels // self.threads)

    @property
    def barrier_at(self) -> int:
        """One mbarrier."""
        return self.taps_at + 16 * self.channels

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block."""
        return self.barrier_at + 16
