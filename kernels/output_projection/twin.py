"""Output projection: o-proj, all-reduce, residual, AttnRes and the norm before the MLP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..attn_res.twin import attn_res_norm
from ..collectives import Collectives
from ..numerics import compute_dtype, linear


def add_residual(prefix: Tensor | None, delta: Tensor) -> Tensor:
    """Running residual plus a sub-layer's output, rounded once; None restarts it at the output."""
    if prefix is None:
        return delta
    dtype = compute_dtype(prefix, delta)
    return (prefix.to(dtype) + delta.to(dtype)).to(delta.dtype)


def output_projection(
    x: Tensor,
    w_o: Tensor,
    prefix: Tensor | None,
    blocks: Sequence[Tensor],
    res_norm: Tensor,
    res_proj: Tensor,
    norm_w: Tensor,
    *,
    eps: float,
    comm: Collectives,
    single_rounding: bool = True,
) -> tuple[Tensor, Tensor]:
    """From the gated attention output of this rank's heads to the MLP's input.

    Args:
        x: Attention output of this rank, [n, D/T].
        w_o: This rank's columns of o_proj, [H, D/T].
        prefix: Running residual [n, H], or None where it restarts (a layer that starts a block; the
            old one is then already the last of ``blocks``).
        blocks: Saved blocks, each [n, H].
        res_norm: mlp_res_norm, [H].
        res_proj: mlp_res_proj, [1, H].
        norm_w: post_attention_layernorm, [H].
        eps: Of all norms.
        comm: The tensor-parallel group.
        single_rounding: See :func:`attn_res_norm`.

    Returns:
        (prefix [n, H], MLP input [n, H]). Rounded: the rank's partial, the sum over ranks, the residual.
    """
    prefix = add_residual(prefix, comm.all_reduce(linear(x, w_o)))
    return prefix, attn_res_norm(blocks, prefix, res_norm, res_proj, norm_w, eps, single_rounding)
