"""The recurrence on a slice of a head's state, and the norm over the head's values."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_numbers import as_float, as_word
from ..cute_streaming import EVICT_FIRST, read
from .cute_parts import MAYBE_STATE, STORE_4, add_lanes, floats, fma, put_run, run_of, sigmoid
from .layout import DIM


@cute.jit
def state_offset(slot: Int32, head: Int32, part: Int32, t: Int32, turn: cutlass.Constexpr, SPLIT: cutlass.Constexpr):
    """Bytes to a thread's first four keys of one of its rows; its next runs are ``16 lanes`` bytes apart."""
    row = part * SPLIT.slice_rows + SPLIT.row(t, turn)
    return ((Int64(slot) * SPLIT.heads + head) * (DIM * DIM) + row * DIM + SPLIT.quad(t, 0) * 4) * 4


@cute.jit
def load_state(
    state: Int64, slot: Int32, head: Int32, part: Int32, t: Int32, on: cutlass.Boolean, SPLIT: cutlass.Constexpr
):  # fmt: skip
    """A thread's words of a state, row after row; zeros where it is not to be read."""
    words = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        base = state + state_offset(slot, head, part, t, turn, SPLIT)
        for index in cutlass.range_constexpr(SPLIT.quads):
            at = base + index * (16 * SPLIT.lanes)
            words += read(MAYBE_STATE, at, 4, [Int64(EVICT_FIRST), Int64(Int32(on))])
    return words


@cute.jit
def store_state(states: Int64, slot: Int32, head: Int32, part: Int32, t: Int32, values: list, SPLIT: cutlass.Constexpr):
    """The reverse of :func:`load_state`."""
    for turn in cutlass.range_constexpr(SPLIT.turns):
        base = states + state_offset(slot, head, part, t, turn, SPLIT)
        for index in cutlass.range_constexpr(SPLIT.quads):
            first = (turn * SPLIT.quads + index) * 4
            arch.inline_ptx(STORE_4, read_only_args=[base + index * (16 * SPLIT.lanes), *values[first : first + 4]])


@cute.jit
def update(
    state: list, vectors: cute.Tensor, values: cute.Tensor, scalars: cute.Tensor, t: Int32, STEP: cutlass.Constexpr,
    SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """(state after a step, this step's output of each of the thread's rows, the same in all lanes of a row).

    With S the decayed state, d = S k and r = S q are summed side by side; then u = beta (v - d), S += u k and the output
    is r + u (k . q), which is the new state times q without a second sum after the first. Sums: four a lane, of keys
    equal modulo 4, runs ascending; their two pairs; then lanes by butterfly.
    """
    beta, kq = run_of(scalars, Int32(STEP), 2)
    first = STEP * 3 * (DIM // 4)
    decay, key, query = [], [], []
    for index in cutlass.range_constexpr(SPLIT.quads):
        quad = SPLIT.quad(t, index)
        decay += run_of(vectors, first + quad, 4)
        key += run_of(vectors, first + DIM // 4 + quad, 4)
        query += run_of(vectors, first + DIM // 2 + quad, 4)
    a_turn = 4 * SPLIT.quads
    decayed, sums = [], []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        mine = [state[turn * a_turn + i] * decay[i] for i in range(a_turn)]
        dots = [mine[i] * key[i] for i in range(4)] + [mine[i] * query[i] for i in range(4)]
        for i in cutlass.range_constexpr(4, a_turn):
            dots[i % 4] = fma(mine[i], key[i], dots[i % 4])
            dots[4 + i % 4] = fma(mine[i], query[i], dots[4 + i % 4])
        sums += [(dots[0] + dots[1]) + (dots[2] + dots[3]), (dots[4] + dots[5]) + (dots[6] + dots[7])]
        decayed += mine
    sums = add_lanes(sums, 1, SPLIT.lanes)
    after, outputs = [], []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        value = values[STEP * SPLIT.slice_rows + SPLIT.row(t, turn), 0]
        u = beta * (value - sums[2 * turn])
        outputs.append(fma(u, kq, sums[2 * turn + 1]))
        after += [fma(u, key[i], decayed[turn * a_turn + i]) for i in range(a_turn)]
    return after, outputs


@cute.jit
def squares_of_warp(outputs: list, sums: cute.Tensor, warp: Int32, lane: Int32, SPLIT: cutlass.Constexpr):
    """Each step's sum of squares over a warp's rows, into shared memory."""
    squares = []
    for step in cutlass.range_constexpr(SPLIT.steps):
        square = outputs[step][0] * outputs[step][0]
        for turn in cutlass.range_constexpr(1, SPLIT.turns):
            square = fma(outputs[step][turn], outputs[step][turn], square)
        squares.append(square)
    squares = add_lanes(squares, SPLIT.lanes, 32)
    padded = [squares[s] if s < SPLIT.steps else Float32(0.0) for s in range(SPLIT.padded_steps)]
    if lane == 0:
        a_run = SPLIT.padded_steps // SPLIT.packets
        for run in cutlass.range_constexpr(SPLIT.packets):
            put_run(sums, warp * SPLIT.packets + run, padded[run * a_run : (run + 1) * a_run])


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
def norm_sums(
    outputs: list, norms: list, gates: list, memory: cute.Pointer, arrived: cute.Pointer, part: Int32, warp: Int32,
    lane: Int32, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """(sum of squares over the head of the step that the lane writes, factors of its rows: norm weight times gate)."""
    run = SPLIT.padded_steps // SPLIT.packets
    sums = floats(memory, SPLIT.sums_at, SPLIT.warps * SPLIT.padded_steps, run)
    pushed = floats(memory, SPLIT.pushed_at, SPLIT.parts * SPLIT.padded_steps, run)
    squares_of_warp(outputs, sums, warp, lane, SPLIT)
    arch.sync_threads()
    if cutlass.const_expr(SPLIT.parts > 1):
        arch.cluster_wait()
        push_squares(sums, pushed, arrived, part, warp, lane, SPLIT)
    factors = [as_float(norms[turn]) * sigmoid(gates[turn]) for turn in range(SPLIT.turns)]
    step = cutlass.min(lane % SPLIT.lanes, SPLIT.steps - 1)
    if cutlass.const_expr(SPLIT.parts > 1):
        arch.mbarrier_wait(arrived, 0)
        total = sum_of_squares(pushed.iterator, SPLIT.parts, step, SPLIT)
    else:
        total = sum_of_squares(sums.iterator, SPLIT.warps, step, SPLIT)
    return total, factors
