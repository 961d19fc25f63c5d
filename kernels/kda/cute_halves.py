"""The two halves of a block's work behind its early loads: up to the vectors of all steps, and from there to the outputs."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_numbers import rounded
from ..cute_stages import stage
from .cute_core import norm_factors, send_squares
from .cute_forms import at_once, outputs_of, roll_out, rolled, serial
from .cute_parts import STORE_HALF, floats, half, put_run
from .cute_tokens import convolved, gate_inputs, make_decay, make_query_and_key, taps_of, window
from .layout import DIM, RANK, TAPS


@cute.jit
def prepare(
    proj: Int64, gate: list, old_queries: list, old_values: list, there: list, rows: Int32, first_row: Int32, head: Int32,
    part: Int32, t: Int32, warp: Int32, memory: cute.Pointer, BOUND: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """From the dependency wait to vectors and values in shared memory.

    Returns:
        (live steps as bits, output gates of the thread's rows and step, windows of queries, of keys and of values).
    """
    weights, biases, a_word = gate
    lane = t % 32
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")

    live = Int32(0)
    for s in cutlass.range_constexpr(SPLIT.steps):
        live |= (Int32(1) << s) if there[s // SPLIT.tokens] & (first_row + s < rows) else Int32(0)
    fa = gate_inputs(proj, first_row, lane, live, SPLIT)
    windows_q, windows_k, betas, windows_v = [], [], [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, _, token, on, channel, old = old_queries[turn]
        row, half_way = first_row + number, len(old) // 2
        at = proj + (Int64(row) * SPLIT.columns + channel) * 2
        windows_q.append(window(old[:half_way], at, token, on, SPLIT))
        windows_k.append(window(old[half_way:], at + 2 * SPLIT.width, token, on, SPLIT))
        betas.append(half(proj + (Int64(row) * SPLIT.columns + 4 * SPLIT.width + RANK + head) * 2, on))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, _, token, on, column, old = old_values[turn]
        at = proj + (Int64(first_row + number) * SPLIT.columns + column) * 2
        windows_v.append(window(old, at, token, on, SPLIT))
    mine = t % SPLIT.lanes
    shows = (live >> mine) & 1 != 0
    gates = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        column = 3 * SPLIT.width + head * DIM + part * SPLIT.slice_rows + SPLIT.row(t, turn)
        gates.append(half(proj + (Int64(first_row + mine) * SPLIT.columns + column) * 2, shows))
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
    waiting: list, gates: list, norms: list, live: Int32, real: Int32 | None, at: list, read_slots: list, there: list,
    own_slot: Int32, rows: Int32, first_row: Int32, head: Int32, part: Int32, t: Int32, warp: Int32, memory: cute.Pointer,
    arrived: cute.Pointer, EPS: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """From the vectors to states and outputs; ``real`` zero: for nothing, with no live step: no wait, nothing sent or stored."""
    state, out, states = at
    lane, mine = t % 32, t % SPLIT.lanes
    writes = (mine < SPLIT.steps) & (first_row + mine < rows)
    if cutlass.const_expr(real is not None):
        writes = writes & (real != Int32(0))
    place = (own_slot, live, head, part, t, memory)
    dealt = []
    if cutlass.const_expr(SPLIT.form == "serial"):
        kept = serial(waiting, state, states, read_slots, there, *place, SPLIT)
    elif cutlass.const_expr(SPLIT.form == "rolled"):
        kept = rolled(waiting[0], states, *place, SPLIT)
    else:
        dealt = at_once(waiting[0], memory, t, SPLIT)
        kept = outputs_of(dealt, lane, SPLIT)
    send_squares(kept, real, memory, arrived, part, warp, lane, SPLIT)
    stage(JITTER, "product")
    if cutlass.const_expr(SPLIT.form == "wy"):
        roll_out(waiting[0], dealt, states, *place, SPLIT)
    stage(JITTER, "listening")
    scale, factors = norm_factors(norms, gates, real, memory, arrived, lane, EPS, SPLIT)
    stage(JITTER, "heard")
    for turn in cutlass.range_constexpr(SPLIT.turns):
        value = kept[turn] * scale * factors[turn]
        if writes:
            column = head * DIM + part * SPLIT.slice_rows + SPLIT.row(t, turn)
            to_row = out + (Int64(first_row + mine) * SPLIT.width + column) * 2
            arch.inline_ptx(STORE_HALF, read_only_args=[to_row, rounded(value, Float32(0.0))])
