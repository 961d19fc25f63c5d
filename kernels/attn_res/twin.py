"""AttnRes: each sub-layer's input is a softmax mix of the saved blocks and the running residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics import compute_dtype, rms_norm


def _mix(blocks: Sequence[Tensor], prefix: Tensor, res_norm: Tensor, res_proj: Tensor, eps: float) -> Tensor:
    """The mix in the compute dtype, unrounded: [n, H]."""
    dtype = compute_dtype(prefix, res_norm)
    sources = torch.stack([*blocks, prefix]).to(dtype)  # [K+1, n, H], the running residual last
    folded = res_norm.to(dtype) * res_proj.to(dtype).flatten()
    scores = (sources @ folded) * (sources.square().mean(-1) + eps).rsqrt()
    alpha = torch.softmax(scores, dim=0)  # over the sources
    return (alpha[..., None] * sources).sum(0)


def attn_res(blocks: Sequence[Tensor], prefix: Tensor, res_norm: Tensor, res_proj: Tensor, eps: float) -> Tensor:
    """Mix of the sources, rounded once to ``prefix.dtype``.

    ``score_i = sum_d v_i[d] res_norm[d] res_proj[d] * rsqrt(mean(v_i^2) + eps)``, softmax over the
    sources i, ``out = sum_i alpha_i v_i``. The sources are raw; there is no 1/sqrt(d) and no bias.

    Args:
        blocks: Saved blocks in order, each [n, H]; may be empty, then the result is ``prefix``.
        prefix: Running residual [n, H].
        res_norm: [H].
        res_proj: [1, H].
        eps: Of the norm in the scores.
    """
    return _mix(blocks, prefix, res_norm, res_proj, eps).to(prefix.dtype)


def attn_res_norm(
    blocks: Sequence[Tensor],
    prefix: Tensor,
    res_norm: Tensor,
    res_proj: Tensor,
    norm_w: Tensor,
    eps: float,
    single_rounding: bool = True,
) -> Tensor:
    """:func:`attn_res` followed by the RMSNorm of the sub-layer it feeds; [n, H] in ``prefix.dtype``.

    Args:
        blocks: Saved blocks, each [n, H].
        prefix: Running residual [n, H].
        res_norm: [H].
        res_proj: [1, H].
        norm_w: Weight of the norm that follows, [H].
        eps: Of both norms.
        single_rounding: True keeps the mix and the normalised value in the compute dtype (fused
            kernels); False rounds both first (the official code).
    """
    if single_rounding:
        mix = _mix(blocks, prefix, res_norm, res_proj, eps)
        return rms_norm(mix, norm_w, eps, single_rounding=True).to(prefix.dtype)
    return rms_norm(attn_res(blocks, prefix, res_norm, res_proj, eps), norm_w, eps)
