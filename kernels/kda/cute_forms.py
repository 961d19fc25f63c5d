"""The tokens of a block in three forms: one after the other, the same in a loop of one body, or at once.

At once (the WY or UT form of the delta rule): with S0 the state before the step and g the product of all decays up to a
token, u_t = beta_t (v_t - S0 (g_t k_t) - sum over s < t of A_ts u_s) with A_ts = (g_t k_t) . (k_s / g_s), and the output is
S0 (g_t q_t) + sum over s <= t of B_ts u_s with B_ts = (g_t q_t) . (k_s / g_s). So one pass over S0 and one reduction give
what every token needs of it; k_s / g_s are more rows of the same pass, which give A and B; what is left of the chain
is one shuffle and one multiply-add a token. The states, which are stored after every token, follow: half of them before the
sums of the norm are sent, the others while those are on their way.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute import arch

from .cute_core import as_floats, load_state, store_state, update, vector
from .cute_parts import add_lanes, floats, fma, run_of
from .layout import MOST_STEPS


@cute.jit
def store_step(
    states: list, own_slot: Int32, step: Int32, live: Int32, values: list, SPLIT: cutlass.Constexpr
):  # fmt: skip
    """The state after a step, to its slot: of live steps that have one."""
    to = arch.shuffle_sync(own_slot, step) if cutlass.const_expr(SPLIT.steps > 1) else own_slot
    if ((live >> step) & 1 != 0) & (to >= 0):
        store_state(states, to, values, SPLIT)


@cute.jit
def serial(
    waiting: list, state: list, states: list, read_slots: list, there: list, own_slot: Int32, live: Int32, t: Int32,
    memory: cute.Pointer, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """(outputs of the step that the lane writes, state after the last step, which is not stored yet); each request's tokens one
    after the other, its state asked for ``depth`` before.
    """
    waiting, current, kept = list(waiting), [], []
    for s in cutlass.range_constexpr(SPLIT.steps):
        r = s // SPLIT.tokens
        if cutlass.const_expr(s % SPLIT.tokens == 0):
            current = as_floats(waiting[r])
            if cutlass.const_expr(r + SPLIT.depth < SPLIT.together):
                n = r + SPLIT.depth
                waiting.append(load_state(state, read_slots[n], there[n], SPLIT))
        current, outs = update(current, memory, t, Int32(s), SPLIT)
        mine = t % SPLIT.lanes
        for turn in cutlass.range_constexpr(SPLIT.turns):
            if cutlass.const_expr(s == 0):
                kept.append(outs[turn])
            else:
                kept[turn] = outs[turn] if mine == s else kept[turn]
        if cutlass.const_expr(s < SPLIT.steps - 1):
            store_step(states, own_slot, Int32(s), live, current, SPLIT)
    return kept, current


@cute.jit
def begin_state(words: list, SPLIT: cutlass.Constexpr):
    """The state before the step, as numbers that a loop may change."""
    current, begin = cute.make_rmem_tensor(SPLIT.state_words, Float32), as_floats(words)
    for i in cutlass.range_constexpr(SPLIT.state_words):
        current[i] = begin[i]
    return current


@cute.jit
def rolled(
    words: list, states: list, own_slot: Int32, live: Int32, t: Int32, memory: cute.Pointer, SPLIT: cutlass.Constexpr
):  # fmt: skip
    """The bits of :func:`serial` for one request, its code once for all tokens: it is fetched cold."""
    current, kept = begin_state(words, SPLIT), cute.make_rmem_tensor(SPLIT.turns, Float32)
    kept.fill(0.0)
    for s in cutlass.range(SPLIT.steps, unroll=2):
        after, outs = update([current[i] for i in range(SPLIT.state_words)], memory, t, s, SPLIT)
        for i in cutlass.range_constexpr(SPLIT.state_words):
            current[i] = after[i]
        for turn in cutlass.range_constexpr(SPLIT.turns):
            kept[turn] = outs[turn] if t % SPLIT.lanes == s else kept[turn]
        store_step(states, own_slot, s, live, after, SPLIT)
    return [kept[turn] for turn in range(SPLIT.turns)]


@cute.jit
def deal_lanes(values: list, lane: Int32, END: cutlass.Constexpr):
    """Sums over ``END`` neighbouring lanes of fewer or as many values, a power of two: each lane gets one, in their order."""
    sums, levels = list(values), len(values).bit_length() - 1
    for level in cutlass.range_constexpr(levels):
        upper, half = (lane & (END >> (level + 1))) != 0, len(sums) // 2
        dealt = []
        for i in cutlass.range_constexpr(half):
            given = sums[i] if upper else sums[half + i]
            own = sums[half + i] if upper else sums[i]
            dealt.append(own + arch.shuffle_sync_bfly(given, END >> (level + 1)))
        sums = dealt
    (total,) = add_lanes(sums, 1, END >> levels)
    return total


@cute.jit
def products(rows: list, memory: cute.Pointer, t: Int32, SPLIT: cutlass.Constexpr):
    """A lane's shares of each row's products: with all steps' g k, then with all g q; keys ascending."""
    sums = [[Float32(0.0)] * (2 * SPLIT.padded_steps) for _ in rows]
    for step in cutlass.range_constexpr(SPLIT.steps):
        for kind in cutlass.range_constexpr(2):
            other = vector(memory, Int32(step), 3 - kind, t, SPLIT)
            for row in cutlass.range_constexpr(len(rows)):
                total = rows[row][0] * other[0]
                for i in cutlass.range_constexpr(1, 4 * SPLIT.quads):
                    total = fma(rows[row][i], other[i], total)
                sums[row][kind * SPLIT.padded_steps + step] = total
    return sums


