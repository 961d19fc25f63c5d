"""The twin: what every engine of this family must compute."""

from __future__ import annotations

import torch


def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` with FP32 accumulation and one rounding to ``x``'s dtype; FP64 stays FP64.

    Args:
        x: [rows, hidden], the layer's normalised input, BF16 (or FP32, FP64).
        w: [outputs, hidden], the packed projection of one rank: KDA ``[q | k | v | g | f_a | b | pad]``,
            MLA ``[q_a | kv_a | g]``.

    Returns:
        [rows, outputs] in the dtype of ``x``.
    """
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(accumulate) @ w.to(accumulate).T).to(x.dtype)
