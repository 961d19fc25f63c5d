"""The layout in which routed experts are held on the GPU: the checkpoint's bits, in the order a tensor core wants them.

A matrix is cut into blocks of 32 rows by one scale group of 32 columns. A block is 512 bytes, 16 a lane, and 32 bytes of
scales: what one warp takes in one step, as two tiles of 16 rows in two MMAs m16n8k16 each. Where the 128 bits of a
lane's codes lie is chosen so that :func:`operands` makes its 16 operand words with one instruction a weight: most pairs
of codes are a shift and a mask away from being a pair of BF16 numbers. The change is a bijection, checked by a test.

:func:`operands` takes Python ints and traced words alike. torch is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from .twin import ExpertWeights

ROWS = 32
"""Rows of a block: two MMA tiles of 16."""
COLUMNS = 32
"""Columns of a block: one scale group, two MMAs of 16."""
BLOCK_BYTES = 512
SCALE_BYTES = 32
WORDS, OPERANDS = 4, 16
"""32-bit words of a lane and block: as loaded, and as MMA operands."""
LOADED = ("w13", "w13_scale", "w2", "w2_scale")
"""Names of the held tensors of the routed experts."""
SHARED = ("gate_up", "down")
"""Of the shared expert: blocks of 8 rows by 32 columns in BF16, as many bytes."""

MASK = 0x81C081C0
"""Bits of a pair of BF16 numbers that a pair of E2M1 codes fills: sign, and three at the foot of the exponent."""
LEFT = 0x0C180C18
"""Bits of a word that its three own pairs leave; two neighbouring words share two more pairs in them."""
LIFTED = 0
"""The switch of a tensor core's subnormals: 0 leaves operands as their bits are, and E2M1's 0.5 a BF16 subnormal; 126 multiplies
them by two to this before the MMA, 16 more instructions for 32 weights a lane, so that none is one."""
WEIGHT_EXPONENT = LIFTED - 126
"""An operand of an MMA is the code's value times two to this."""
ACTIVATION_EXPONENT = 0 if LIFTED else 100
"""Activations are multiplied by two to this, exactly, so that products are no subnormals of FP32."""


def joined(first: Any, second: Any) -> Any:
    """The bits :data:`LEFT` of the one, all others of the other: one instruction, if the compiler is told so."""
    return (first & LEFT) | (second & (LEFT ^ 0xFFFFFFFF))


def operands(words: Sequence[Any], join: Callable[[Any, Any], Any] = joined) -> list[Any]:
    """The 16 MMA operand words of a lane's four words of a block: of tile 0, then of tile 1, each two steps of four.

    16 instructions for two words, so one a weight: 9 of logic, 3 funnel shifts and 4 left shifts, which may also be multiplied.
    """
    of = type(words[0])  # a traced word stays one of 32 bits
    mask, made = of(MASK), []
    for first, second in ((words[0], words[1]), (words[2], words[3])):
        for word in (first, second):
            made += [word & mask, (word << 6) & mask, ((word << 10) | (word >> 22)) & mask]
        both = join(first, second << 2)
        made += [(both << 2) & mask, ((both << 28) | (both >> 4)) & mask]
    return made


