"""CuTe DSL kernels of the MLA core where each context lies over all ranks: four launches, two exchanges.

Queries of all heads go to all ranks; each attends to the tokens it holds; rows go to the owners of their heads, who merge.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import as_float, as_word, rounded
from ..cute_packets import times
from ..cute_streaming import read
from ..cute_waits import pause, publish
from .cute_mma import address_of, begin, part_of
from .cute_mma_front import front, scale_of
from .cute_mma_gather import ask_queries
from .cute_mma_parts import LOAD_WORD, matrices, shared_float
from .cute_mma_sent import begun, ended, placed
from .cute_mma_value import LOAD_ROW, first_parts, merge, shares, value


@cute.kernel
def k3_mla_cute_mma_dcp_query(
    proj: cute.Tensor, q_a_norm: cute.Tensor, kv_a_norm: cute.Tensor, q_b: cute.Tensor, w_uk: cute.Tensor, k_scale: Any,
    table: cute.Tensor, context: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor,
    cache: cute.Tensor, rows: Int32, rank: Int32,
    F: cutlass.Constexpr, D: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """Absorbed queries of the own heads to all ranks, and those of the cache's new rows that lie here."""
    block, _, _ = arch.block_idx()
    shared = SmemAllocator().allocate_array(Int32, F.front_bytes // 4, byte_alignment=128).toint()
    to = [targets.iterator.toint(), epochs.iterator.toint() + D.counters_at("query"), health.iterator.toint(), rank]
    front(
        proj.iterator.toint(), q_a_norm.iterator.toint(), kv_a_norm.iterator.toint(), q_b.iterator.toint(),
        w_uk.iterator.toint(), address_of(k_scale), table.iterator.toint(), context.iterator.toint(), None,
        cache.iterator.toint(), rows, block, shared, F, RELEASE, to, D,
    )  # fmt: skip


@cute.kernel
def k3_mla_cute_mma_dcp_attend(
    queries: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, cache: cute.Tensor, k_scale: Any, table: cute.Tensor,
    context: cute.Tensor, partial: cute.Tensor, lse: cute.Tensor, rows: Int32, rank: Int32,
    A: cutlass.Constexpr, D: cutlass.Constexpr, SCALE: cutlass.Constexpr, EARLY: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """As :func:`.cute_mma.k3_mla_cute_mma_attend`, of all ranks' heads with the tokens that lie here; maybe none."""
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    split, group_of = block % A.splits, block // A.splits
    request, first_query = group_of // A.groups, group_of % A.groups * A.queries
    pages, keys_at = table.iterator.toint(), cache.iterator.toint()
    shared = SmemAllocator().allocate_array(Int32, A.shared_bytes // 4, byte_alignment=128).toint()
    live_rows = cutlass.min(rows - request * A.q_len, A.q_len)
    before, old, first, last = Int32(0), Int32(0), Int32(0), Int32(0)
    if cutlass.const_expr(EARLY):  # noqa: SIM102, compiled in or not, then asked at run time
        if live_rows > 0:
            before, old, first, last = held_bounds(context.iterator.toint(), request, live_rows, split, rank, A, D)
            begin(keys_at, pages, shared, request, first, last, old, t, True, A)
    arch.griddepcontrol_wait()
    counters = epochs.iterator.toint() + D.counters_at("attend")
    told = begun([queries.iterator.toint(), counters, health.iterator.toint()], block, block >= 0, D)
    if live_rows > 0:
        if cutlass.const_expr(not EARLY):
            before, old, first, last = held_bounds(context.iterator.toint(), request, live_rows, split, rank, A, D)
        live = cutlass.min(live_rows * A.heads - first_query, A.queries)
        at_query = request * A.q_len * A.heads + first_query
        begin(keys_at, pages, shared, request, first, last, old if cutlass.const_expr(EARLY) else first, t, False, A)
        if cutlass.const_expr(RELEASE == "loads"):
            arch.griddepcontrol_launch_dependents()
        ask_queries(told, shared, request, first_query, live, block, lane, warp, A, D)
        part_of(
            keys_at, k_scale, pages, partial, lse, shared, request, before, first, last, live, at_query, split, first_query,
            t, lane, warp, A, SCALE, rank, D,
        )  # fmt: skip
    arch.sync_threads()
    ended(told, block, t, D)


@cute.jit
def held_bounds(
    context: Int64,
    request: Int32,
    live_rows: Int32,
    split: Int32,
    rank: Int32,
    A: cutlass.Constexpr,
    D: cutlass.Constexpr,
):
    """(tokens before the step on all ranks, those of them here, first token of the part here, the one behind its last)."""
    (held,) = read(LOAD_WORD, context + Int64(request) * 4, 1, [])
    before = Int32(held)
    tokens = D.held(before + live_rows, rank)
    first = split * A.part(tokens)
    return before, D.held(before, rank), first, cutlass.min(first + A.part(tokens), tokens)


@cute.kernel
def k3_mla_cute_mma_dcp_send(
    partial: cute.Tensor, lse: cute.Tensor, k_scale: Any, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor,
    rows: Int32, F: cutlass.Constexpr, D: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """This rank's rows of all heads, its parts merged, to the owners of the heads: latents as BF16, and their logarithm."""
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane, warp = t % 32, arch.make_warp_uniform(arch.warp_idx())
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    shared = SmemAllocator().allocate_array(Int32, F.send_bytes // 4, byte_alignment=128).toint()
    part = block % F.cluster
    head, first_row = block // F.cluster % F.heads, block // F.cluster // F.heads * 16
    arch.griddepcontrol_wait()
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    counters = epochs.iterator.toint() + D.counters_at("send")
    told = begun([targets.iterator.toint(), counters, health.iterator.toint()], block, block >= 0, D)
    scale = scale_of(address_of(k_scale), F)
    logs = shared + F.value_sums_at
    live = cutlass.min(rows - first_row, 16)
    first = first_parts(partial.iterator.toint(), live, first_row, head, part, t, F)
    if live > 0:
        shares(lse.iterator.toint(), live, first_row, head, shared, lane, warp, logs, F)
    arch.sync_threads()
    if live > 0:
        merge(partial.iterator.toint(), first, live, first_row, head, part, shared, t, F)
    arch.sync_threads()
    if (live > 0) & (told[2] == Uint32(0)):
        send_rows(told, live, first_row, head, part, scale, shared, logs, block, t, F, D)
    ended(told, block, t, D)


@cute.jit
def send_rows(
    told: list, live: Int32, first_row: Int32, head: Int32, part: Int32, scale: Float32, shared: Int32, logs: Int32, block: Int32,
    t: Int32, F: cutlass.Constexpr, D: cutlass.Constexpr,
):  # fmt: skip
    """Four latents a packet, groups ascending, scaled and rounded, times the owner's factor; of a factor of zero no tokens."""
    slot, factor = placed(told, head // D.heads)
    pause(D.jitter, told[1], block)
    for e in cutlass.range(t, live * F.lanes, 256, unroll=1):
        row, quad = e // F.lanes, e % F.lanes
        sums = [Float32(0.0)] * 4
        for group in cutlass.range_constexpr(F.merge_groups):
            at = shared + F.merged_at + ((group * F.tile_rows + row) * F.own_latent + quad * 4) * 4
            sums = [one + as_float(more) for one, more in zip(sums, matrices(LOAD_ROW, at, 4), strict=True)]
        total, logarithm = shared_float(shared + F.totals_at + row * 4), shared_float(logs + row * 4)
        share = scale / total if total > Float32(0.0) else Float32(0.0)
        logarithm = logarithm if factor & Uint32(0x7FFF) != Uint32(0) else Float32(-Float32.inf)
        words = [times(rounded(sums[i] * share, sums[i + 1] * share), factor) for i in (0, 2)]
        within = D.row_within(
            Int32(told[1] & Uint32(1)), first_row + row, head % D.heads, part * F.lanes + quad
        )  # fmt: skip
        publish(slot + within, [*words, as_word(logarithm), told[1]], "sys")


@cute.kernel
def k3_mla_cute_mma_dcp_value(
    latents: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, w_uv: cute.Tensor, proj: cute.Tensor, out: cute.Tensor,
    rows: Int32, F: cutlass.Constexpr, D: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, heads * v] from all ranks' rows of the own heads: merged, through W_UV, gated."""
    block, _, _ = arch.block_idx()
    shared = SmemAllocator().allocate_array(Int32, F.value_bytes // 4, byte_alignment=128).toint()
    came = [latents.iterator.toint(), epochs.iterator.toint() + D.counters_at("value"), health.iterator.toint()]
    value(
        None, None, w_uv.iterator.toint(), proj.iterator.toint(), out.iterator.toint(), None, rows, block, shared, F, RELEASE,
        came, D,
    )  # fmt: skip


k3_mla_cute_mma_dcp_query.set_name_prefix(
    "k3_mla_cute_mma_dcp_query", remove_cutlass_symbol=True, keep_mangled_name=False
)
k3_mla_cute_mma_dcp_attend.set_name_prefix(
    "k3_mla_cute_mma_dcp_attend", remove_cutlass_symbol=True, keep_mangled_name=False
)
k3_mla_cute_mma_dcp_send.set_name_prefix(
    "k3_mla_cute_mma_dcp_send", remove_cutlass_symbol=True, keep_mangled_name=False
)
k3_mla_cute_mma_dcp_value.set_name_prefix(
    "k3_mla_cute_mma_dcp_value", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch_query(
    proj: cute.Tensor, q_a_norm: cute.Tensor, kv_a_norm: cute.Tensor, q_b: cute.Tensor, w_uk: cute.Tensor, k_scale: Any,
    table: cute.Tensor, context: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor,
    cache: cute.Tensor, rows: Int32, rank: Int32,
    F: cutlass.Constexpr, D: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster for each head and 16 rows, and clusters that insert."""
    k3_mla_cute_mma_dcp_query(
        proj, q_a_norm, kv_a_norm, q_b, w_uk, k_scale, table, context, targets, epochs, health, cache, rows, rank, F, D, RELEASE
    ).launch(grid=[F.head_blocks + F.insert_blocks, 1, 1], block=[256, 1, 1], cluster=[F.cluster, 1, 1], stream=stream)  # fmt: skip


@cute.jit
def launch_attend(
    queries: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, cache: cute.Tensor, k_scale: Any, table: cute.Tensor,
    context: cute.Tensor, partial: cute.Tensor, lse: cute.Tensor, rows: Int32, rank: Int32,
    A: cutlass.Constexpr, D: cutlass.Constexpr, SCALE: cutlass.Constexpr, EARLY: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block for each part and group of queries of a request."""
    k3_mla_cute_mma_dcp_attend(
        queries, epochs, health, cache, k_scale, table, context, partial, lse, rows, rank, A, D, SCALE, EARLY, RELEASE
    ).launch(grid=[A.blocks, 1, 1], block=[256, 1, 1], stream=stream)


@cute.jit
def launch_send(
    partial: cute.Tensor, lse: cute.Tensor, k_scale: Any, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor,
    rows: Int32, F: cutlass.Constexpr, D: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: blocks for each head of any rank and 16 rows, no clusters."""
    k3_mla_cute_mma_dcp_send(partial, lse, k_scale, targets, epochs, health, rows, F, D, RELEASE).launch(
        grid=[F.head_blocks, 1, 1], block=[256, 1, 1], stream=stream
    )


@cute.jit
def launch_value(
    latents: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, w_uv: cute.Tensor, proj: cute.Tensor, out: cute.Tensor,
    rows: Int32, F: cutlass.Constexpr, D: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster for each head and 16 rows."""
    k3_mla_cute_mma_dcp_value(latents, epochs, health, w_uv, proj, out, rows, F, D, RELEASE).launch(
        grid=[F.head_blocks, 1, 1], block=[256, 1, 1], cluster=[F.cluster, 1, 1], stream=stream
    )
