"""Kimi Delta Attention, one decode or verify step: short conv, gates, delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..numerics import compute_dtype, linear

L2_EPS = 1e-6
"""Added to the sum of squares of q and k."""


@dataclass(frozen=True)
class KdaWeights:
    """Weights of the KDA core for h heads of width D (this rank's heads)."""

    f_b: Tensor
    """Decay gate's up-projection, [hD, R]."""
    conv_q: Tensor
    """Depthwise conv taps, [hD, W]; the last tap multiplies the current token."""
    conv_k: Tensor
    """[hD, W]."""
    conv_v: Tensor
    """[hD, W]."""
    a_log: Tensor
    """One a head, [h]."""
    dt_bias: Tensor
    """[hD]."""
    o_norm: Tensor
    """Norm weight shared by the heads, [D]."""


def log_decay(gate_raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """``lower_bound * sigmoid(exp(a_log[h]) * (gate_raw[n, h, d] + dt_bias[h, d]))``: in (lower_bound, 0)."""
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * (gate_raw + dt_bias.view(gate_raw.shape[-2:])))


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence.

    Args:
        state: S, [B, h, V, K].
        q: [B, h, K], normalised and scaled.
        k: [B, h, K], normalised.
        v: [B, h, V].
        log_decay: [B, h, K].
        beta: [B, h].

    Returns:
        (new state, output [B, h, V] read from the new state).
    """
    state = state * log_decay.exp()[..., None, :]
    correction = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + correction[..., :, None] * k[..., None, :]
    return state, (state @ q[..., None])[..., 0]


def _l2_normalise(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt()


def kda(
    proj: Tensor,
    weights: KdaWeights,
    conv_state: Tensor,
    state: Tensor,
    *,
    q_len: int,
    lower_bound: float,
    eps: float,
    fused_rounding: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``q_len`` new tokens of each of B requests; rows n = B * q_len, request-major.

    Args:
        proj: Fused input projection [n, 4hD + R + h (+ padding)], columns q | k | v | g | f_a | b.
        weights: This rank's heads.
        conv_state: The W-1 raw (pre-conv) q | k | v rows before this step, oldest first, [B, W-1, 3hD].
        state: [B, h, V, K], V = K = D.
        q_len: New tokens a request.
        lower_bound: Of the log decay (-5 for K3).
        eps: Of the output norm.
        fused_rounding: True rounds once, after norm and gate; False also rounds the conv output and
            the recurrence's output to ``proj.dtype`` (unfused kernels). The decay gate's projection is
            rounded to ``proj.dtype`` in both.

    Returns:
        (out [n, hD] in ``proj.dtype``, gated, before o_proj; conv states [B, q_len, W-1, 3hD]; states
        [B, q_len, h, V, K]): the state after every token, so that a roll-back picks one.
    """
    heads, dim, rank = weights.a_log.shape[0], weights.o_norm.shape[0], weights.f_b.shape[1]
    width = heads * dim
    rows, columns = proj.shape
    requests = state.shape[0]
    if rows != requests * q_len:
        raise InputError(f"{rows} rows are not {requests} requests times {q_len} tokens")
    need = 4 * width + rank + heads
    if columns < need:
        raise InputError(f"KDA projection has {columns} columns, {heads} heads of {dim} need {need}")
    dtype = compute_dtype(proj, state)
    raw, gate_out, fa, b_raw = proj[:, :need].split([3 * width, width, rank, heads], dim=-1)

    gate_raw = linear(fa, weights.f_b).to(dtype).view(rows, heads, dim)
    decay = log_decay(gate_raw, weights.a_log.to(dtype), weights.dt_bias.to(dtype), lower_bound)
    decay = decay.view(requests, q_len, heads, dim)
    beta = torch.sigmoid(b_raw.to(dtype)).view(requests, q_len, heads)
    taps = torch.cat([weights.conv_q, weights.conv_k, weights.conv_v]).to(dtype).T  # [W, 3hD]
    raw = raw.view(requests, q_len, 3 * width)

    window, current, history = conv_state, state.to(dtype), taps.shape[0] - 1
    outputs, conv_states, states = [], [], []
    for token in range(q_len):
        kept = window[:, window.shape[1] - history :]
        window = torch.cat([kept, raw[:, token, None].to(window.dtype)], dim=1)
        conv = torch.nn.functional.silu((window.to(dtype) * taps).sum(1))
        if not fused_rounding:
            conv = conv.to(proj.dtype).to(dtype)
        q, k, v = conv.view(requests, 3, heads, dim).unbind(1)
        q, k = _l2_normalise(q) * dim**-0.5, _l2_normalise(k)
        current, out = delta_rule(current, q, k, v, decay[:, token], beta[:, token])
        # the next token reads what is stored, as a plain step would
        stored = current.to(state.dtype)
        current = stored.to(dtype)
        outputs.append(out)
        conv_states.append(window[:, 1:])
        states.append(stored)

    out = torch.stack(outputs, dim=1).view(rows, heads, dim)
    if not fused_rounding:
        out = out.to(proj.dtype).to(dtype)
    out = out * (out.square().mean(-1, keepdim=True) + eps).rsqrt() * weights.o_norm.to(dtype)
    out = out * torch.sigmoid(gate_out.to(dtype)).view(rows, heads, dim)
    return out.reshape(rows, width).to(proj.dtype), torch.stack(conv_states, dim=1), torch.stack(states, dim=1)
