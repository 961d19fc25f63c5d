"""The choice to the bit, in plain torch: the arithmetic that every engine's kernel spells out instruction by instruction.

``torch.sigmoid`` is another function on every device and in every version. The kernels' is fixed: each step below is one
FP32 operation, rounded to nearest, and a multiply-add rounds once. So given the same FP32 logits every engine on every
architecture chooses the same experts and gives them the same weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .arithmetic import BIG, LEAST, LN2_HIGH, LN2_LOW, LOG2E, MAGIC, POLYNOMIAL, TINY


def _fma(a: np.ndarray, b: np.ndarray | float, c: np.ndarray | float) -> np.ndarray:
    """Rounded once, but for the rare sum that lies halfway after 64 bits."""
    wide = np.longdouble
    with np.errstate(all="ignore"):
        return (a.astype(wide) * np.asarray(np.float32(b), wide) + np.asarray(np.float32(c), wide)).astype(np.float32)


def sigmoid(logits: Tensor) -> Tensor:
    """FP32 sigmoid of FP32 logits, within three units in the last place; NaN stays NaN."""
    f = np.float32
    given = logits.detach().cpu().numpy().astype(f)
    with np.errstate(all="ignore"):
        a = np.fmax(-given, f(LEAST))
        m = _fma(a, LOG2E, MAGIC)
        n = m - f(MAGIC)
        r = _fma(n, -LN2_HIGH, a)
        r = _fma(n, -LN2_LOW, r)
        p = np.full_like(a, f(POLYNOMIAL[0]))
        for one in POLYNOMIAL[1:]:
            p = _fma(p, r, one)
        two = ((m.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(f)
        e = np.where(a > f(BIG), f(np.inf), p * two)
        s = f(1) / (e + f(1))
    return torch.from_numpy(np.where(np.isnan(given), f(np.nan), s).astype(f)).to(logits.device)


def rank_by(scores: Tensor, bias: Tensor) -> Tensor:
    """FP32 ``score + bias``; NaN as minus infinity."""
    biased = scores + bias.to(scores.dtype)
    return torch.where(biased.isnan(), -torch.inf, biased)


def choose(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts and weights.

    Args:
        logits: FP32 [n, E].
        bias: FP32 [E].
        top_k: experts a row; a power of two.
        scaling: factor on the weights.

    Returns:
        (ids int32 [n, k] in descending order of the biased score, equal ones by id; weights FP32 [n, k]). The chosen
        scores are added in halves: the first eight to the last eight, and so on.
    """
    scores = sigmoid(logits)
    ids = torch.sort(rank_by(scores, bias), dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(-1, ids)
    total = chosen
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[:, :half] + total[:, half:]
    weights = chosen / (total + torch.tensor(TINY, dtype=chosen.dtype)) * torch.tensor(scaling, dtype=chosen.dtype)
    return ids.to(torch.int32), weights
