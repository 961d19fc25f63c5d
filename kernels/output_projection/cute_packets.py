"""Packets of the CuTe DSL kernels: where a lane's values lie in a mailbox, and how they get there."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch

# A packet is one access, data and epoch together: whoever sees the epoch has the data, so no fence orders a publish or
# a poll. 16 bytes are one access only as .b128, 8 bytes as .b64.
STORE_PACKET = (
    "{ .reg .b128 v; .reg .b64 a, b; mov.b64 a, {{$r1}, {$r2}}; mov.b64 b, {{$r3}, {$r4}}; mov.b128 v, {a, b}; "
    "st.relaxed.SCOPE.global.b128 [{$r0}], v; }"
)
STORE_PAIR = "{ .reg .b64 v; mov.b64 v, {{$r1}, {$r2}}; HOW.global.b64 [{$r0}], v; }"
# the switch copies it to every rank; of 16 bytes there is none that is one access
HOW = {"peer": "st.relaxed.sys", "multicast": "multimem.st.relaxed.sys"}
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
def publish(address: Int64, words: list, SCOPE: cutlass.Constexpr):
    """Store one packet of four words."""
    arch.inline_ptx(STORE_PACKET.replace("SCOPE", SCOPE), read_only_args=[address, *words])


@cute.jit
def publish_pair(address: Int64, word: Uint32, epoch: Uint32, STORES: cutlass.Constexpr):
    """Store one packet of a word and the epoch: to an address, or through the switch to all ranks."""
    arch.inline_ptx(STORE_PAIR.replace("HOW", HOW[STORES]), read_only_args=[address, word, epoch])


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
