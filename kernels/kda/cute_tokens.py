"""What is made of a token's projections before the state is touched: convolution, norms, decay; and the kept raw rows.

The convolution's window of a token is its own raw row and the three before it: rows of the projection as far as they
belong to the same request in this step, else the history, whose three rows are those before the step.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import EXP2, LOG2E, as_float, low, rounded, sum_lanes, unary
from ..cute_streaming import MMA, read
from .cute_parts import (
    FOUR_EARLY,
    WORD,
    channels_of,
    floats,
    fma,
    maybe,
    put_run,
    run_of,
    scales,
    sigmoid,
    store_run,
)
from .layout import DIM, GATE_TILES, MOST_STEPS, RANK, TAPS

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
    """Of a run of a block's channels, four a channel; ``first``: queries from 0 on, keys from 128, values from 256."""
    found = []
    for i in cutlass.range_constexpr(SPLIT.run):
        found += run_of(taps, SPLIT.tap_place(first + i), TAPS)
    return found


@cute.jit
def places(
    pools: list, proj: Int64, number: Int32, column: Int32, rows: Int32, first_row: Int32, SPLIT: cutlass.Constexpr
):
    """Where a run of channels of a block's step ``number`` lies: all that can be said before its slot is there.

    Returns:
        (token, whether the row is live, addresses in slot entry 0 of its window's oldest row to read and of that to write, of
        the step's own raw row).
    """
    token, row = number % SPLIT.tokens, first_row + number
    at = Int64(column) * 2
    old, to = pools[0] + at + Int64(token) * (6 * SPLIT.width), pools[1] + at
    return token, (number < SPLIT.steps) & (row < rows), old, to, proj + Int64(row) * (2 * SPLIT.columns) + at


@cute.jit
def in_slot(at: Int64, slot: Int32, SPLIT: cutlass.Constexpr):
    """The address in the histories of a slot that is ``at`` in those of entry 0."""
    return at + Int64(slot) * ((TAPS - 1) * 6 * SPLIT.width)


@cute.jit
def history(at: Int64, token: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr):
    """Raw rows before the step in a token's window, a run of each, the oldest at ``at``; zeros where the window has none."""
    words = []
    for j in cutlass.range_constexpr(TAPS - 1):
        words += maybe(at + j * (6 * SPLIT.width), 2 * SPLIT.run, on & (token + j < TAPS - 1), True)
    return words


@cute.jit
def fresh(newest: Int64, token: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr):
    """Raw rows of this step in a token's window, a run of each, oldest first; its own is at ``newest``. Zeros where the window
    has history; of one token that is known, and only its own row is loaded.
    """
    words = []
    for j in cutlass.range_constexpr(TAPS if SPLIT.tokens > 1 else 1):
        back = TAPS - 1 - j if SPLIT.tokens > 1 else 0
        there = on & (token >= back) if cutlass.const_expr(back > 0) else on
        words += maybe(newest - back * (2 * SPLIT.columns), 2 * SPLIT.run, there, False)
    return words


@cute.jit
def window(old: list, new: list, SPLIT: cutlass.Constexpr):
    """The whole window of a token from :func:`history` and :func:`fresh`: what does this waits for both."""
    if cutlass.const_expr(SPLIT.tokens == 1):
        return old + new
    count = len(old)
    return [before | now for before, now in zip(old, new[:count], strict=True)] + new[count:]


@cute.jit
def convolved(words: list, taps: list, SPLIT: cutlass.Constexpr):
    """SiLU of the convolution of a run of channels."""
    a_row = len(words) // TAPS
    rows = [channels_of(words[a_row * j : a_row * (j + 1)], SPLIT.run) for j in range(TAPS)]
    made = []
    for i in cutlass.range_constexpr(SPLIT.run):
        value = rows[0][i] * taps[i * TAPS]
        for j in cutlass.range_constexpr(1, TAPS):
            value = fma(rows[j][i], taps[i * TAPS + j], value)
        made.append(value * sigmoid(value))
    return made


@cute.jit
def keep_window(
    at: Int64, words: list, on: cutlass.Boolean, SHARED: cutlass.Constexpr, part: Int32, SPLIT: cutlass.Constexpr
):  # fmt: skip
    """The last three raw rows of a window, the oldest to ``at``. ``SHARED``: all blocks of the head have these columns, each
    writes rows of its own.
    """
    a_row = len(words) // TAPS
    for j in cutlass.range_constexpr(TAPS - 1):
        mine = on
        if cutlass.const_expr(SHARED and SPLIT.parts > 1):
            mine = mine & (part == j % SPLIT.parts)
        if mine:
            store_run(at + j * (6 * SPLIT.width), words[a_row * (j + 1) : a_row * (j + 2)], SPLIT.run)


