"""The CuTe DSL kernel of KDA: from projections and states to the gated, normalised output, in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import as_word
from ..cute_stages import stage
from ..cute_streaming import read
from .cute_core import as_floats, load_state
from .cute_halves import finish, prepare
from .cute_parts import WORD, group_slot, slot_of
from .cute_tokens import copy_taps, gate_biases, gate_weights, history, history_at, keep_window
from .layout import DIM


@cute.jit
def step(
    at: list, rows: Int32, block: Int32, memory: cute.Pointer, BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, REHEARSE: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
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
        old_values.append((number, run, token, on, column, history(at, token, on, SPLIT)))
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
        number, _, token = old_values[turn][:3]
        value_to.append(slot_of(slots, first_request + number // SPLIT.tokens, 1 + token, True, SPLIT))
    windows, oldest = [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        on, old = old_queries[turn][3] & (query_to[turn] >= 0), old_queries[turn][5]
        at = history_at(conv_states, query_to[turn], old_queries[turn][4], SPLIT)
        windows += [(at, on, True), (at + 2 * SPLIT.width, on, True)]
        oldest += [old[: len(old) // 2], old[len(old) // 2 :]]
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        on = old_values[turn][3] & (value_to[turn] >= 0)
        windows.append((history_at(conv_states, value_to[turn], old_values[turn][4], SPLIT), on, False))
        oldest.append(old_values[turn][5])
    stage(JITTER, "asked")

    begin = (proj, (weights, biases, a_word), old_queries, old_values, there)
    where = (rows, first_row, head, part, t, warp, memory)
    end = ([state, out, states], read_slots, there, own_slot, *where, arrived)
    if cutlass.const_expr(REHEARSE):
        words = rehearsed(begin, end, waiting[0], norms, where, BOUND, EPS, RELEASE, JITTER, SPLIT)
        kept = [old + new for old, new in zip(oldest, words, strict=True)]
    else:
        live, gates, kept_q, kept_k, kept_v = prepare(*begin, *where, BOUND, RELEASE, JITTER, SPLIT)
        finish(waiting, gates, norms, live, None, *end, EPS, JITTER, SPLIT)
        kept = [one for pair in zip(kept_q, kept_k, strict=True) for one in pair] + kept_v
    for (at, on, shared), words in zip(windows, kept, strict=True):
        keep_window(at, words, on, shared, part, SPLIT)
    stage(JITTER, "finished")


@cute.jit
def come(
    given: cute.Tensor, rest: cute.Tensor, begin: tuple, waiting: list, norms: list, where: tuple, BOUND: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """The first half, and what the second takes of loads into ``given`` (state, output gates, norm weights) and ``rest``."""
    live, gates, *kept = prepare(*begin, *where, BOUND, RELEASE, JITTER, SPLIT)
    now = as_floats(waiting) + gates + as_floats(norms)
    for i in cutlass.range_constexpr(len(now)):
        given[i] = now[i]
    fresh = [word for windows in kept for one in windows for word in one[3 * len(one) // 4 :]]
    rest[0] = live
    for i in cutlass.range_constexpr(len(fresh)):
        rest[1 + i] = Int32(fresh[i])


@cute.jit
def rehearsed(
    begin: tuple, end: tuple, waiting: list, norms: list, where: tuple, BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """Both halves of a block of one step, the second for nothing before the first: its instructions are fetched while what was asked
    for comes. What it is given waits for no load then.

    Returns:
        The new rows of the windows of query, key and values.
    """
    count, a_row = SPLIT.state_words, max(SPLIT.run // 2, 1)
    given = cute.make_rmem_tensor(count + 2 * SPLIT.turns, Float32)
    given.fill(0.0)
    rest = cute.make_rmem_tensor(1 + a_row * (2 * SPLIT.query_turns + SPLIT.value_turns), Int32)
    rest.fill(0)
    for real in cutlass.range(2, unroll=1):
        if real != Int32(0):
            come(given, rest, begin, waiting, norms, where, BOUND, RELEASE, JITTER, SPLIT)
        words = [as_word(given[i]) for i in range(count + 2 * SPLIT.turns)]
        gates_now = [given[count + turn] for turn in range(SPLIT.turns)]
        finish([words[:count]], gates_now, words[count + SPLIT.turns :], rest[0], real, *end, EPS, JITTER, SPLIT)
    return [
        [Uint32(rest[1 + i * a_row + k]) for k in range(a_row)]
        for i in range(2 * SPLIT.query_turns + SPLIT.value_turns)
    ]


@cute.kernel
def k3_kda_cute_step(
    proj: cute.Tensor, f_b: cute.Tensor, conv_q: cute.Tensor, conv_k: cute.Tensor, conv_v: cute.Tensor, a_log: cute.Tensor,
    dt_bias: cute.Tensor, o_norm: cute.Tensor, conv_state: cute.Tensor, state: cute.Tensor, slots: cute.Tensor, out: cute.Tensor,
    conv_states: cute.Tensor, states: cute.Tensor, rows: Int32,
    BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, REHEARSE: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
):  # fmt: skip
    """A cluster a head and group of requests: see :func:`step`."""
    block, _, _ = arch.block_idx()
    tensors = (
        proj, f_b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, conv_state, state, slots, out, conv_states, states,
    )  # fmt: skip
    memory = SmemAllocator().allocate_array(Int32, SPLIT.shared_bytes // 4, byte_alignment=16)
    step([one.iterator.toint() for one in tensors], rows, block, memory, BOUND, EPS, RELEASE, JITTER, REHEARSE, SPLIT)


k3_kda_cute_step.set_name_prefix("k3_kda_cute_step", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_step(
    proj: cute.Tensor, f_b: cute.Tensor, conv_q: cute.Tensor, conv_k: cute.Tensor, conv_v: cute.Tensor, a_log: cute.Tensor,
    dt_bias: cute.Tensor, o_norm: cute.Tensor, conv_state: cute.Tensor, state: cute.Tensor, slots: cute.Tensor, out: cute.Tensor,
    conv_states: cute.Tensor, states: cute.Tensor, rows: Int32,
    BOUND: cutlass.Constexpr, EPS: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, REHEARSE: cutlass.Constexpr, SPLIT: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side."""
    k3_kda_cute_step(
        proj, f_b, conv_q, conv_k, conv_v, a_log, dt_bias, o_norm, conv_state, state, slots, out, conv_states, states, rows,
        BOUND, EPS, RELEASE, JITTER, REHEARSE, SPLIT,
    ).launch(grid=[SPLIT.blocks, 1, 1], block=[SPLIT.threads, 1, 1], cluster=[SPLIT.parts, 1, 1], stream=stream)  # fmt: skip
