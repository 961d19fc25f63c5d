"""Triton kernel: one program a head of a request, its whole state in registers from load to store."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolved(
    proj_row, history, taps_ptr, channel, column, token, there, columns: tl.constexpr, wide: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """SiLU of the convolution of channels at a token: of rows of this step as far as there are, else of the history."""
    total = tl.zeros_like(channel).to(tl.float32)
    place = tl.zeros_like(channel) + token
    for j in tl.static_range(TAPS):
        tap = tl.load(taps_ptr + channel * TAPS + j)
        # zeros where it is the other's
        raw = tl.load(proj_row + (j + 1 - TAPS) * columns + column, mask=there & (place + j + 1 >= TAPS), other=0.0).to(
            tl.float32
        )
        if j + 1 < TAPS:
            raw += tl.load(history + (token + j) * wide + column, mask=there & (place + j + 1 < TAPS), other=0.0).to(
                tl.float32
            )
        total += tap * raw
    return total * tl.sigmoid(total)


@triton.jit
def k3_kda_triton_step(
    proj_ptr, f_b_ptr, conv_q_ptr, conv_k_ptr, conv_v_ptr, a_log_ptr, dt_bias_ptr, o_norm_ptr, conv_state_ptr, state_ptr,
    slots_ptr, out_ptr, conv_states_ptr, states_ptr, rows,
    heads: tl.constexpr, columns: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    bound: tl.constexpr, eps: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """All tokens of one request and head: see the family for slots and layouts.

    History is written at the end, when all of it has been read: a cache may be updated in place.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    width: tl.constexpr = heads * D
    wide: tl.constexpr = 3 * width
    d = tl.arange(0, D)
    r = tl.arange(0, RANK)
    first = request * TOKENS
    slot = tl.load(slots_ptr + request * (1 + TOKENS)).to(tl.int64) - 1
    known = (slot >= 0) & (first < rows)
    place = d[:, None] * D + d[None, :]
    channel = head * D + d
    state = tl.load(
        state_ptr + (slot * heads + head) * (D * D) + place, mask=place < tl.where(known, D * D, 0), other=0.0, eviction_policy="evict_first"
    )  # fmt: skip
    if TOKENS == 1:
        f_b = tl.load(f_b_ptr + channel[:, None] * RANK + r[None, :])
    dt_bias = tl.load(dt_bias_ptr + channel)
    a = tl.exp(tl.load(a_log_ptr + head))
    norm = tl.load(o_norm_ptr + d)
    history = conv_state_ptr + slot * (TAPS - 1) * wide
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and RELEASE == "loads":
        tl.extra.cuda.gdc_launch_dependents()
    for t in range(TOKENS):
        live = known & (first + t < rows)
        there = d < tl.where(live, D, 0)
        row = proj_ptr + (first + t) * columns
        q = convolved(row, history, conv_q_ptr, channel, channel, t, there, columns, wide, TAPS)
        k = convolved(row, history, conv_k_ptr, channel, width + channel, t, there, columns, wide, TAPS)
        v = convolved(row, history, conv_v_ptr, channel, 2 * width + channel, t, there, columns, wide, TAPS)
        q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * (D**-0.5)
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        if TOKENS > 1:  # again from L1: beside the state there are no registers for it
            f_b = tl.load(f_b_ptr + channel[:, None] * RANK + r[None, :])
        fa = tl.load(row + 4 * width + r, mask=r < tl.where(live, RANK, 0), other=0.0)
        gate = tl.sum(f_b.to(tl.float32) * fa.to(tl.float32)[None, :], axis=1)
        gate = gate.to(proj_ptr.dtype.element_ty).to(tl.float32)
        decay = tl.exp(bound * tl.sigmoid(a * (gate + dt_bias)))
        beta = tl.sigmoid(tl.load(row + 4 * width + RANK + head, mask=live, other=0.0).to(tl.float32))
        state = state * decay[None, :]
        u = beta * (v - tl.sum(state * k[None, :], axis=1))
        state = state + u[:, None] * k[None, :]
        o = tl.sum(state * q[None, :], axis=1)
        o = o * tl.rsqrt(tl.sum(o * o, axis=0) / D + eps) * norm
        g = tl.load(row + 3 * width + channel, mask=there, other=0.0).to(tl.float32)
        o = (o * tl.sigmoid(g)).to(out_ptr.dtype.element_ty)
        # of padding zeros
        tl.store(out_ptr + (first + t) * width + channel, o, mask=d < tl.where(first + t < rows, D, 0))
        to = tl.load(slots_ptr + request * (1 + TOKENS) + 1 + t).to(tl.int64) - 1
        target = states_ptr + (to * heads + head) * (D * D) + place
        tl.store(target, state, mask=place < tl.where(live & (to >= 0), D * D, 0))
    tl.debug_barrier()  # every thread has read its history
    for part in tl.static_range(3):
        column = part * width + channel
        old = history + column
        known_here = d < tl.where(known, D, 0)
        # all of a column is read before any of it is written: one of the slots may be the one read
        second_raw = tl.load(old + wide, mask=known_here, other=0.0)
        third_raw = tl.load(old + 2 * wide, mask=known_here, other=0.0)
        for t in tl.static_range(TOKENS):
            to = tl.load(slots_ptr + request * (1 + TOKENS) + 1 + t).to(tl.int64) - 1
            there = d < tl.where(known & (first + t < rows) & (to >= 0), D, 0)
            for j in tl.static_range(TAPS - 1):
                if t + j + 1 == 1:
                    raw = second_raw
                elif t + j + 1 == 2:
                    raw = third_raw
                else:
                    raw = tl.load(proj_ptr + (first + t + j - 2) * columns + column, mask=there, other=0.0)
                tl.store(conv_states_ptr + (to * (TAPS - 1) + j) * wide + column, raw, mask=there)
