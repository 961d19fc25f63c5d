"""Routed MXFP4 experts and the shared expert, on one rank's slice of the intermediate width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..mxfp4 import ROUNDINGS, Rounding, dequantize, quantize_mxfp8
from ..numerics import compute_dtype, linear, situ


@dataclass(frozen=True)
class ExpertWeights:
    """All routed experts, packed MXFP4 in uint8; I is this rank's slice of the intermediate width."""

    w1: Tensor
    """Gate, [E, I, L/2]."""
    w1_scale: Tensor
    """[E, I, L/32]."""
    w3: Tensor
    """Up, [E, I, L/2]."""
    w3_scale: Tensor
    """[E, I, L/32]."""
    w2: Tensor
    """Down, [E, L, I/2]."""
    w2_scale: Tensor
    """[E, L, I/32]."""


def _maybe_mxfp8(x: Tensor, rounding: Rounding | None) -> Tensor:
    return x if rounding is None else quantize_mxfp8(x, rounding)


def routed(
    latent: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    beta: float,
    linear_beta: float,
    activations: str = "bf16",
    fused_rounding: bool = True,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs: this rank's partial, [n, L] in ``latent.dtype``.

    ``e_i = w2_i situ(w1_i z, w3_i z)``; each e_i is rounded once to ``latent.dtype``, multiplied by its
    weight and summed in slot order in the compute dtype, and the sum is rounded once. Every distinct
    expert is read once.

    Args:
        latent: [n, L].
        ids: int32, as the router's kernels write them, or int64 [n, k].
        weights: [n, k].
        experts: This rank's slice.
        beta: Of SiTU.
        linear_beta: Of SiTU.
        activations: ``bf16`` (weight-only) or an MXFP8 mode of :data:`k3lab.kernels.mxfp4.ROUNDINGS`, which quantises the
            latent and the hidden values.
        fused_rounding: True keeps gate and up in the compute dtype, so the hidden value is rounded once
            (to ``latent.dtype`` or to MXFP8); False rounds gate, up and hidden to ``latent.dtype``.
    """
    if activations not in ROUNDINGS:
        raise InputError(f"unknown activation mode {activations!r}; there are {', '.join(ROUNDINGS)}")
    count = experts.w1.shape[0]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise InputError(f"expert ids must lie in 0..{count - 1}, got {int(ids.min())}..{int(ids.max())}")
    dtype = compute_dtype(latent, weights)
    latent_rounding, hidden_rounding = ROUNDINGS[activations]
    z = _maybe_mxfp8(latent, latent_rounding).to(dtype if fused_rounding else latent.dtype)
    outputs = torch.zeros(*ids.shape, latent.shape[-1], dtype=latent.dtype, device=latent.device)
    for expert in ids.unique().tolist():
        row, slot = torch.where(ids == expert)
        gate = linear(z[row], dequantize(experts.w1[expert], experts.w1_scale[expert], dtype))
        up = linear(z[row], dequantize(experts.w3[expert], experts.w3_scale[expert], dtype))
        hidden = situ(gate, up, beta, linear_beta)
        if hidden_rounding is None:
            hidden = hidden.to(latent.dtype)
        hidden = _maybe_mxfp8(hidden, hidden_rounding)
        down = dequantize(experts.w2[expert], experts.w2_scale[expert], dtype)
        outputs[row, slot] = linear(hidden, down).to(latent.dtype)
    total = torch.zeros_like(latent, dtype=dtype)
    for column in range(ids.shape[1]):
        total += weights[:, column, None].to(dtype) * outputs[:, column].to(dtype)
    return total.to(latent.dtype)


def shared(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """SiTU MLP on this rank's slice: the shared expert, and the dense MLP of the first layer.

    Args:
        x: [n, H].
        gate: [I, H].
        up: [I, H].
        down: [H, I].
        beta: Of SiTU.
        linear_beta: Of SiTU.

    Returns:
        This rank's partial [n, H]. Gate, up, hidden and the partial are each rounded to ``x.dtype``.
    """
    return linear(situ(linear(x, gate), linear(x, up), beta, linear_beta), down)
