"""What is made of a token's projections before the state is touched: convolution, norms, decay; and the kept raw rows.

The convolution's window of a token is its own raw row and the three before it: rows of the projection as far as they
belong to the same request in this step, else the history, whose three rows are those before the step.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import EXP2, LOG2E, RSQRT, as_float, low, rounded, sum_lanes, unary
from ..cute_streaming import MMA, read
from .cute_parts import fma, four, load_text, maybe, put_run, sigmoid, store_pair
from .layout import DIM, GATE_TILES, RANK, TAPS

L2_EPS = 1e-6


@cute.jit
def taps_of(conv: Int64, channel: Int32, on: cutlass.Boolean):
    """Taps of four neighbouring channels, FP32 words, four a channel."""
    words = []
    for i in cutlass.range_constexpr(4):
        words += maybe(conv + (Int64(channel) + i) * (TAPS * 4), 4, on, True)
    return words


@cute.jit
def history(conv_state: Int64, slot: Int32, column: Int32, token: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr):
    """Raw rows before the step in a token's window, two words each; zeros where the window has none."""
    words = []
    for j in cutlass.range_constexpr(TAPS - 1):
        at = conv_state + ((Int64(slot) * (TAPS - 1) + token + j) * (3 * SPLIT.width) + column) * 2
        words += maybe(at, 2, on & (token + j < TAPS - 1), True)
    return words


@cute.jit
def window(old: list, proj: Int64, row: Int32, column: Int32, token: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr):
    """The whole window of a token, two words a row, oldest first."""
    words = []
    for j in cutlass.range_constexpr(TAPS):
        at = proj + (Int64(row + (j + 1 - TAPS)) * SPLIT.columns + column) * 2
        if cutlass.const_expr(j == TAPS - 1):
            words += maybe(at, 2, on, False)
        elif cutlass.const_expr(SPLIT.tokens > 1):
            new = maybe(at, 2, on & (token + j >= TAPS - 1), False)
            words += [old[2 * j] | new[0], old[2 * j + 1] | new[1]]
        else:
            words += old[2 * j : 2 * j + 2]
    return words


@cute.jit
def convolved(words: list, taps: list):
    """SiLU of the convolution of four channels."""
    rows = [four(words[2 * j : 2 * j + 2]) for j in range(TAPS)]
    made = []
    for i in cutlass.range_constexpr(4):
        value = rows[0][i] * as_tap(taps, i, 0)
        for j in cutlass.range_constexpr(1, TAPS):
            value = fma(rows[j][i], as_tap(taps, i, j), value)
        made.append(value * sigmoid(value))
    return made


@cute.jit
def as_tap(taps: list, channel: cutlass.Constexpr, j: cutlass.Constexpr):
    """One tap as FP32."""
    return as_float(taps[channel * TAPS + j])