@cache
def places() -> tuple[int, ...]:
    """For bit ``4 c + b`` of the codes, code c = 2 (operand) + half: which bit of the 128 holds it. A permutation.

    Read off :func:`operands`, which moves bits and never mixes them.
    """
    found = [-1] * 128
    for source in range(128):
        words = [(1 << source % 32) if word == source // 32 else 0 for word in range(WORDS)]
        ((operand, value),) = [(place, value) for place, value in enumerate(operands(words)) if value]
        bit = value.bit_length() - 1
        code_bit = {6: 0, 7: 1, 8: 2, 15: 3}[bit % 16]
        found[4 * (2 * operand + bit // 16) + code_bit] = source
    return tuple(found)


def _lanes(blocks: Tensor) -> Tensor:
    """Codes [..., 32, 32] of blocks as [..., 32 lanes, 32 codes]: lane 4 g + q, code 2 (operand) + half."""
    parts = blocks.unflatten(-1, (4, 2, 2, 2)).unflatten(-5, (2, 2, 8))  # tile, upper, g, q, step, next, half
    order = (-5, -4, -7, -3, -2, -6, -1)
    lead = tuple(range(parts.dim() - 7))
    return parts.permute(*lead, *(parts.dim() + axis for axis in order)).flatten(-5).flatten(-3, -2)


def _blocks(lanes: Tensor) -> Tensor:
    """Inverse of :func:`_lanes`."""
    parts = lanes.unflatten(-1, (2, 2, 2, 2, 2)).unflatten(-6, (8, 4))  # g, q, tile, step, next, upper, half
    order = (-5, -2, -7, -6, -4, -3, -1)
    lead = tuple(range(parts.dim() - 7))
    return parts.permute(*lead, *(parts.dim() + axis for axis in order)).flatten(-4).flatten(-4, -2)


def _bits(values: Tensor, width: int) -> Tensor:
    """Lowest bits first, [..., n] to [..., n, width]."""
    import torch

    return (values[..., None] >> torch.arange(width, device=values.device, dtype=values.dtype)) & 1


def _from_bits(bits: Tensor) -> Tensor:
    """Bytes of [..., 8 n] bits, lowest first."""
    import torch

    factors = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, 8)) * factors).sum(-1, dtype=torch.uint8)


