"""Producer part of cute_apart: 56 columns of a rank's partial sums, the weights brought to shared memory by asynchronous copies."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_stages import stage
from ..cute_streaming import LOAD_X, multiply
from ..cute_tiles import RUN, ask_tile, tile_places, tile_words
from ..cute_waits import release
from .cute_product import COLUMNS, each, publish_sums, put_sums, where_to

TILE = COLUMNS * RUN
"""Weights that one copy brings."""
X_AHEAD = 4


@cute.jit
def ask(
    load: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
    tile: Int32,
    slot: cutlass.Constexpr,
):
    """One tile of weights on its way into a slot of the warp's."""
    with arch.elect_one():
        arch.mbarrier_arrive_and_expect_tx(full + slot, TILE * 2)
    ask_tile(load, source, target, full + slot, tile, slot)


@cute.jit
def partial_copied(
    x: Int64, load: cute.CopyAtom, w_map: cute.Tensor, ring: cute.Pointer, bars: cute.Pointer, sums: cute.Tensor, targets: Int64,
    counter: Int64, health: Int64, rows: Int32, block: Int32, warp: Int32, lane: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr, FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    JITTER: cutlass.Constexpr,
):  # fmt: skip
    """As :func:`.cute_product.partial` of one chunk, for at most 16 rows: the same sums in the same order.

    A warp asks for its own tiles of ``w``, ``DEPTH`` ahead, and waits for them alone: warps meet when all have their sums. Nothing of
    the weights is in registers before it is multiplied, nor in the way of other loads of the SM.
    """
    group, quad = lane // 4, lane % 4
    steps, n_tiles, halves = WIDTH // (RUN * WARPS), COLUMNS // 8, 1 if ROWS <= 8 else 2
    depth, ahead = min(DEPTH, steps), min(X_AHEAD, steps)
    if cutlass.const_expr(RELEASE == "entry"):
        release(JITTER, block * 64 + 16 + warp)
    full = bars + warp * depth
    with arch.elect_one():
        for slot in cutlass.range_constexpr(depth):
            arch.mbarrier_init(full + slot, 1)
    arch.mbarrier_init_fence()
    arch.sync_warp()
    source, target = tile_places(load, w_map, ring + warp * (depth * TILE * 2), block, COLUMNS, depth)
    for slot in cutlass.range_constexpr(depth):
        ask(load, source, target, full, Int32(slot * WARPS) + warp, slot)
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")

    start, hop, x_at = warp * RUN + quad * 8, RUN * WARPS * 2, []
    for h in cutlass.range_constexpr(halves):
        x_at.append(x + (Int64(cutlass.min(h * 8 + group, rows - 1)) * WIDTH + start) * 2)
    x_in = [each(LOAD_X, x_at, s * hop) for s in range(ahead)]
    epoch, claim, whom = where_to(counter, targets, health, block, quad, TP, 0, STORES)
    stage(JITTER, "asked")
    if cutlass.const_expr(RELEASE == "loads"):
        release(JITTER, block * 64 + 16 + warp)
    acc = [Float32(0.0)] * (n_tiles * 4)
    at = Int64((ring + warp * (depth * TILE * 2)).toint()) + lane * 16
    for s in cutlass.range_constexpr(steps):
        slot = s % depth
        arch.mbarrier_wait(full + slot, s // depth % 2)
        acc = multiply(acc, tile_words(at + slot * TILE * 2, COLUMNS), x_in[s % ahead], halves)
        if cutlass.const_expr(s + depth < steps):
            # what was read is read before the copy writes there
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            ask(load, source, target, full, Int32((s + depth) * WARPS) + warp, slot)
        if cutlass.const_expr(s + ahead < steps):
            x_in[s % ahead] = each(LOAD_X, x_at, (s + ahead) * hop)
    put_sums(acc, sums, warp, group, quad, ROWS, 1, 1, n_tiles)
    publish_sums(sums, epoch, claim, whom, block, warp, lane, ROWS, HIDDEN, TP, 0, WARPS, FORM, STORES, 0, JITTER)
    return epoch