@cute.jit
def keep_window(
    conv_states: Int64, slot: Int32, column: Int32, words: list, on: cutlass.Boolean, SHARED: cutlass.Constexpr,
    part: Int32, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """The last three raw rows of a window, to the slot written after the token. ``SHARED``: all blocks of the head have
    these columns, each writes rows of its own."""
    for j in cutlass.range_constexpr(TAPS - 1):
        mine = on & (slot >= 0)
        if cutlass.const_expr(SHARED and SPLIT.parts > 1):
            mine = mine & (part == j % SPLIT.parts)
        if mine:
            at = conv_states + ((Int64(slot) * (TAPS - 1) + j) * (3 * SPLIT.width) + column) * 2
            store_pair(at, words[2 * (j + 1) : 2 * (j + 1) + 2])


@cute.jit
def make_query_and_key(
    query: list, key: list, taps: list, beta_raw: Float32, step: Int32, lane: Int32, vectors: cute.Tensor,
    scalars: cute.Tensor,
):  # fmt: skip
    """Normalised query and key of a step, its beta and key . query, into shared memory; by one warp."""
    q, k = convolved(query, taps[: 4 * TAPS]), convolved(key, taps[4 * TAPS :])
    squares = [q[0] * q[0], k[0] * k[0], q[0] * k[0]]
    for i in cutlass.range_constexpr(1, 4):
        squares = [fma(q[i], q[i], squares[0]), fma(k[i], k[i], squares[1]), fma(q[i], k[i], squares[2])]
    qq, kk, qk = sum_lanes(squares)
    q_scale = unary(RSQRT, qq + Float32(L2_EPS)) * Float32(DIM**-0.5)
    k_scale = unary(RSQRT, kk + Float32(L2_EPS))
    put_run(vectors, (step * 3 + 1) * (DIM // 4) + lane, [one * k_scale for one in k])
    put_run(vectors, (step * 3 + 2) * (DIM // 4) + lane, [one * q_scale for one in q])
    if lane == 0:
        put_run(scalars, step, [sigmoid(beta_raw), qk * q_scale * k_scale])


@cute.jit
def gate_weights(f_b: Int64, head: Int32, warp: Int32, lane: Int32, SPLIT: cutlass.Constexpr):
    """A warp's rows of the gate projection, 16 bytes a load: rows g and g + 8 of each tile, a quarter of 32 columns."""
    words = []
    for turn in cutlass.range_constexpr(SPLIT.gate_turns):
        tile = warp + turn * SPLIT.warps
        for chunk in cutlass.range_constexpr(RANK // 32):
            for upper in cutlass.range_constexpr(2):
                row = head * DIM + tile * 16 + upper * 8 + lane // 4
                words += maybe(f_b + (Int64(row) * RANK + chunk * 32 + lane % 4 * 8) * 2, 4, tile < GATE_TILES, True)
    return words


@cute.jit
def gate_biases(dt_bias: Int64, head: Int32, warp: Int32, lane: Int32, SPLIT: cutlass.Constexpr):
    """Of the two rows a lane has of each tile."""
    words = []
    for turn in cutlass.range_constexpr(SPLIT.gate_turns):
        for upper in cutlass.range_constexpr(2):
            tile = cutlass.min(warp + turn * SPLIT.warps, GATE_TILES - 1)
            at = dt_bias + (Int64(head * DIM + tile * 16 + upper * 8 + lane // 4)) * 4
            words += read(load_text(1, True), at, 1, [])
    return words


@cute.jit
def make_decay(
    weights: list, biases: list, a_log: Uint32, fa: list, warp: Int32, lane: Int32, decays: cute.Tensor,
    BOUND: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """Decay of each key and step, into shared memory: MMAs with weights as rows and steps as columns.

    The gate is rounded to BF16, as the projection of the twin is. A sum's order: columns 0 to 31 of the rank in two
    MMAs, then 32 to 63, and so on.
    """
    scale = unary(EXP2, as_float(a_log) * Float32(LOG2E))
    for turn in cutlass.range_constexpr(SPLIT.gate_turns):
        acc = [Float32(0.0)] * 4
        for chunk in cutlass.range_constexpr(RANK // 32):
            at = (turn * (RANK // 32) + chunk) * 8
            rows, rows_8, x = weights[at : at + 4], weights[at + 4 : at + 8], fa[4 * chunk : 4 * chunk + 4]
            for k in cutlass.range_constexpr(2):
                a = [rows[2 * k], rows_8[2 * k], rows[2 * k + 1], rows_8[2 * k + 1]]
                args = [*a, x[2 * k], x[2 * k + 1], *acc]
                acc = list(arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=args))
        tile = warp + turn * SPLIT.warps
        for e in cutlass.range_constexpr(4):
            step, key = lane % 4 * 2 + e % 2, tile * 16 + e // 2 * 8 + lane // 4
            gate = low(rounded(acc[e], Float32(0.0)))
            share = sigmoid(scale * (gate + as_float(biases[2 * turn + e // 2])))
            decay = unary(EXP2, share * Float32(BOUND * LOG2E))
            if cutlass.const_expr(e % 2 < SPLIT.steps):
                if (step < SPLIT.steps) & (tile < GATE_TILES):
                    decays[step * (3 * DIM) + key, 0] = decay


@cute.jit
def gate_inputs(proj: Int64, first_row: Int32, lane: Int32, live: Int32, SPLIT: cutlass.Constexpr):
    """A lane's words of the low-rank gate of step ``lane / 4``: zeros where the step is not live (bit ``step`` of ``live``)."""
    step = lane // 4
    on = (live >> step) & 1 != 0
    words = []
    for chunk in cutlass.range_constexpr(RANK // 32):
        column = 4 * SPLIT.width + chunk * 32 + lane % 4 * 8
        words += maybe(proj + (Int64(first_row + step) * SPLIT.columns + column) * 2, 4, on, False)
    return words
