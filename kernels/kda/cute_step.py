"""The CuTe DSL kernel of KDA: from projections and states to the gated, normalised output, in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import rounded
from ..cute_stages import stage
from ..cute_streaming import read
from .cute_core import load_state, norm_factors, send_squares
from .cute_forms import at_once, outputs_of, roll_out, rolled, serial
from .cute_parts import STORE_HALF, WORD, floats, group_slot, half, put_run, slot_of
from .cute_tokens import (
    convolved,
    copy_taps,
    gate_biases,
    gate_inputs,
    gate_weights,
    history,
    history_at,
    keep_window,
    make_decay,
    make_query_and_key,
    taps_of,
    window,
)
from .layout import DIM, RANK, TAPS


@cute.jit
def step(
    at: list, rows: Int32, block: Int32, memory: cute.Pointer, BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """One block's steps. ``at`` are addresses, in the order of the kernel's parameters.

    A request that reads no slot is padding: its states are neither read nor written, its outputs are zeros.
    Nothing is written of rows from ``rows`` on, nor of a token without a slot, but its output. History that other
    blocks read may be overwritten here (a cache is updated in place): so rows of it are written last, when all blocks of
    the head have sent their sums, and so have read.
    """
    proj, f_b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, conv_state, state, slots, out, conv_states, states = at
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    lane, warp = t % 32, arch.make_warp_uniform(arch.warp_idx())
    group, head, part = SPLIT.place(block)
    first_row, first_request = group * SPLIT.steps, group * SPLIT.together
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()

    # all of what the step before this one, or nobody, wrote last: asked for before the dependency wait, slots first
    read_slots = [slot_of(slots, first_request + r, Int32(0), True, SPLIT) for r in range(SPLIT.together)]
    own, makes = [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, share = SPLIT.query(warp, turn)
        own.append((number, share, group_slot(slots, read_slots, first_request, number, SPLIT)))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, run = SPLIT.value(t, turn)
        makes.append((number, run, group_slot(slots, read_slots, first_request, number, SPLIT)))
    weights = gate_weights(f_b, head, warp, lane, SPLIT)
    biases = gate_biases(dt_bias, head, warp, lane, SPLIT)
    (a_word,) = read(WORD[True], a_log + Int64(head) * 4, 1, [])
    copy_taps([conv_q, conv_k, conv_v], head, part, t, memory, SPLIT)
    value_channel = head * DIM + part * SPLIT.slice_rows + makes[0][1] * SPLIT.run
    norms = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        row = part * SPLIT.slice_rows + SPLIT.row(t, turn)
        norms += read(WORD[True], o_norm + Int64(row) * 4, 1, [])
    arrived = cute.recast_ptr((memory + SPLIT.barrier_at // 4).align(16), dtype=Int64)
    if cutlass.const_expr(SPLIT.parts > 1):
        if t == 0:
            arch.mbarrier_init(arrived, 1)
            arch.mbarrier_init_fence()
            arch.mbarrier_arrive_and_expect_tx(arrived, SPLIT.expected_bytes)
        arch.cluster_arrive_relaxed()
    # the assembler moves loads, but not over a barrier: none above may wait for a slot
    arch.sync_threads()
    old_queries, old_values = [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, share, slot = own[turn]
        on = (number < SPLIT.steps) & (first_row + number < rows) & (slot >= 0)
        token, channel = number % SPLIT.tokens, head * DIM + (share * 32 + lane) * SPLIT.run
        at = history_at(conv_state, slot, channel, SPLIT) + token * (6 * SPLIT.width)
        old = history(at, token, on, SPLIT) + history(at + 2 * SPLIT.width, token, on, SPLIT)
        old_queries.append((number, share, token, on, channel, old))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, run, slot = makes[turn]
        on = (number < SPLIT.steps) & (first_row + number < rows) & (slot >= 0)
        token, column = number % SPLIT.tokens, 2 * SPLIT.width + value_channel
        at = history_at(conv_state, slot, column, SPLIT) + token * (6 * SPLIT.width)
        old_values.append((number, token, on, column, history(at, token, on, SPLIT)))
    there = [(read_slots[r] >= 0) & (first_row + r * SPLIT.tokens < rows) for r in range(SPLIT.together)]
    waiting = [load_state(state, read_slots[r], head, part, t, there[r], SPLIT) for r in range(SPLIT.depth)]
    # where to, behind all that is waited for; lane s has that of step s
    number = cutlass.min(lane, SPLIT.steps - 1)
    own_slot = slot_of(slots, first_request + number // SPLIT.tokens, 1 + number % SPLIT.tokens, True, SPLIT)
    query_to, value_to = [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, _, token = old_queries[turn][:3]
        query_to.append(slot_of(slots, first_request + number // SPLIT.tokens, 1 + token, True, SPLIT))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, token = old_values[turn][:2]
        value_to.append(slot_of(slots, first_request + number // SPLIT.tokens, 1 + token, True, SPLIT))
    stage(JITTER, "asked")
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
        number, token, on, column, old = old_values[turn]
        at = proj + (Int64(first_row + number) * SPLIT.columns + column) * 2
        windows_v.append(window(old, at, token, on, SPLIT))
    mine = t % SPLIT.lanes
    writes = (mine < SPLIT.steps) & (first_row + mine < rows)
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
        number, run, _ = makes[turn]
        if number < SPLIT.steps:
            put_run(
                values,
                number * SPLIT.slice_runs + run,
                convolved(windows_v[turn], taps_of(taps, 2 * DIM + run * SPLIT.run, SPLIT), SPLIT),
            )
    stage(JITTER, "sent")
    windows = []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        on, at = old_queries[turn][3] & (query_to[turn] >= 0), old_queries[turn][4]
        at = history_at(conv_states, query_to[turn], at, SPLIT)
        windows += [(at, windows_q[turn], on, True), (at + 2 * SPLIT.width, windows_k[turn], on, True)]
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        on = old_values[turn][2] & (value_to[turn] >= 0)
        at = history_at(conv_states, value_to[turn], old_values[turn][3], SPLIT)
        windows.append((at, windows_v[turn], on, False))
    arch.sync_threads()

    place = (own_slot, live, head, part, t, memory)
    dealt = []
    if cutlass.const_expr(SPLIT.form == "serial"):
        kept = serial(waiting, state, states, read_slots, there, *place, SPLIT)
    elif cutlass.const_expr(SPLIT.form == "rolled"):
        kept = rolled(waiting[0], states, *place, SPLIT)
    else:
        dealt = at_once(waiting[0], memory, t, SPLIT)
        kept = outputs_of(dealt, lane, SPLIT)
    send_squares(kept, memory, arrived, part, warp, lane, SPLIT)
    stage(JITTER, "product")
    if cutlass.const_expr(SPLIT.form == "wy"):
        roll_out(waiting[0], dealt, states, *place, SPLIT)
    stage(JITTER, "listening")
    scale, factors = norm_factors(norms, gates, memory, arrived, lane, EPS, SPLIT)
    stage(JITTER, "heard")
    for turn in cutlass.range_constexpr(SPLIT.turns):
        value = kept[turn] * scale * factors[turn]
        if writes:
            column = head * DIM + part * SPLIT.slice_rows + SPLIT.row(t, turn)
            to_row = out + (Int64(first_row + mine) * SPLIT.width + column) * 2
            arch.inline_ptx(STORE_HALF, read_only_args=[to_row, rounded(value, Float32(0.0))])
    for at, words, on, shared in windows:
        keep_window(at, words, on, shared, part, SPLIT)
    stage(JITTER, "finished")


@cute.kernel
def k3_kda_cute_step(
    proj: cute.Tensor, f_b: cute.Tensor, conv_q: cute.Tensor, conv_k: cute.Tensor, conv_v: cute.Tensor, a_log: cute.Tensor,
    dt_bias: cute.Tensor, o_norm: cute.Tensor, conv_state: cute.Tensor, state: cute.Tensor, slots: cute.Tensor, out: cute.Tensor,
    conv_states: cute.Tensor, states: cute.Tensor, rows: Int32,
    BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """A cluster a head and group of requests: see :func:`step`."""
    block, _, _ = arch.block_idx()
    tensors = (
        proj, f_b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, conv_state, state, slots, out, conv_states, states,
    )  # fmt: skip
    memory = SmemAllocator().allocate_array(Int32, SPLIT.shared_bytes // 4, byte_alignment=16)
    step([one.iterator.toint() for one in tensors], rows, block, memory, BOUND, EPS, RELEASE, JITTER, SPLIT)


k3_kda_cute_step.set_name_prefix("k3_kda_cute_step", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_step(
    proj: cute.Tensor, f_b: cute.Tensor, conv_q: cute.Tensor, conv_k: cute.Tensor, conv_v: cute.Tensor, a_log: cute.Tensor,
    dt_bias: cute.Tensor, o_norm: cute.Tensor, conv_state: cute.Tensor, state: cute.Tensor, slots: cute.Tensor, out: cute.Tensor,
    conv_states: cute.Tensor, states: cute.Tensor, rows: Int32,
    BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side."""
    k3_kda_cute_step(
        proj, f_b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, conv_state, state, slots, out, conv_states, states, rows,
        BOUND, EPS, RELEASE, JITTER, SPLIT,
    ).launch(grid=[SPLIT.blocks, 1, 1], block=[SPLIT.threads, 1, 1], cluster=[SPLIT.parts, 1, 1], stream=stream)  # fmt: skip
