"""MXFP4 weights and MXFP8 activations as the checkpoint and the serving stacks define them.

MXFP4 (OCP MX): E2M1 codes, two a byte with the even column in the low nibble, and one E8M0 scale
``2^(byte - 127)`` for every 32 consecutive input columns. MXFP8: E4M3 with the same scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .errors import InputError
from .numerics import compute_dtype, round_e4m3

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code; bit 3 is the sign."""
GROUP = 32
"""Columns that share a scale."""
Rounding = Literal["floor", "ceil"]

ROUNDINGS: dict[str, tuple[Rounding | None, Rounding | None]] = {
    "bf16": (None, None),
    "mxfp8_floor": ("floor", "floor"),
    "mxfp8_ceil": ("ceil", "ceil"),
    "mxfp8_ceil_floor": ("ceil", "floor"),
}
"""Activation mode of the experts to the MXFP8 scale rounding of (latent, hidden); None keeps BF16. The
specialised serving path runs ``mxfp8_ceil_floor`` at TP8 and ``mxfp8_ceil`` at TP16."""


def pack(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [..., K], to bytes [..., K/2]: column 2j in the low nibble of byte j."""
    if codes.shape[-1] % 2:
        raise InputError(f"{codes.shape[-1]} columns do not pack two a byte; the count must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack`: uint8 [..., K/2] to codes [..., K]."""
    import torch

    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_scale(scale: Tensor) -> Tensor:
    """E8M0 bytes to float32, exactly: ``2^(byte - 127)``; 255 is NaN."""
    import torch

    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 0x0040_0000, bits)  # 2^-127 is a float32 subnormal
    bits = torch.where(scale == 255, 0x7FC0_0000, bits)
    return bits.to(torch.int32).view(torch.float32)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [..., K] from packed codes [..., K/2] and scales [..., K/32], both uint8.

    Exact in bfloat16 and wider while ``6 * scale`` stays in range.

    Raises:
        InputError: the number of scales does not fit the number of columns.
    """
    import torch

    columns = packed.shape[-1] * 2
    if scale.shape[-1] * GROUP != columns:
        raise InputError(f"{columns} columns need {columns / GROUP:g} scales a row, got {scale.shape[-1]}")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.tensor(E2M1, dtype=work, device=packed.device)
    values = table[unpack(packed).int()].unflatten(-1, (-1, GROUP))
    return (values * decode_scale(scale).to(work)[..., None]).flatten(-2).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., K] to (packed [..., K/2], scale [..., K/32]); for random weights, not for calibration.

    The scale puts the largest magnitude of a group in [4, 8); codes are the nearest, ties to the even
    code, saturating at 6.
    """
    import torch

    if weight.shape[-1] % GROUP:
        raise InputError(f"{weight.shape[-1]} columns are not a multiple of {GROUP}, the columns that share a scale")
    groups = weight.to(compute_dtype(weight)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    _, exponent = torch.frexp(largest)
    scale = torch.where(largest == 0, 127, exponent - 3 + 127).clamp(0, 254)
    magnitude = (groups / decode_scale(scale).to(groups.dtype)[..., None]).abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for lower in range(7):
        middle = (E2M1[lower] + E2M1[lower + 1]) / 2
        code += (magnitude >= middle) if lower % 2 else (magnitude > middle)
    code += (groups < 0).to(torch.uint8) * 8
    return pack(code.flatten(-2)), scale.to(torch.uint8)


def quantize_mxfp8(x: Tensor, rounding: Rounding) -> Tensor:
    """Activations [..., K] through MXFP8 and back: E4M3 with one power-of-two scale per 32 columns.

    Args:
        x: [..., K], K a multiple of 32.
        rounding: How the scale is chosen for a group whose largest magnitude is ``m * 2^e`` with
            1 <= m < 2: ``"floor"`` (OCP MX) takes ``2^(e-8)`` and saturates where m > 1.75;
            ``"ceil"`` takes ``2^(e-7)`` there, so that nothing saturates.

    Returns:
        The dequantised values in ``x.dtype``. A group with a NaN or an infinity becomes all NaN (its
        scale has no other encoding).
    """
    import torch

    if rounding not in ("floor", "ceil"):
        raise InputError(f"unknown MXFP8 scale rounding {rounding!r}; there are floor and ceil")
    if x.shape[-1] % GROUP:
        raise InputError(f"{x.shape[-1]} columns are not a multiple of {GROUP}, the columns that share a scale")
    groups = x.to(compute_dtype(x)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1): m / 2
    exponent = exponent - 1 - 8
    if rounding == "ceil":
        exponent = exponent + (mantissa > 0.875).to(exponent.dtype)
    scale = torch.where(largest.isfinite(), exponent.clamp(-127, 127) + 127, 255)
    step = decode_scale(scale).to(groups.dtype)
    return (round_e4m3(groups / step) * step).flatten(-2).to(x.dtype)
