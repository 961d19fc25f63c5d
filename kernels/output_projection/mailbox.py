"""Where each packet of the output projection's exchange lies: one set of functions for engines, model and tests.

A mailbox is ``[ranks][2 parities][rows][packets]``: slot r of it is written by rank r. A packet is one atomic
access and says itself whether it is the awaited one, by the epoch it carries; nothing is ever cleared. Every launch
publishes all rows it was compiled for, live or not: what a packet's place held before is then always the epoch two
before, so that 16 bits of the epoch are enough for ever. ``PROTOCOL.md`` beside this file says why that is safe.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Buffer
from ..errors import InputError

PARITIES = 2
ROW_WORDS = 4
"""32-bit words of a row packet: three FP32 values and an epoch of 32 bits."""


@dataclass(frozen=True)
class Packet:
    """One atomic access: values and the epoch they belong to."""

    name: str
    values: int
    """BF16 values it carries."""
    bytes: int
    """Its size and alignment, and the width of the one access that reads or writes it."""
    epoch_bits: int
    """It carries that many low bits of the epoch, in its last bytes."""

    @property
    def efficiency(self) -> float:
        """Payload of what crosses the link."""
        return 2 * self.values / self.bytes

    def tag(self, epoch: int) -> int:
        """What a packet of the epoch carries."""
        return epoch & ((1 << self.epoch_bits) - 1)

    @property
    def group(self) -> tuple[int, int]:
        """(packets, columns) that belong together: see :meth:`columns`."""
        return (8, 8 * self.values) if self.values % 2 else (1, self.values)

    def count(self, columns: int) -> int:
        """Packets that hold so many columns.

        Raises:
            InputError: they are no whole groups.
        """
        packets, width = self.group
        if columns % width:
            raise InputError(f"{columns} columns are no multiple of {width}, as packets {self.name} need")
        return columns // width * packets

    def columns(self, index: int) -> tuple[int, ...]:
        """Which columns a packet holds, in the order of its values.

        With an odd number of values eight packets share their columns: each has pairs of neighbours 16 apart, and
        one of the last eight. So the words of a packet are what lies in memory, and the eight lanes that hold the
        packets read whole runs of 32 bytes.
        """
        packets, width = self.group
        group, place = divmod(index, packets)
        pairs = [group * width + 2 * packets * pair + 2 * place for pair in range(self.values // 2)]
        last = (group * width + width - packets + place,) if self.values % 2 else ()
        return (*(column for pair in pairs for column in (pair, pair + 1)), *last)


PACKETS = {
    one.name: one
    for one in (
        Packet("bf16x7e16", 7, 16, 16),  # 7168 = 7 x 1024: one .b128 access
        Packet("b32e32", 2, 8, 32),  # one .b64 access
    )
}
"""The forms an engine may choose from."""


def packet(name: str) -> Packet:
    """The form of that name.

    Raises:
        InputError: there is none.
    """
    if name not in PACKETS:
        raise InputError(f"no packet form {name!r}; there are {', '.join(PACKETS)}")
    return PACKETS[name]


def parity(epoch: int) -> int:
    """Which of the two halves of a slot an epoch uses."""
    return epoch & 1


@dataclass(frozen=True)
class Layout:
    """A mailbox of one rank."""

    ranks: int
    rows: int
    """All that were compiled for: a launch with fewer live ones publishes them all the same."""
    columns: int
    """Of the hidden size that each slot holds."""
    form: Packet

    @property
    def packets(self) -> int:
        """Packets a row."""
        return self.form.count(self.columns)

    @property
    def row_bytes(self) -> int:
        """From a row to the next."""
        return self.packets * self.form.bytes

    @property
    def parity_bytes(self) -> int:
        """From a parity to the other."""
        return self.rows * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """From a rank's slot to the next; a multiple of 16."""
        return -(-PARITIES * self.parity_bytes // 16) * 16

    @property
    def bytes(self) -> int:
        """Of the mailbox."""
        return self.ranks * self.slot_bytes

    def within(self, epoch: int, row: int, index: int) -> int:
        """Byte offset in a slot: what is added to a target's address."""
        assert 0 <= row < self.rows and 0 <= index < self.packets
        return parity(epoch) * self.parity_bytes + row * self.row_bytes + index * self.form.bytes

    def offset(self, slot: int, epoch: int, row: int, index: int) -> int:
        """Byte offset in the mailbox: where its owner polls."""
        assert 0 <= slot < self.ranks
        return slot * self.slot_bytes + self.within(epoch, row, index)

    @property
    def received_bytes(self) -> int:
        """What one rank receives in a launch, its own slot counted too."""
        return self.ranks * self.parity_bytes

    def buffers(self, name: str) -> tuple[Buffer, Buffer]:
        """The mailbox and its table of targets, for an engine's list of buffers."""
        words = self.slot_bytes // 4
        return (
            Buffer(name, (self.ranks, words), "int32", persistent=True),
            Buffer(f"{name}_targets", (self.ranks, 2), "int64", targets_of=name),
        )


def one_shot(ranks: int, rows: int, hidden: int, form: Packet) -> Layout:
    """Every rank gets every rank's whole partial, [rows, hidden]."""
    return Layout(ranks, rows, hidden, form)


def two_shot(ranks: int, rows: int, hidden: int, form: Packet) -> tuple[Layout, Layout]:
    """(partials, totals): rank p gets its columns p of every partial, sums them, and sends the sums to all.

    Columns p are ``p * hidden / ranks`` and on; both mailboxes have hidden / ranks columns a slot.

    Raises:
        InputError: the columns do not divide.
    """
    if hidden % ranks:
        raise InputError(f"{hidden} columns do not divide over {ranks} owners")
    shard = Layout(ranks, rows, hidden // ranks, form)
    return shard, shard


@dataclass(frozen=True)
class RowExchange:
    """Scalars of a row that its units tell each other on their own GPU: ``[rows][packets][units]``.

    A packet is 16 bytes, three FP32 values and all 32 bits of the epoch, one .b128 access. One parity is enough: it
    is published after the dependency wait, when all that read the one before have ended.
    """

    rows: int
    units: int
    """Pieces a row is shared out in."""
    packets: int
    """Packets of one unit in one launch, each at its own place."""

    @property
    def words(self) -> int:
        """int32 words of the buffer."""
        return self.rows * self.units * self.packets * ROW_WORDS

    def offset(self, row: int, unit: int, index: int) -> int:
        """Byte offset of a packet."""
        assert 0 <= row < self.rows and 0 <= unit < self.units and 0 <= index < self.packets
        return ((row * self.packets + index) * self.units + unit) * ROW_WORDS * 4

    def buffer(self, name: str) -> Buffer:
        """For an engine's list of buffers."""
        return Buffer(name, (self.words,), "int32", persistent=True)


def epochs_buffer(name: str, blocks: int) -> Buffer:
    """The launch counters, for an engine's list of buffers: one word a block, each block's own.

    A block reads its counter after its dependency wait; one more is the epoch of this launch, and that it writes
    back before it exits. Counters run freely through all 32 bits; on all ranks they are equal, since all ranks make
    the same launches.
    """
    return Buffer(name, (blocks,), "int32", persistent=True)


def pack(form: Packet, values: list[int], epoch: int) -> bytes:
    """A packet as memory holds it: BF16 bit patterns, zeros for those that are missing, then the epoch."""
    assert len(values) <= form.values
    padded = [*values, *([0] * (form.values - len(values)))]
    data = b"".join(value.to_bytes(2, "little") for value in padded)
    return data + form.tag(epoch).to_bytes(form.epoch_bits // 8, "little")


def unpack(form: Packet, data: bytes, epoch: int) -> list[int] | None:
    """The BF16 bit patterns of a packet, or None where it belongs to another epoch."""
    assert len(data) == form.bytes
    if int.from_bytes(data[2 * form.values :], "little") != form.tag(epoch):
        return None
    return [int.from_bytes(data[2 * place : 2 * place + 2], "little") for place in range(form.values)]
