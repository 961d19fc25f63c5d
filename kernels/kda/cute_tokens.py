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
from .cute_parts import FOUR_EARLY, WORD, fma, four, maybe, put_run, run_of, sigmoid, store_pair
from .layout import DIM, GATE_TILES, RANK, TAPS

L2_EPS = 1e-6
COPY = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"


@cute.jit
def copy_taps(convs: list, head: Int32, part: Int32, t: Int32, memory: cute.Pointer, SPLIT: cutlass.Constexpr):
    """Taps of the block's channels on their way to shared memory: no register waits for them."""
    for turn in cutlass.range_constexpr(SPLIT.tap_turns):
        number = turn * SPLIT.threads + t
        for kind in cutlass.range_constexpr(3):
            begin, end = kind * DIM, SPLIT.channels if kind == 2 else (kind + 1) * DIM
            # most turns are of one kind
            if cutlass.const_expr(turn * SPLIT.threads < end and (turn + 1) * SPLIT.threads > begin):  # noqa: SIM102, compiled in or not, then asked at run time
                if (number >= begin) & (number < end):
                    first = head * DIM + (part * SPLIT.slice_rows if kind == 2 else 0) - begin
                    to = (memory + (SPLIT.taps_at // 4 + SPLIT.tap_place(number) * TAPS)).toint()
                    arch.inline_ptx(COPY, read_only_args=[to, convs[kind] + Int64(first + number) * (4 * TAPS)])


@cute.jit
def taps_of(taps: cute.Tensor, first: Int32, SPLIT: cutlass.Constexpr):
    """Of four neighbouring channels of a block's, four a channel; ``first``: queries from 0 on, keys from 128, values from 256."""
    found = []
    for i in cutlass.range_constexpr(4):
        found += run_of(taps, SPLIT.tap_place(first + i), TAPS)
    return found


@cute.jit
def history(conv_state: Int64, slot: Int32, column: Int32, token: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr):
    """Raw rows before the step in a token's window, two words each; zeros where the window has none."""
    words = []
    for j in cutlass.range_constexpr(TAPS - 1):
        at = conv_state + ((Int64(slot) * (TAPS - 1) + token + j) * (3 * SPLIT.width) + column) * 2
        words += maybe(at, 2, on & (token + j < TAPS - 1), True)
    return words


@cute.jit
def window(
    old: list, proj: Int64, row: Int32, column: Int32, token: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr
):
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
        value = rows[0][i] * taps[i * TAPS]
        for j in cutlass.range_constexpr(1, TAPS):
            value = fma(rows[j][i], taps[i * TAPS + j], value)
        made.append(value * sigmoid(value))
    return made


@cute.jit
def keep_window(
    conv_states: Int64, slot: Int32, column: Int32, words: list, on: cutlass.Boolean, SHARED: cutlass.Constexpr,
    part: Int32, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """The last three raw rows of a window, to the slot written after the token. ``SHARED``: all blocks of the head have
    these columns, each writes rows of its own.
    """
    for j in cutlass.range_constexpr(TAPS - 1):
        mine = on & (slot >= 0)
        if cutlass.const_expr(SHARED and SPLIT.parts > 1):
            mine = mine & (part == j % SPLIT.parts)
        if mine:
            at = conv_states + ((Int64(slot) * (TAPS - 1) + j) * (3 * SPLIT.width) + column) * 2
            store_pair(at, words[2 * (j + 1) : 2 * (j + 1) + 2])


@cute.jit
def make_query_and_key(
    query: list, key: list, taps: cute.Tensor, beta_raw: Float32, step: Int32, lane: Int32, vectors: cute.Tensor,
    scalars: cute.Tensor, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """Normalised query and key of a step, its beta and key . query, into shared memory; by one warp."""
    q = convolved(query, taps_of(taps, lane * 4, SPLIT))
    k = convolved(key, taps_of(taps, DIM + lane * 4, SPLIT))
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
                at = f_b + (Int64(row) * RANK + chunk * 32 + lane % 4 * 8) * 2
                if cutlass.const_expr(SPLIT.warps <= GATE_TILES):
                    words += read(FOUR_EARLY, at, 4, [])
                else:
                    words += maybe(at, 4, tile < GATE_TILES, True)
    return words


@cute.jit
def gate_biases(dt_bias: Int64, head: Int32, warp: Int32, lane: Int32, SPLIT: cutlass.Constexpr):
    """Of the two rows a lane has of each tile."""
    words = []
    for turn in cutlass.range_constexpr(SPLIT.gate_turns):
        for upper in cutlass.range_constexpr(2):
            tile = cutlass.min(warp + turn * SPLIT.warps, GATE_TILES - 1)
            at = dt_bias + (Int64(head * DIM + tile * 16 + upper * 8 + lane // 4)) * 4
            words += read(WORD[True], at, 1, [])
    return words


@cute.jit
def make_decay(
    weights: list, biases: list, a_log: Uint32, fa: list, warp: Int32, lane: Int32, decays: cute.Tensor,
    BOUND: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """Decay of each key and step, into shared memory: MMAs with weights as rows and steps as columns.

    The gate is rounded to BF16, as the projection of the twin is. A sum's order: two MMAs for each 32 columns of the rank,
    the four sums in pairs.
    """
    scale = unary(EXP2, as_float(a_log) * Float32(LOG2E))
    for turn in cutlass.range_constexpr(SPLIT.gate_turns):
        sums = []
        for chunk in cutlass.range_constexpr(RANK // 32):
            acc = [Float32(0.0)] * 4
            at = (turn * (RANK // 32) + chunk) * 8
            rows, rows_8, x = weights[at : at + 4], weights[at + 4 : at + 8], fa[4 * chunk : 4 * chunk + 4]
            for k in cutlass.range_constexpr(2):
                a = [rows[2 * k], rows_8[2 * k], rows[2 * k + 1], rows_8[2 * k + 1]]
                args = [*a, x[2 * k], x[2 * k + 1], *acc]
                acc = list(arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=args))
            sums.append(acc)
        tile = warp + turn * SPLIT.warps
        for e in cutlass.range_constexpr(4):
            step, key = lane % 4 * 2 + e % 2, tile * 16 + e // 2 * 8 + lane // 4
            total = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e])
            gate = low(rounded(total, Float32(0.0)))
            share = sigmoid(scale * (gate + as_float(biases[2 * turn + e // 2])))
            decay = unary(EXP2, share * Float32(BOUND * LOG2E))
            if cutlass.const_expr(e % 2 < SPLIT.steps):  # noqa: SIM102
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
