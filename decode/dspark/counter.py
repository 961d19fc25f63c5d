"""Random numbers by what they are for: a function of seed, position and purpose, equal on every rank and backend.

No generator has a state, so neither the order of steps, nor who shares a batch, nor TP changes a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCEPT, SAMPLE, RESIDUAL, DRAFT = range(1, 5)
"""Purposes: accept a draft, sample a token, sample after a rejection, sample a draft."""
_STEP, _FIRST, _SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The splitmix64 generator's constants, as signed numbers."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right, as if unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + _STEP
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def uniforms(seed: Tensor, position: Tensor, purpose: int, index: Tensor | None = None) -> Tensor:
    """FP64 numbers strictly between 0 and 1; the arguments are int64 and broadcast together.

    Args:
        seed: of the request.
        position: of the token that the number decides on.
        purpose: what for.
        index: where one position needs many: a token's id.
    """
    bits = _mix(_mix(_mix(seed) ^ position) ^ purpose)
    if index is not None:
        bits = _mix(bits ^ index)
    return (_shift(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbel(seed: Tensor, position: Tensor, purpose: int, ids: Tensor) -> Tensor:
    """Gumbel noise of every token id: the argmax of log p plus this is a sample of p. FP64 [..., ids]."""
    return -torch.log(-torch.log(uniforms(seed[..., None], position[..., None], purpose, ids)))
