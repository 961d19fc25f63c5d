"""Packets of the CuTe DSL kernels: where a lane's values lie in a mailbox, and how they get there."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

from .cute_waits import publish, publish_pair

SCALE = "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};"
# bytes that eight lanes' 56 values take: eight packets of seven, or 28 of two
GROUP_BYTES = {"bf16x7e16": 128, "b32e32": 224}


@cute.jit
def pair_offset(packet: Int32, word: Int32):
    """Bytes from the start of a slot's packets to a word of a lane's seven values, where two values are a packet.

    Words 0 to 2 are pairs; word 3 is the seventh value, which two lanes share.
    """
    mine = word * 64 + packet % 8 * 8
    return packet // 8 * 224 + (mine if word < 3 else 192 + packet % 8 // 2 * 8)


@cute.jit
def offsets(packet: Int32, FORM: cutlass.Constexpr):
    """Bytes from the start of a slot's packets to what a lane polls: one access of four words, or four of two."""
    if cutlass.const_expr(FORM == "b32e32"):
        return [pair_offset(packet, word) for word in range(4)]
    return [packet * 16]


@cute.jit
def times(word: Uint32, factor: Uint32):
    """Two BF16 values times a power of two."""
    return arch.inline_ptx(SCALE, write_only_types=[Uint32], read_only_args=[word, factor])


@cute.jit
def both(mine: Uint32, neighbour: Uint32):
    """The seventh values of an even lane's packet and of the next one's in one word."""
    return (mine & Uint32(0xFFFF)) | (neighbour << 16)


@cute.jit
def send(
    slot: Int64, packet: Int32, words: list, factor: Uint32, epoch: Uint32, FORM: cutlass.Constexpr
):  # fmt: skip
    """A lane's seven values times a power of two, to one rank; of two values a packet, ``words[3]`` is of both lanes."""
    scaled = [times(word, factor) for word in words]
    if cutlass.const_expr(FORM == "b32e32"):
        for word in cutlass.range_constexpr(3):
            publish_pair(slot + pair_offset(packet, word), scaled[word], epoch, "peer")
        if packet % 2 == 0:
            publish_pair(slot + pair_offset(packet, 3), scaled[3], epoch, "peer")
    else:
        publish(slot + packet * 16, [*scaled[:3], (scaled[3] & Uint32(0xFFFF)) | (epoch << 16)], "sys")


@cute.jit
def send_to_all(slot: Int64, packet: Int32, quad: Int32, word: Uint32, factor: Uint32, epoch: Uint32):
    """Word ``quad`` of packet ``packet`` by one store that the switch copies; of the seventh values an even lane's."""
    if quad < 3 or packet % 2 == 0:
        publish_pair(slot + pair_offset(packet, quad), times(word, factor), epoch, "multicast")
