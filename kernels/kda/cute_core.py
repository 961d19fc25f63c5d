"""The recurrence on a slice of a head's state, and the norm over the head's values."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_numbers import RSQRT, as_float, as_word, unary
from ..cute_streaming import EVICT_FIRST, read
from .cute_parts import MAYBE_STATE, STORE_4, add_lanes, floats, fma, run_of, scales, sigmoid
from .layout import DIM, MOST_STEPS


@cute.jit
def state_rows(pool: Int64, head: Int32, part: Int32, t: Int32, SPLIT: cutlass.Constexpr):
    """Addresses in entry 0 of a pool of the first four keys of each of a thread's rows; next runs are ``16 lanes`` bytes apart."""
    found = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        row = head * DIM + part * SPLIT.slice_rows + SPLIT.row(t, turn)
        found.append(pool + Int64((row * DIM + SPLIT.quad(t, 0) * 4) * 4))
    return found


@cute.jit
def load_state(rows: list, slot: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr):
    """A thread's words of a slot's state, row after row (:func:`state_rows`); zeros where it is not to be read."""
    words = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        base = rows[turn] + Int64(slot) * SPLIT.state_stride
        for index in cutlass.range_constexpr(SPLIT.quads):
            at = base + index * (16 * SPLIT.lanes)
            words += read(MAYBE_STATE, at, 4, [Int64(EVICT_FIRST), Int64(Int32(on))])
    return words


@cute.jit
def store_state(rows: list, slot: Int32, values: list, SPLIT: cutlass.Constexpr):
    """The reverse of :func:`load_state`."""
    for turn in cutlass.range_constexpr(SPLIT.turns):
        base = rows[turn] + Int64(slot) * SPLIT.state_stride
        for index in cutlass.range_constexpr(SPLIT.quads):
            first = (turn * SPLIT.quads + index) * 4
            arch.inline_ptx(STORE_4, read_only_args=[base + index * (16 * SPLIT.lanes), *values[first : first + 4]])


