"""Rotary angles of the drafter: neighbouring pairs are rotated, frequencies are stretched by YaRN."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ...kernels.numerics import compute_dtype
from .card import DraftCard


def inverse_frequencies(card: DraftCard) -> Tensor:
    """Radians a position, FP64 [rope / 2]: fast angles as they were, slow ones stretched, a ramp between."""
    dim, base = card.qk_rope_head_dim, card.rope_theta
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    plain = base ** (-pair / dim)
    if card.yarn_factor <= 1:
        return plain

    def turns_at(turns: float) -> float:
        """The pair that makes so many turns in the original context."""
        return dim * math.log(card.yarn_original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_at(card.yarn_beta_fast)), 0)
    high = min(math.ceil(turns_at(card.yarn_beta_slow)), dim - 1)
    # as wide as can be divided by
    width = max(high - low, 0.001)
    slow = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain / card.yarn_factor * slow + plain * (1 - slow)


@cache
def _on(card: DraftCard, device: torch.device) -> Tensor:
    """Kept where they are read: nothing can be copied there while a graph is captured."""
    return inverse_frequencies(card).to(device)


def rotate(x: Tensor, positions: Tensor, card: DraftCard) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of the last dimension; rounded once to ``x.dtype``.

    Angles are made in FP64: a position may be a million.

    Args:
        x: [n, ..., rope].
        positions: [n], int.
        card: the drafter.
    """
    angle = positions.to(torch.float64)[:, None] * _on(card, positions.device)
    dtype = compute_dtype(x)
    shape = (x.shape[0], *(1 for _ in x.shape[2:]), angle.shape[1])
    cos, sin = angle.cos().to(dtype).view(shape), angle.sin().to(dtype).view(shape)
    even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
