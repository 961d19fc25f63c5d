"""Arithmetic all twins share, with its rounding points stated.

Every function computes in FP32, or in FP64 as soon as one operand is FP64, and rounds only where its
docstring says so. With FP64 operands nothing is rounded on the way: that is what twins are judged in.
torch is imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E4M3_MAX = 448.0
"""Largest magnitude of float8_e4m3fn."""


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32: the dtype a twin computes in."""
    import torch

    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def linear(x: Tensor, w: Tensor) -> Tensor:
    """``x [..., K] @ w [N, K]^T``, accumulated in the compute dtype and rounded once to ``x.dtype``."""
    if x.shape[-1] != w.shape[-1]:
        raise InputError(f"x has {x.shape[-1]} columns, the weight reduces over {w.shape[-1]}; they must be equal")
    dtype = compute_dtype(x, w)
    return (x.to(dtype) @ w.to(dtype).transpose(-1, -2)).to(x.dtype)


def rms_norm(x: Tensor, w: Tensor, eps: float, single_rounding: bool = False) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * w`` over the last dimension; the weight is not offset by one.

    Args:
        x: [..., H].
        w: [H].
        eps: Added to the mean of squares.
        single_rounding: False rounds the normalised value to ``x.dtype`` before the weight (the plain
            norm of the official code); True rounds once, at the end (fused norms).
    """
    dtype = compute_dtype(x, w)
    value = x.to(dtype)
    value = value * (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    if not single_rounding:
        value = value.to(x.dtype).to(dtype)
    return (value * w.to(dtype)).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Kimi K3's activation, elementwise; rounded once to ``gate.dtype``.

    ``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``: bounded by
    ``beta * linear_beta``, and the sigmoid sees the uncapped gate.
    """
    import torch

    dtype = compute_dtype(gate, up)
    g, u = gate.to(dtype), up.to(dtype)
    capped = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (capped * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn value (ties to even, saturating at 448), kept in ``x.dtype``.

    Works in the dtype of ``x``, so that FP64 is not rounded twice on its way; NaN stays NaN.
    """
    import torch

    dtype = compute_dtype(x)
    value = x.to(dtype).clamp(-E4M3_MAX, E4M3_MAX)
    _, exponent = torch.frexp(value)  # |value| = m * 2^exponent with m in [0.5, 1)
    # 3 mantissa bits below the leading one; subnormals share the exponent of the smallest normal, 2^-6
    quantum = torch.ldexp(torch.ones_like(value), exponent.clamp(min=-5) - 4)
    return (torch.round(value / quantum) * quantum).to(x.dtype)