def encode_block(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [..., 32, 32], to the bytes of their blocks, uint8 [..., 512]."""
    import torch

    moved = torch.empty(128, dtype=torch.long, device=codes.device)
    moved[torch.tensor(places(), device=codes.device)] = torch.arange(128, device=codes.device)
    return _from_bits(_bits(_lanes(codes), 4).flatten(-2)[..., moved]).flatten(-2)


def decode_block(data: Tensor) -> Tensor:
    """Inverse of :func:`encode_block`."""
    import torch

    bits = _bits(data.unflatten(-1, (32, 16)), 8).flatten(-2)
    bits = bits[..., torch.tensor(places(), device=data.device)].unflatten(-1, (32, 4))
    factors = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=data.device)
    return _blocks((bits * factors).sum(-1, dtype=torch.uint8))


def _scales(scales: Tensor) -> Tensor:
    """Scales of a block's rows, [..., 32], as held: row g of each half tile beside the others', g ascending."""
    return scales.unflatten(-1, (2, 2, 8)).movedim(-1, -3).flatten(-3)


def _row_scales(held: Tensor) -> Tensor:
    """Inverse of :func:`_scales`."""
    return held.unflatten(-1, (8, 2, 2)).movedim(-3, -1).flatten(-3)


def _cut(matrix: Tensor, width: int) -> Tensor:
    """[..., 32 r, width c] as [..., r, c, 32, width]."""
    return matrix.unflatten(-2, (-1, ROWS)).unflatten(-1, (-1, width)).movedim(-3, -2)


def _joined(blocks: Tensor) -> Tensor:
    """Inverse of :func:`_cut`."""
    return blocks.movedim(-2, -3).flatten(-2).flatten(-3, -2)


def _gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of w1 and w3 as the blocks take them: 16 of the one, then the same 16 of the other."""
    import torch

    return torch.stack((gate.unflatten(-2, (-1, 16)), up.unflatten(-2, (-1, 16))), -3).flatten(-4, -2)


def _down(matrix: Tensor) -> Tensor:
    """Rows of w2 as the blocks take them: a lane's four rows are four neighbours, so that its results are."""
    return matrix.unflatten(-2, (-1, 8, 2, 2)).movedim(-4, -2).flatten(-5, -2)


def _up_rows(matrix: Tensor) -> Tensor:
    """Inverse of :func:`_down`."""
    return matrix.unflatten(-2, (-1, 2, 2, 8)).movedim(-2, -4).flatten(-5, -2)


def load(experts: ExpertWeights) -> dict[str, Tensor]:
    """Experts in the checkpoint's layout to the tensors that kernels read; no bit is lost.

    Args:
        experts: packed codes and scales, leading dimension the experts.

    Returns:
        ``w13`` [E, I/16, L/32, 512], ``w13_scale`` [E, I/16, L/32, 32], ``w2`` [E, L/32, I/32, 512] and ``w2_scale``
        [E, L/32, I/32, 32], all uint8.

    Raises:
        InputError: latent or intermediate width is not a multiple of 32.
    """
    from ..mxfp4 import unpack

    inner, latent = experts.w1.shape[-2], experts.w2.shape[-2]
    if inner % ROWS or latent % ROWS:
        raise InputError(f"experts of {latent} x {inner}: both widths must be multiples of {ROWS}")
    first, first_scale = _gate_up(unpack(experts.w1), unpack(experts.w3)), _gate_up(experts.w1_scale, experts.w3_scale)
    second, second_scale = _down(unpack(experts.w2)), _down(experts.w2_scale)
    return {
        "w13": encode_block(_cut(first, COLUMNS)),
        "w13_scale": _scales(_cut(first_scale, 1).squeeze(-1)),
        "w2": encode_block(_cut(second, COLUMNS)),
        "w2_scale": _scales(_cut(second_scale, 1).squeeze(-1)),
    }


def unload(held: dict[str, Tensor]) -> ExpertWeights:
    """Inverse of :func:`load`: the checkpoint's layout again."""
    from ..mxfp4 import pack
    from .twin import ExpertWeights

    first, first_scale = _joined(decode_block(held["w13"])), _joined(_row_scales(held["w13_scale"])[..., None])
    gate, up = first.unflatten(-2, (-1, 2, 16)).unbind(-3)
    gate_scale, up_scale = first_scale.unflatten(-2, (-1, 2, 16)).unbind(-3)
    second = _up_rows(_joined(decode_block(held["w2"])))
    second_scale = _up_rows(_joined(_row_scales(held["w2_scale"])[..., None]))
    return ExpertWeights(
        pack(gate.flatten(-3, -2)), gate_scale.flatten(-3, -2), pack(up.flatten(-3, -2)), up_scale.flatten(-3, -2),
        pack(second), second_scale,
    )  # fmt: skip


def _tiled(matrix: Tensor) -> Tensor:
    """[8 r, 32 c] as [r, c, 256]."""
    return matrix.unflatten(0, (-1, 8)).unflatten(-1, (-1, COLUMNS)).movedim(1, 2).flatten(-2)


def _untiled(blocks: Tensor) -> Tensor:
    """Inverse of :func:`_tiled`."""
    return blocks.unflatten(-1, (8, COLUMNS)).movedim(2, 1).flatten(-2).flatten(0, 1)


def load_shared(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The shared expert's matrices to the tensors that kernels read: one step of a warp is 512 bytes in a row.

    Args:
        gate: [I, H].
        up: [I, H].
        down: [H, I].

    Returns:
        ``gate_up`` [I/4, H/32, 256], each block four rows of gate and the same four of up; ``down`` [H/8, I/32, 256].

    Raises:
        InputError: a width is not a multiple of 32.
    """
    import torch

    inner, hidden = gate.shape
    if inner % COLUMNS or hidden % COLUMNS:
        raise InputError(f"shared expert of {hidden} x {inner}: both widths must be multiples of {COLUMNS}")
    rows = torch.stack((gate.unflatten(0, (-1, 4)), up.unflatten(0, (-1, 4))), 1).flatten(0, 2)
    return {"gate_up": _tiled(rows), "down": _tiled(down)}


def unload_shared(gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of :func:`load_shared`: (gate, up, down)."""
    gate, up = _untiled(gate_up).unflatten(0, (-1, 2, 4)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1), _untiled(down)
