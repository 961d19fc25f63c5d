"""The two halves of a block's work behind its early loads: up to the vectors of all steps, and from there to the outputs."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_numbers import rounded
from ..cute_stages import stage
from .cute_core import norm_factors, send_squares
from .cute_forms import at_once, begin_state, outputs_of, roll_out, rolled, serial, store_step
from .cute_parts import STORE_HALF, floats, half, put_run
from .cute_tokens import convolved, fresh, gate_inputs, make_decay, make_query_and_key, taps_of, window
from .layout import DIM, RANK, TAPS


@cute.jit
def projected(
    proj: Int64, first_row: Int32, head: Int32, part: Int32, t: Int32, SPLIT: cutlass.Constexpr
):  # fmt: skip
    """Addresses of a thread's low-rank gate, of beta in the block's first row, and of the output gates of its rows and step."""
    lane, mine = t % 32, t % SPLIT.lanes
    low_rank = proj + Int64(first_row + lane // 4) * (2 * SPLIT.columns) + (4 * SPLIT.width + lane % 4 * 8) * 2
    beta = proj + Int64(first_row) * (2 * SPLIT.columns) + (4 * SPLIT.width + RANK + head) * 2
    row = proj + Int64(first_row + mine) * (2 * SPLIT.columns)
    gates = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        gates.append(row + (3 * SPLIT.width + head * DIM + part * SPLIT.slice_rows + SPLIT.row(t, turn)) * 2)
    return low_rank, beta, gates


@cute.jit
def prepare(
    at: tuple, gate: list, old_queries: list, old_values: list, there: list, rows: Int32, first_row: Int32, head: Int32,
    part: Int32, t: Int32, warp: Int32, memory: cute.Pointer, BOUND: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """From the dependency wait to vectors and values in shared memory. ``at``: see :func:`projected`.

    Returns:
        (live steps as bits, output gates of the thread's rows and step, windows of queries, of keys and of values).
    """
    weights, biases, a_word = gate
    low_rank, beta_at, gates_at = at
    lane = t % 32
    # a number, not a predicate a step: there are but seven of those
    live = Int32(0)
    for r in cutlass.range_constexpr(SPLIT.together):
        live |= Int32(((1 << SPLIT.tokens) - 1) << (r * SPLIT.tokens)) if there[r] else Int32(0)
    live &= (Int32(1) << cutlass.max(cutlass.min(rows - first_row, SPLIT.steps), 0)) - 1
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")

    fa = gate_inputs(low_rank, lane, live, SPLIT)
    windows_q, windows_k, betas, windows_v = [], [], [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, _, token, on, new, old = old_queries[turn]
        half_way = len(old) // 2
        windows_q.append((old[:half_way], fresh(new, token, on, SPLIT)))
        windows_k.append((old[half_way:], fresh(new + 2 * SPLIT.width, token, on, SPLIT)))
        betas.append(half(beta_at + Int64(number) * (2 * SPLIT.columns), on))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        _, _, token, on, new, old = old_values[turn]
        windows_v.append((old, fresh(new, token, on, SPLIT)))
    shows = (live >> (t % SPLIT.lanes)) & 1 != 0
    gates = [half(one, shows) for one in gates_at]
    if cutlass.const_expr(SPLIT.together > 1):  # here too the assembler would ask for some of them later
        arch.sync_threads()
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()

    values = floats(memory, SPLIT.values_at, SPLIT.steps * SPLIT.slice_rows, SPLIT.run)
    taps = floats(memory, SPLIT.taps_at, SPLIT.channels * TAPS, TAPS)
    make_decay(weights, biases, a_word, fa, warp, lane, memory, BOUND, SPLIT)
    if cutlass.const_expr(SPLIT.parts > 1):
        arch.cluster_wait()
    arch.cp_async_commit_group()
    arch.cp_async_wait_group(0)
    arch.sync_threads()
    # not where they are asked for: the assembler would put the first of these in front of the last loads
    windows_q, windows_k, windows_v = [[window(*one, SPLIT) for one in of] for of in (windows_q, windows_k, windows_v)]
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, share = old_queries[turn][:2]
        if number < SPLIT.steps:
            make_query_and_key(windows_q[turn], windows_k[turn], taps, betas[turn], number, share, lane, memory, SPLIT)
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, run = old_values[turn][:2]
        if number < SPLIT.steps:
            put_run(
                values,
                number * SPLIT.slice_runs + run,
                convolved(windows_v[turn], taps_of(taps, 2 * DIM + run * SPLIT.run, SPLIT), SPLIT),
            )
    stage(JITTER, "sent")
    arch.sync_threads()
    return live, gates, windows_q, windows_k, windows_v


@cute.jit
def finish(
    waiting: list, gates: list, norms: list, live: Int32, at: list, read_slots: list, there: list,
    own_slot: Int32, rows: Int32, first_row: Int32, head: Int32, part: Int32, t: Int32, warp: Int32, memory: cute.Pointer,
    arrived: cute.Pointer, EPS: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """From the vectors to states and outputs."""
    old_rows, out, new_rows = at
    lane, mine = t % 32, t % SPLIT.lanes
    writes = (mine < SPLIT.steps) & (first_row + mine < rows)
    place = (own_slot, live, t, memory)
    if cutlass.const_expr(SPLIT.form == "serial"):
        kept, after = serial(waiting, old_rows, new_rows, read_slots, there, *place, SPLIT)
    elif cutlass.const_expr(SPLIT.form == "rolled"):
        kept = rolled(waiting[0], new_rows, *place, SPLIT)
    else:
        # stores take longer than the exchange: they begin before it
        dealt = at_once(waiting[0], memory, t, SPLIT)
        kept, current = outputs_of(dealt, lane, SPLIT), begin_state(waiting[0], SPLIT)
        roll_out(current, dealt, new_rows, *place, 0, SPLIT.steps // 2, SPLIT)
    # the last state, or the second half of all: nobody waits for it, and the sums would stand behind it
    send_squares(kept, memory, arrived, part, warp, lane, SPLIT)
    stage(JITTER, "product")
    if cutlass.const_expr(SPLIT.form == "serial"):
        arch.sync_warp()  # or the assembler moves the stores up again
        store_step(new_rows, own_slot, Int32(SPLIT.steps - 1), live, after, SPLIT)
    if cutlass.const_expr(SPLIT.form == "wy"):
        roll_out(current, dealt, new_rows, *place, SPLIT.steps // 2, SPLIT.steps, SPLIT)
    stage(JITTER, "listening")
    scale, factors = norm_factors(norms, gates, memory, arrived, lane, EPS, SPLIT)
    stage(JITTER, "heard")
    for turn in cutlass.range_constexpr(SPLIT.turns):
        value = kept[turn] * scale * factors[turn]
        if writes:
            column = head * DIM + part * SPLIT.slice_rows + SPLIT.row(t, turn)
            to_row = out + (Int64(first_row + mine) * SPLIT.width + column) * 2
            arch.inline_ptx(STORE_HALF, read_only_args=[to_row, rounded(value, Float32(0.0))])
