"""MoE tail: latent all-reduce and norm, sharded up-projection, shared expert, residual, next AttnRes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..attn_res.twin import attn_res_norm
from ..collectives import Collectives
from ..numerics import compute_dtype, linear, rms_norm
from ..output_projection.twin import add_residual


def moe_tail(
    latent_partial: Tensor,
    shared_partial: Tensor,
    latent_norm: Tensor,
    w_up: Tensor,
    prefix: Tensor,
    blocks: Sequence[Tensor],
    res_norm: Tensor,
    res_proj: Tensor,
    norm_w: Tensor,
    *,
    eps: float,
    comm: Collectives,
    single_rounding: bool = True,
) -> tuple[Tensor, Tensor]:
    """From the experts' partial sums to the running residual and the next layer's input.

    Args:
        latent_partial: Routed experts' sum on this rank, [n, L].
        shared_partial: Shared expert on this rank, [n, H].
        latent_norm: routed_expert_norm, [L]; applied after the sum over ranks.
        w_up: This rank's rows of the latent up-projection, [H/T, L].
        prefix: Running residual [n, H].
        blocks: Saved blocks the next AttnRes sees, each [n, H].
        res_norm: The next AttnRes' norm weight, [H].
        res_proj: Its projection, [1, H].
        norm_w: The norm that follows it, [H].
        eps: Of all norms.
        comm: The tensor-parallel group.
        single_rounding: True for fused norms (latent norm and AttnRes), False for plain ones.

    Returns:
        (prefix [n, H], next input [n, H]). Rounded: the latent sum, the latent norm, the up-projection,
        the shared sum, their sum, the residual.
    """
    latent = rms_norm(comm.all_reduce(latent_partial), latent_norm, eps, single_rounding)
    up = linear(latent, w_up)  # [n, H/T]
    shared = comm.reduce_scatter(shared_partial, dim=-1)
    dtype = compute_dtype(up, shared)
    delta = comm.all_gather((up.to(dtype) + shared.to(dtype)).to(up.dtype), dim=-1)
    prefix = add_residual(prefix, delta)
    return prefix, attn_res_norm(blocks, prefix, res_norm, res_proj, norm_w, eps, single_rounding)