@cute.jit
def vector(memory: cute.Pointer, step: Int32, which: cutlass.Constexpr, t: Int32, SPLIT: cutlass.Constexpr):
    """A thread's keys of one of a step's vectors."""
    vectors = floats(memory, 0, SPLIT.steps * SPLIT.vectors * DIM, 4)
    found = []
    for index in cutlass.range_constexpr(SPLIT.quads):
        found += run_of(vectors, (step * SPLIT.vectors + which) * (DIM // 4) + SPLIT.quad(t, index), 4)
    return found


@cute.jit
def dot(one: list, other: list):
    """A lane's share of a product: four sums, of keys equal modulo 4, in pairs."""
    sums = [one[i] * other[i] for i in range(4)]
    for i in cutlass.range_constexpr(4, len(one)):
        sums[i % 4] = fma(one[i], other[i], sums[i % 4])
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@cute.jit
def update(
    state: list, memory: cute.Pointer, t: Int32, step: Int32, SPLIT: cutlass.Constexpr
):  # fmt: skip
    """(state after a step, this step's output of each of the thread's rows, the same in all lanes of a row).

    With S the decayed state, d = S k and r = S q are summed side by side; then u = beta (v - d), S += u k and the output
    is r + u (k . q), which is the new state times q without a second sum after the first. Sums: four a lane, of keys
    equal modulo 4, runs ascending; their two pairs; then lanes by butterfly. Keys and queries that several warps made
    are not normalised: their squares and products are summed beside d and r, which are multiplied, and u, instead.
    """
    decay, key, query = [vector(memory, step, which, t, SPLIT) for which in range(3)]
    a_turn = 4 * SPLIT.quads
    decayed, sums = [], []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        mine = [state[turn * a_turn + i] * decay[i] for i in range(a_turn)]
        sums += [dot(mine, key), dot(mine, query)]
        decayed += mine
    if cutlass.const_expr(SPLIT.spread > 1):
        sums += [dot(query, query), dot(key, key), dot(query, key)]
    sums = add_lanes(sums, 1, SPLIT.lanes)
    scalars = floats(memory, SPLIT.scalars_at, 2 * MOST_STEPS, 2)
    beta, kq = run_of(scalars, step, 2)
    if cutlass.const_expr(SPLIT.spread > 1):
        q_scale, k_scale = scales(*sums[2 * SPLIT.turns : 2 * SPLIT.turns + 2])
        kq = sums[2 * SPLIT.turns + 2] * q_scale * k_scale
    values = floats(memory, SPLIT.values_at, SPLIT.steps * SPLIT.slice_rows, 1)
    after, outputs = [], []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        value = values[step * SPLIT.slice_rows + SPLIT.row(t, turn), 0]
        d, r = sums[2 * turn], sums[2 * turn + 1]
        if cutlass.const_expr(SPLIT.spread > 1):
            d, r = d * k_scale, r * q_scale
        u = beta * (value - d)
        outputs.append(fma(u, kq, r))
        factor = u * k_scale if cutlass.const_expr(SPLIT.spread > 1) else u
        after += [fma(factor, key[i], decayed[turn * a_turn + i]) for i in range(a_turn)]
    return after, outputs


@cute.jit
def squares_of_warp(mine: list, memory: cute.Pointer, warp: Int32, lane: Int32, SPLIT: cutlass.Constexpr):
    """Each step's sum of squares over a warp's rows, into shared memory; ``mine``: outputs of the step that the lane has."""
    square = mine[0] * mine[0]
    for turn in cutlass.range_constexpr(1, SPLIT.turns):
        square = fma(mine[turn], mine[turn], square)
    (square,) = add_lanes([square], SPLIT.lanes, 32)
    sums = floats(memory, SPLIT.sums_at, SPLIT.warps * SPLIT.padded_steps, 1)
    if lane < SPLIT.padded_steps:  # those beyond the last step are of no use, and a packet's
        sums[warp * SPLIT.padded_steps + lane, 0] = square


@cute.jit
def push_squares(
    sums: cute.Tensor, pushed: cute.Tensor, arrived: cute.Pointer, part: Int32, warp: Int32, lane: Int32,
    SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """This block's sums of squares to every block of the cluster: warps ascending; a packet of steps a warp, a block a lane."""
    if (warp < SPLIT.packets) & (lane < SPLIT.parts):
        a_run = SPLIT.padded_steps // SPLIT.packets
        total = run_of(sums, warp, a_run)
        for other in cutlass.range_constexpr(1, SPLIT.warps):
            more = run_of(sums, other * SPLIT.packets + warp, a_run)
            total = [one + two for one, two in zip(total, more, strict=True)]
        at = (pushed.iterator + (part * SPLIT.packets + warp) * a_run).align(4 * a_run)
        words = tuple(word_of(one) for one in total)
        arch.store_async_dsmem(cute.recast_ptr(at, dtype=Int32).align(4 * a_run), words, arrived, lane)


@cute.jit
def word_of(value: Float32):
    """The same 32 bits as a signed integer."""
    return Int32(as_word(value))


@cute.jit
def sum_of_squares(sums: cute.Pointer, COUNT: cutlass.Constexpr, step: Int32, SPLIT: cutlass.Constexpr):
    """A step's sum over the warps, or over the blocks of the cluster: ascending."""
    flat = cute.make_tensor(sums, cute.make_layout(COUNT * SPLIT.padded_steps))
    total = flat[step]
    for other in cutlass.range_constexpr(1, COUNT):
        total += flat[other * SPLIT.padded_steps + step]
    return total


@cute.jit
def as_floats(words: list):
    """FP32 numbers of words."""
    return [as_float(word) for word in words]


@cute.jit
def send_squares(
    mine: list, memory: cute.Pointer, arrived: cute.Pointer, part: Int32, warp: Int32, lane: Int32,
    SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """This block's sums of squares to all blocks of the head, which have met before."""
    run = SPLIT.padded_steps // SPLIT.packets
    squares_of_warp(mine, memory, warp, lane, SPLIT)
    arch.sync_threads()
    if cutlass.const_expr(SPLIT.parts > 1):
        sums = floats(memory, SPLIT.sums_at, SPLIT.warps * SPLIT.padded_steps, run)
        pushed = floats(memory, SPLIT.pushed_at, SPLIT.parts * SPLIT.padded_steps, run)
        push_squares(sums, pushed, arrived, part, warp, lane, SPLIT)


@cute.jit
def norm_factors(
    norms: list, gates: list, memory: cute.Pointer, arrived: cute.Pointer, lane: Int32, EPS: cutlass.Constexpr,
    SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """What the outputs of a lane's step are multiplied by: the norm of the whole head, its weight, the gate."""
    factors = [as_float(norms[turn]) * sigmoid(gates[turn]) for turn in range(SPLIT.turns)]
    step = cutlass.min(lane % SPLIT.lanes, SPLIT.steps - 1)
    if cutlass.const_expr(SPLIT.parts > 1):
        arch.mbarrier_wait(arrived, 0)
    at, count = SPLIT.sums_at, SPLIT.warps
    if cutlass.const_expr(SPLIT.parts > 1):
        at, count = SPLIT.pushed_at, SPLIT.parts
    sums = floats(memory, at, count * SPLIT.padded_steps, 1)
    scale = unary(RSQRT, sum_of_squares(sums.iterator, count, step, SPLIT) * Float32(1.0 / DIM) + Float32(EPS))
    return scale, factors