@cute.jit
def make_query_and_key(
    query: list, key: list, taps: cute.Tensor, beta_raw: Float32, step: Int32, share: Int32, lane: Int32,
    memory: cute.Pointer, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """A step's query and key and its beta into shared memory: by one warp, normalised, and key . query with them;
    or, by several warps, as they are, for the norms are of no use before the sums with the state (:func:`.cute_core.update`).
    """
    first = (share * 32 + lane) * SPLIT.run
    q = convolved(query, taps_of(taps, first, SPLIT), SPLIT)
    k = convolved(key, taps_of(taps, DIM + first, SPLIT), SPLIT)
    kq = Float32(0.0)
    if cutlass.const_expr(SPLIT.spread == 1):
        sums = [q[0] * q[0], k[0] * k[0], q[0] * k[0]]
        for i in cutlass.range_constexpr(1, 4):
            sums = [fma(q[i], q[i], sums[0]), fma(k[i], k[i], sums[1]), fma(q[i], k[i], sums[2])]
        qq, kk, qk = sum_lanes(sums)
        q_scale, k_scale = scales(qq, kk)
        kq = qk * q_scale * k_scale
        k, q = [one * k_scale for one in k], [one * q_scale for one in q]
    vectors = floats(memory, 0, SPLIT.steps * SPLIT.vectors * DIM, SPLIT.run)
    a_vector = DIM // SPLIT.run
    place = step * SPLIT.vectors * a_vector + share * 32 + lane
    put_run(vectors, place + a_vector, k)
    if cutlass.const_expr(SPLIT.form == "wy"):
        over, under = run_of(vectors, place + 3 * a_vector, 4), run_of(vectors, place + 4 * a_vector, 4)
        q = [q[i] * over[i] for i in range(4)]
        put_run(vectors, place + 3 * a_vector, [k[i] * over[i] for i in range(4)])
        put_run(vectors, place + 4 * a_vector, [k[i] * under[i] for i in range(4)])
    put_run(vectors, place + 2 * a_vector, q)
    if (lane == 0) & (share == 0):
        put_run(floats(memory, SPLIT.scalars_at, 2 * MOST_STEPS, 2), step, [sigmoid(beta_raw), kq])


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
                    words += maybe(at, 16, tile < GATE_TILES, True)
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
def up_to(logs: list, lane: Int32):
    """Two steps' logarithms, four lanes with two each, plus those of all steps before."""
    total = logs[0] + logs[1]
    for by in cutlass.range_constexpr(1, 3):
        other = arch.shuffle_sync(total, lane - by)
        total = total + other if lane % 4 >= by else total
    before = arch.shuffle_sync(total, lane - 1)
    before = before if lane % 4 > 0 else Float32(0.0)
    return [before + logs[0], before + logs[0] + logs[1]]


@cute.jit
def make_decay(
    weights: list, biases: list, a_log: Uint32, fa: list, warp: Int32, lane: Int32, memory: cute.Pointer,
    BOUND: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """Decay of each key and step, into shared memory: MMAs with weights as rows and steps as columns.

    The gate is rounded to BF16, as the projection of the twin is. A sum's order: two MMAs for each 32 columns of the rank,
    the four sums in pairs. Form ``wy`` has the product of all decays so far too, and one over it.
    """
    decays = floats(memory, 0, SPLIT.steps * SPLIT.vectors * DIM, 1)
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
        logs = []
        for e in cutlass.range_constexpr(4):
            step, key = lane % 4 * 2 + e % 2, tile * 16 + e // 2 * 8 + lane // 4
            total = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e])
            gate = low(rounded(total, Float32(0.0)))
            share = sigmoid(scale * (gate + as_float(biases[2 * turn + e // 2])))
            logs.append(share * Float32(BOUND * LOG2E))
            if cutlass.const_expr(e % 2 < SPLIT.steps):  # noqa: SIM102
                if (step < SPLIT.steps) & (tile < GATE_TILES):
                    decays[step * (SPLIT.vectors * DIM) + key, 0] = unary(EXP2, logs[e])
        if cutlass.const_expr(SPLIT.form == "wy"):
            for upper in cutlass.range_constexpr(2):
                so_far = up_to(logs[2 * upper : 2 * upper + 2], lane)
                for odd in cutlass.range_constexpr(2):
                    step, key = lane % 4 * 2 + odd, tile * 16 + upper * 8 + lane // 4
                    if (step < SPLIT.steps) & (tile < GATE_TILES):
                        at = (step * SPLIT.vectors + 3) * DIM + key
                        decays[at, 0] = unary(EXP2, so_far[odd])
                        decays[at + DIM, 0] = unary(EXP2, Float32(0.0) - so_far[odd])


@cute.jit
def gate_inputs(at: Int64, lane: Int32, live: Int32, SPLIT: cutlass.Constexpr):
    """A lane's words of the low-rank gate of step ``lane / 4``, from ``at`` on: zeros where the step is not live (bit ``step``)."""
    on = (live >> (lane // 4)) & 1 != 0
    words = []
    for chunk in cutlass.range_constexpr(RANK // 32):
        words += maybe(at + chunk * 64, 16, on, False)
    return words