@cute.jit
def at_once(words: list, memory: cute.Pointer, t: Int32, SPLIT: cutlass.Constexpr):
    """Of each of the thread's rows one number: lanes have u of one step, or its output (:meth:`.layout.Split.dealt`)."""
    lane, padded, a_row = t % 32, SPLIT.padded_steps, 4 * SPLIT.quads
    kind, step = SPLIT.dealt(lane)
    known = cutlass.min(step, SPLIT.steps - 1)
    (beta, _) = run_of(floats(memory, SPLIT.scalars_at, 2 * MOST_STEPS, 2), known, 2)
    begin = as_floats(words)
    rows = [begin[turn * a_row : (turn + 1) * a_row] for turn in range(SPLIT.turns)]
    for turn in cutlass.range_constexpr(SPLIT.key_turns):
        rows.append(vector(memory, cutlass.min(SPLIT.key_row(t, turn), SPLIT.steps - 1), 4, t, SPLIT))
    sums = products(rows, memory, t, SPLIT)
    factors = floats(memory, SPLIT.factors_at, 2 * padded * padded, padded)
    for turn in cutlass.range_constexpr(SPLIT.key_turns):
        total, past = deal_lanes(sums[SPLIT.turns + turn], lane, SPLIT.lanes), SPLIT.key_row(t, turn)
        factor = total if kind == 1 else Float32(0.0) - beta * total
        factor = factor if past < step + kind else Float32(0.0)
        if (past < SPLIT.steps) & (lane == SPLIT.holder(lane, kind, step)):
            factors[kind * padded + step, past] = factor
    dealt = [deal_lanes(sums[turn], lane, SPLIT.lanes) for turn in range(SPLIT.turns)]
    arch.sync_threads()
    mine = run_of(factors, kind * padded + step, padded)
    values = floats(memory, SPLIT.values_at, SPLIT.steps * SPLIT.slice_rows, 1)
    for turn in cutlass.range_constexpr(SPLIT.turns):
        u = beta * (values[known * SPLIT.slice_rows + SPLIT.row(t, turn), 0] - dealt[turn])
        dealt[turn] = dealt[turn] if kind == 1 else u
    for s in cutlass.range_constexpr(SPLIT.steps):
        us = [arch.shuffle_sync(one, SPLIT.holder(lane, 0, s)) for one in dealt]
        dealt = [fma(mine[s], u, one) for u, one in zip(us, dealt, strict=True)]
    return dealt


@cute.jit
def outputs_of(dealt: list, lane: Int32, SPLIT: cutlass.Constexpr):
    """Outputs of the step that the lane writes."""
    step = cutlass.min(lane % SPLIT.lanes, SPLIT.steps - 1)
    return [arch.shuffle_sync(one, SPLIT.holder(lane, 1, step)) for one in dealt]


@cute.jit
def roll_out(
    current: cute.Tensor, dealt: list, states: list, own_slot: Int32, live: Int32, t: Int32, memory: cute.Pointer,
    FIRST: cutlass.Constexpr, END: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """``current`` to after token ``END``, from after ``FIRST`` tokens and what :func:`at_once` found; stores it after each.

    One body: stores take longer than its instructions, and code is fetched cold.
    """
    a_row = 4 * SPLIT.quads
    for s in cutlass.range(FIRST, END, unroll=1):
        decay, key = vector(memory, s, 0, t, SPLIT), vector(memory, s, 1, t, SPLIT)
        for turn in cutlass.range_constexpr(SPLIT.turns):
            u = arch.shuffle_sync(dealt[turn], SPLIT.holder(t % 32, 0, s))
            for i in cutlass.range_constexpr(a_row):
                current[turn * a_row + i] = fma(u, key[i], current[turn * a_row + i] * decay[i])
        after = [current[i] for i in range(SPLIT.state_words)]
        store_step(states, own_slot, s, live, after, SPLIT)
