"""The delta rule of many tokens of one request at once, in pieces: matrix products in place of a step a token.

Within a piece let ``G_t`` be the sum of log decays up to and with token t. Then, with S the state before the piece,

    u_t = beta_t (v_t - S (e^{G_t} k_t) - sum_{j<t} u_j <k_j e^{G_t - G_j}, k_t>)
    o_t = S (e^{G_t} q_t) + sum_{j<=t} u_j <k_j e^{G_t - G_j}, q_t>

The u solve a unit lower triangular system. Only differences ``G_t - G_j`` of later from earlier tokens are raised, so
nothing overflows, however strong the decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 32
"""Tokens of a piece: its pairwise decays take PIECE^2 h K values."""


def delta_rule_of_many(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, piece: int = PIECE
) -> tuple[Tensor, Tensor]:
    """All tokens of one request; what :func:`~k3lab.kernels.kda.twin.delta_rule` makes of them one after the other.

    Args:
        state: [h, V, K], before the first token.
        q: [n, h, K], normalised and scaled.
        k: [n, h, K], normalised.
        v: [n, h, V].
        log_decay: [n, h, K].
        beta: [n, h, 1].
        piece: tokens at a time.

    Returns:
        (outputs [n, h, V], state after the last token [h, V, K]).
    """
    outs = []
    parts = [tensor.transpose(0, 1).split(piece, dim=1) for tensor in (q, k, v, log_decay, beta)]
    for qs, ks, vs, logs, betas in zip(*parts, strict=True):  # [h, c, ...]
        total = logs.cumsum(1)
        later = torch.ones(qs.shape[1], qs.shape[1], dtype=torch.bool, device=q.device).triu(1)
        apart = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], float("-inf")).exp()  # [h, t, j, K]
        seen = apart * ks[:, None]
        met = torch.einsum("htk,htjk->htj", ks, seen) * betas
        read = torch.einsum("htk,htjk->htj", qs, seen)
        grown = total.exp()
        right = betas * (vs - (ks * grown) @ state.transpose(1, 2))
        # unitriangular: the diagonal, a token's own key, is not looked at
        u = torch.linalg.solve_triangular(met, right, upper=False, unitriangular=True)
        outs.append((qs * grown) @ state.transpose(1, 2) + read @ u)
        left = ks * (total[:, -1:] - total).exp()
        state = state * grown[:, -1, None] + u.transpose(1, 2) @ left
    return torch.cat(outs, dim=1).transpose(0, 1), state
