"""After the MLA attention: the parts of a context merged, head values and output gate, by a cluster a head."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import EXP2, LOG2E, as_float, high, low, rounded, sum_lanes, unary
from ..cute_stages import stage
from ..cute_streaming import EVICT_FIRST, LOAD_W, multiply, read
from .cute_mma_front import PEER, STORE_GLOBAL, STORE_PEER, scale_of
from .cute_mma_gather import gather, share_gathered
from .cute_mma_parts import STORE_FLOAT, matrices, shared_float
from .cute_mma_sent import begun, ended

LOAD_FLOATS, LOAD_FLOAT = "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];", "ld.global.u32 $0, [$1];"
LOAD_ROW = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
LOG2 = "lg2.approx.f32 {$w0}, {$r0};"
MOST_AHEAD = 12
"""Parts whose loads are under way together, of a row and group; each is a trip to the L2, and 4 registers."""


@cute.jit
def value(
    partial: Int64 | None, lse: Int64 | None, w_uv: Int64, proj: Int64, out: Int64, k_scale: Int64 | None, rows: Int32,
    block: Int32, shared: Int32, F: cutlass.Constexpr, RELEASE: cutlass.Constexpr, came: list | None, D: cutlass.Constexpr,
):  # fmt: skip
    """The whole launch: see :class:`.around.Around`. Where contexts lie over ranks rows come from all of them, scaled: ``came``
    is [mailbox, the launch's counters, health record].
    """
    stage(F.build, "begin")
    t, _, _ = arch.thread_idx()
    lane, warp = t % 32, arch.make_warp_uniform(arch.warp_idx())
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    part = block % F.cluster
    head, first_row = block // F.cluster % F.heads, block // F.cluster // F.heads * 16
    group, quad = lane // 4, lane % 4
    policy = Int64(EVICT_FIRST)
    start = warp * (F.v_steps * 32) + quad * 8
    weights = []
    for s in cutlass.range_constexpr(F.v_steps):
        words = []
        for n in cutlass.range_constexpr(F.v_tiles):
            row = head * F.v_dim + part * F.own_v + n * 8 + group
            words += read(LOAD_W, w_uv + (Int64(row) * F.latent + start + s * 32) * 2, 4, [policy])
        weights.append(words)
    arch.cluster_arrive_relaxed()
    arch.griddepcontrol_wait()
    stage(F.build, "woken")
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    live = cutlass.min(rows - first_row, 16)
    if cutlass.const_expr(D is None):
        scale = scale_of(k_scale, F)
        # what needs nothing of what is read before it is asked for first: each of these was a trip of its own
        asked = first_parts(partial, live, first_row, head, part, t, F)
        gate = gate_of(proj, t, live, first_row, head, part, F)
        if live > 0:
            shares(lse, live, first_row, head, shared, lane, warp, None, F)
        arch.sync_threads()
        if live > 0:
            merge(partial, asked, live, first_row, head, part, shared, t, F)
        arch.sync_threads()
        stage(F.build, "sent")
        arch.cluster_wait()
        if live > 0:
            share_latent(live, part, scale, shared, t, F)
    else:
        gate = gate_of(proj, t, live, first_row, head, part, F)
        got = begun(came, block, block >= 0, D)
        if live > 0:
            gather(got, live, first_row, head, part, shared, block, t, F, D)
        arch.sync_threads()
        arch.cluster_wait()
        if live > 0:
            share_gathered(live, part, shared, t, F)
        ended(got, block, t, D)
    arch.cluster_arrive()
    arch.cluster_wait()
    stage(F.build, "heard")
    acc = [Float32(0.0)] * (4 * F.v_tiles)
    for s in cutlass.range_constexpr(F.v_steps):
        x = []
        for h in cutlass.range_constexpr(F.halves):
            at = shared + (h * 8 + group) * F.latent_pitch + (start + s * 32) * 2
            x += matrices(LOAD_ROW, at, 4)
        acc = multiply(acc, weights[s], x, F.halves)
    for n in cutlass.range_constexpr(F.v_tiles):
        for e in cutlass.range_constexpr(2 * F.halves):
            place = (warp * 16 + e // 2 * 8 + group) * F.own_v + n * 8 + quad * 2 + e % 2
            arch.inline_ptx(STORE_FLOAT, read_only_args=[shared + F.value_sums_at + place * 4, acc[4 * n + e]])
    arch.sync_threads()
    pairs = F.own_v // 2
    for turn in cutlass.range_constexpr(-(-F.tile_rows * pairs // 256)):
        e = t + turn * 256
        if e < live * pairs:
            row, v = e // pairs, e % pairs * 2
            column = head * F.v_dim + part * F.own_v + v
            if cutlass.const_expr(turn > 0):
                gate = gate_of(proj, e, live, first_row, head, part, F)
            first, second = Float32(0.0), Float32(0.0)
            for one in cutlass.range_constexpr(8):
                at = shared + F.value_sums_at + ((one * 16 + row) * F.own_v + v) * 4
                first += shared_float(at)
                second += shared_float(at + 4)
            word = rounded(first, second)
            word = rounded(low(word) * sigmoid(low(gate)), high(word) * sigmoid(high(gate)))
            to = out + (Int64(first_row + row) * (F.heads * F.v_dim) + column) * 2
            arch.inline_ptx(STORE_GLOBAL, read_only_args=[to, word])
    stage(F.build, "finished")


@cute.jit
def gate_of(
    proj: Int64, place: Int32, live: Int32, first_row: Int32, head: Int32, part: Int32, F: cutlass.Constexpr
):  # fmt: skip
    """The output gate at a pair of the block's values, ``place`` row by row; beyond the live rows the last one's."""
    pairs = F.own_v // 2
    row = first_row + cutlass.min(place // pairs, cutlass.max(live, 1) - 1)
    column = head * F.v_dim + part * F.own_v + place % pairs * 2
    return read(LOAD_FLOAT, proj + (Int64(row) * F.columns + F.q_lora + F.width + column) * 2, 1, [])[0]


@cute.jit
def sigmoid(x: Float32):
    """Of FP32, within a few units in the last place."""
    return Float32(1.0) / (Float32(1.0) + unary(EXP2, x * Float32(-LOG2E)))


@cute.jit
def shares(
    lse: Int64,
    live: Int32,
    first_row: Int32,
    head: Int32,
    shared: Int32,
    lane: Int32,
    warp: Int32,
    logs: Int32 | None,
    F: cutlass.Constexpr,
):
    """Each row's shares of its parts, unnormalised, and their sum: a warp a row and turn.

    ``logs``: where the logarithms of the sums go too. A row may then have no tokens: its shares and their sum are NaN, which no
    comparison finds above zero, and its logarithm is minus infinity.
    """
    turns = -(-F.splits // 32)
    for turn in cutlass.range_constexpr(-(-F.tile_rows // 8)):
        row = turn * 8 + warp
        if row < live:
            found = []
            top = Float32(-Float32.inf)
            for one in cutlass.range_constexpr(turns):
                split = one * 32 + lane
                place = Int64(cutlass.min(split, F.splits - 1)) * F.slot + (first_row + row) * F.heads + head
                (word,) = read(LOAD_FLOAT, lse + place * 4, 1, [])
                logarithm = as_float(word) if split < F.splits else Float32(-Float32.inf)
                found.append(logarithm)
                top = arch.fmax(top, logarithm)
            for step in cutlass.range_constexpr(5):
                top = arch.fmax(top, arch.shuffle_sync_bfly(top, 16 >> step))
            total = Float32(0.0)
            for one in cutlass.range_constexpr(turns):
                share = unary(EXP2, found[one] - top)
                total += share
                if one * 32 + lane < F.splits:
                    to = shared + F.shares_at + (row * F.splits + one * 32 + lane) * 4
                    arch.inline_ptx(STORE_FLOAT, read_only_args=[to, share])
            total = sum_lanes([total])[0]
            if lane == 0:
                arch.inline_ptx(STORE_FLOAT, read_only_args=[shared + F.totals_at + row * 4, total])
                if cutlass.const_expr(logs is not None):
                    logarithm = top + unary(LOG2, total)
                    logarithm = logarithm if total > Float32(0.0) else Float32(-Float32.inf)
                    arch.inline_ptx(STORE_FLOAT, read_only_args=[logs + row * 4, logarithm])


@cute.jit
def parts_ahead(F: cutlass.Constexpr):
    """Of a row and group."""
    return min(-(-F.splits // F.merge_groups), MOST_AHEAD)


@cute.jit
def parts_at(
    partial: Int64, turn: cutlass.Constexpr, live: Int32, first_row: Int32, head: Int32, part: Int32, t: Int32, F: cutlass.Constexpr
):  # fmt: skip
    """(address of a thread's four latents in part 0, row, group); beyond the live rows the last one's."""
    unit = turn * (256 // F.lanes) + t // F.lanes
    row, group = unit % F.tile_rows, unit // F.tile_rows
    there = first_row + cutlass.min(row, cutlass.max(live, 1) - 1)
    column = part * F.own_latent + t % F.lanes * 4
    return partial + ((Int64(there) * F.heads + head) * F.latent + column) * 4, row, group


@cute.jit
def ask_parts(base: Int64, split: Int32, F: cutlass.Constexpr):
    """Words of a thread's latents in every ``merge_groups``-th part from ``split`` on; beyond the last one that again."""
    words = []
    for one in cutlass.range_constexpr(parts_ahead(F)):
        place = cutlass.min(split + one * F.merge_groups, F.splits - 1)
        words += read(LOAD_FLOATS, base + Int64(place) * (F.slot * F.latent * 4), 4, [])
    return words


@cute.jit
def first_parts(
    partial: Int64, live: Int32, first_row: Int32, head: Int32, part: Int32, t: Int32, F: cutlass.Constexpr
):  # fmt: skip
    """What :func:`merge` begins with: it needs no shares to be asked for."""
    base, _, group = parts_at(partial, 0, live, first_row, head, part, t, F)
    return ask_parts(base, group, F)


@cute.jit
def merge(
    partial: Int64, first: list, live: Int32, first_row: Int32, head: Int32, part: Int32, shared: Int32, t: Int32,
    F: cutlass.Constexpr,
):  # fmt: skip
    """A group's sum of every ``merge_groups``-th part of a row, ascending; ``first``: of :func:`first_parts`."""
    hop = F.merge_groups * parts_ahead(F)
    for turn in cutlass.range_constexpr(F.merge_turns):
        base, row, group = parts_at(partial, turn, live, first_row, head, part, t, F)
        if (row < live) & (group < F.merge_groups):
            shares_at = shared + F.shares_at + row * F.splits * 4
            words = first if cutlass.const_expr(turn == 0) else ask_parts(base, group, F)
            sums = add_parts([Float32(0.0)] * 4, words, shares_at, group, F)
            for split in cutlass.range(group + hop, F.splits, hop, unroll=1):
                sums = add_parts(sums, ask_parts(base, split, F), shares_at, split, F)
            to = shared + F.merged_at + ((group * F.tile_rows + row) * F.own_latent + t % F.lanes * 4) * 4
            for e in cutlass.range_constexpr(4):
                arch.inline_ptx(STORE_FLOAT, read_only_args=[to + 4 * e, sums[e]])


@cute.jit
def add_parts(sums: list, words: list, shares_at: Int32, split: Int32, F: cutlass.Constexpr):
    """The parts of :func:`ask_parts` by their shares. One whose share is nothing may never have been written."""
    found = list(sums)
    for one in cutlass.range_constexpr(parts_ahead(F)):
        own = split + one * F.merge_groups
        by = shared_float(shares_at + cutlass.min(own, F.splits - 1) * 4)
        by = by if own < F.splits else Float32(0.0)
        for e in cutlass.range_constexpr(4):
            more = as_float(words[4 * one + e]) * by
            found[e] = found[e] + (more if by > Float32(0.0) else Float32(0.0))
    return found


@cute.jit
def share_latent(live: Int32, part: Int32, scale: Float32, shared: Int32, t: Int32, F: cutlass.Constexpr):
    """The block's share of each row, groups ascending, rounded, to every block of the cluster."""
    pairs = F.own_latent // 2
    for e in cutlass.range(t, live * pairs, 256, unroll=1):
        row, column = e // pairs, e % pairs * 2
        first, second = Float32(0.0), Float32(0.0)
        for group in cutlass.range_constexpr(F.merge_groups):
            at = shared + F.merged_at + ((group * F.tile_rows + row) * F.own_latent + column) * 4
            first += shared_float(at)
            second += shared_float(at + 4)
        factor = scale / shared_float(shared + F.totals_at + row * 4)
        word = rounded(first * factor, second * factor)
        to = shared + row * F.latent_pitch + (part * F.own_latent + column) * 2
        for peer in cutlass.range_constexpr(F.cluster):
            there = arch.inline_ptx(PEER, write_only_types=[Uint32], read_only_args=[to, Int32(peer)])
            arch.inline_ptx(STORE_PEER, read_only_args=[there, word])
