"""The CuTe DSL kernel of KDA: from projections and states to the gated, normalised output, in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_stages import stage
from ..cute_streaming import read
from .cute_core import load_state, state_rows
from .cute_halves import finish, prepare, projected
from .cute_parts import WORD, entry, group_slot, slot_words, zero_behind
from .cute_tokens import copy_taps, gate_biases, gate_weights, history, in_slot, keep_window, places
from .layout import DIM


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
    slots_here = slot_words(slots, first_request, lane, SPLIT)
    arch.sync_warp()
    weights = gate_weights(f_b, head, warp, lane, SPLIT)
    biases = gate_biases(dt_bias, head, warp, lane, SPLIT)
    (a_word,) = read(WORD[True], a_log + Int64(head) * 4, 1, [])
    copy_taps([conv_q, conv_k, conv_v], head, part, t, memory, SPLIT)
    norms = []
    for turn in cutlass.range_constexpr(SPLIT.turns):
        row = part * SPLIT.slice_rows + SPLIT.row(t, turn)
        norms += read(WORD[True], o_norm + Int64(row) * 4, 1, [])
    # every address but for its slot, while the slots are on their way
    pools, here = [conv_state, conv_states], (rows, first_row, SPLIT)
    queries, makes = [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, share = SPLIT.query(warp, turn)
        channel = head * DIM + (share * 32 + lane) * SPLIT.run
        queries.append((number, share, *places(pools, proj, number, channel, *here)))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, run = SPLIT.value(t, turn)
        column = 2 * SPLIT.width + head * DIM + part * SPLIT.slice_rows + SPLIT.value(t, 0)[1] * SPLIT.run
        makes.append((number, run, *places(pools, proj, number, column, *here)))
    old_rows, new_rows = state_rows(state, head, part, t, SPLIT), state_rows(states, head, part, t, SPLIT)
    others = projected(proj, first_row, head, part, t, SPLIT)
    arrived = cute.recast_ptr((memory + SPLIT.barrier_at // 4).align(16), dtype=Int64)
    if cutlass.const_expr(SPLIT.parts > 1):
        if t == 0:
            arch.mbarrier_init(arrived, 1)
            arch.mbarrier_init_fence()
            arch.mbarrier_arrive_and_expect_tx(arrived, SPLIT.expected_bytes)
        arch.cluster_arrive_relaxed()
    # the assembler moves loads, but not over a barrier: none above may wait for a slot
    arch.sync_threads()
    first = zero_behind([*old_rows, others[0], *others[2], *[one for made in queries + makes for one in made[4::2]]])
    read_slots = [entry(slots_here, Int32(r), first, SPLIT) for r in range(SPLIT.together)]
    old_queries, old_values = [], []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, share, token, on, old, _, new = queries[turn]
        slot = group_slot(read_slots, number, SPLIT)
        on, at = on & (slot >= 0), in_slot(old, slot, SPLIT)
        words = history(at, token, on, SPLIT) + history(at + 2 * SPLIT.width, token, on, SPLIT)
        old_queries.append((number, share, token, on, new, words))
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, run, token, on, old, _, new = makes[turn]
        slot = group_slot(read_slots, number, SPLIT)
        on = on & (slot >= 0)
        old_values.append((number, run, token, on, new, history(in_slot(old, slot, SPLIT), token, on, SPLIT)))
    there = [(read_slots[r] >= 0) & (first_row + r * SPLIT.tokens < rows) for r in range(SPLIT.together)]
    waiting = [load_state(old_rows, read_slots[r], there[r], SPLIT) for r in range(SPLIT.depth)]
    # where to; lane s has that of step s
    number = cutlass.min(lane, SPLIT.steps - 1)
    own_slot = entry(slots_here, number // SPLIT.tokens, 1 + number % SPLIT.tokens, SPLIT)
    windows = []
    for turn in cutlass.range_constexpr(SPLIT.query_turns):
        number, _, token, _, _, at, _ = queries[turn]
        slot = entry(slots_here, number // SPLIT.tokens, 1 + token, SPLIT)
        on, at = old_queries[turn][3] & (slot >= 0), in_slot(at, slot, SPLIT)
        windows += [(at, on, True), (at + 2 * SPLIT.width, on, True)]
    for turn in cutlass.range_constexpr(SPLIT.value_turns):
        number, _, token, _, _, at, _ = makes[turn]
        slot = entry(slots_here, number // SPLIT.tokens, 1 + token, SPLIT)
        on = old_values[turn][3] & (slot >= 0)
        windows.append((in_slot(at, slot, SPLIT), on, False))
    stage(JITTER, "asked")

    begin = (others, (weights, biases, a_word), old_queries, old_values, there)
    where = (rows, first_row, head, part, t, warp, memory)
    end = ([old_rows, out, new_rows], read_slots, there, own_slot, *where, arrived)
    live, gates, kept_q, kept_k, kept_v = prepare(*begin, *where, BOUND, RELEASE, JITTER, SPLIT)
    finish(waiting, gates, norms, live, *end, EPS, JITTER, SPLIT)
    kept = [one for pair in zip(kept_q, kept_k, strict=True) for one in pair] + kept_v
    for (at, on, shared), words in zip(windows, kept, strict=True):
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
