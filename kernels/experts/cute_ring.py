"""Part of the CuTe DSL kernels of the experts: the ring of weights a warp keeps in flight, across units of all kinds."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ..cute_streaming import EVICT_FIRST, LOAD_W, read
from .cute_parts import LOAD_SCALE, LOAD_SCALE_IF, LOAD_W_IF, item_of, read_if
from .layout import BLOCK_BYTES, SCALE_BYTES

# a slot of the ring is five words: four of weights, one of scales (of a routed unit)


@cute.jit
def first_of(number: Int32, PLAN: cutlass.Constexpr):
    """Which routed first product has the number among theirs: see :attr:`.plan.Plan.hole`."""
    if cutlass.const_expr(PLAN.hole > 0):
        return cutlass.max(cutlass.min(number, PLAN.blocks - PLAN.hole - 1), number - PLAN.hole)
    return number


@cute.jit
def behind(after: Int32, ends: list, block: Int32, PLAN: cutlass.Constexpr):
    """The number ``after`` of a block, or where that is left out, its next: see :attr:`.plan.Plan.hole` and ``spared``."""
    following = after
    if cutlass.const_expr(PLAN.hole > 0):
        left_out = (after >= PLAN.blocks) & (after < PLAN.blocks + PLAN.hole)
        following = after + PLAN.blocks if left_out else following
    if cutlass.const_expr(PLAN.spared > 0):  # noqa: SIM102, compiled in or not, then asked at run time
        if following >= ends[2]:
            following = ends[2] + block - PLAN.spared if block >= PLAN.spared else ends[3]
    return following


@cute.jit
def weights_of(
    unit: Int32, ends: list, table: cute.Tensor, bases: list, warp: Int32, lane: Int32, PLAN: cutlass.Constexpr
):
    """Where a lane's weights of a unit lie: [words, scales, steps to ask for ahead, the same for scales]; no steps after the last unit.

    ``ends``: of the units of shared first, routed first, shared second, routed second products.
    """
    block, words, scales = Int64(0), bases[0], bases[1]
    steps, scaled = Int32(0), Int32(0)
    if unit < ends[0]:
        block, words, steps = PLAN.shared_first_block(Int64(unit), warp), bases[4], Int32(PLAN.depth)
    elif unit < ends[1]:
        number = first_of(unit - ends[0], PLAN)
        item = number // PLAN.tiles
        expert, _, _ = item_of(table, item, warp, PLAN)
        block = PLAN.first_block(Int64(expert), number - item * PLAN.tiles, warp)
        steps = Int32(PLAN.depth)
        scaled = steps
    elif unit < ends[2]:
        block, words, steps = PLAN.shared_second_block(Int64(unit - ends[1]), warp), bases[5], Int32(PLAN.shared_depth2)
    elif unit < ends[3]:
        item = (unit - ends[2]) // PLAN.chunks
        expert, _, _ = item_of(table, item, warp, PLAN)
        block = PLAN.second_block(Int64(expert), unit - ends[2] - item * PLAN.chunks, warp)
        words, scales, steps = bases[2], bases[3], Int32(PLAN.depth2)
        scaled = steps
    return [words + block * BLOCK_BYTES + lane * 16, scales + block * SCALE_BYTES + lane // 4 * 4, steps, scaled]


@cute.jit
def fill(at: list, PLAN: cutlass.Constexpr, SCALED: cutlass.Constexpr):
    """The first steps of a unit."""
    ring = []
    for d in cutlass.range_constexpr(PLAN.depth):
        ring += read_if(LOAD_W_IF, d, at[0] + d * BLOCK_BYTES, 4, [Int64(EVICT_FIRST)], at[2])
        if cutlass.const_expr(SCALED):
            ring += read_if(LOAD_SCALE_IF, d, at[1] + d * SCALE_BYTES, 1, [Int64(EVICT_FIRST)], at[3])
        else:
            ring.append(Uint32(0))
    return ring


@cute.jit
def refill(
    ring: list, SLOT: cutlass.Constexpr, STEP: cutlass.Constexpr, STEPS: cutlass.Constexpr, at: list, following: list,
    SCALED: cutlass.Constexpr,
):  # fmt: skip
    """Ask for step ``STEP`` of a unit of ``STEPS``, or for what lies beyond it of the following unit; the ring."""
    words = list(ring)
    policy = [Int64(EVICT_FIRST)]
    if cutlass.const_expr(STEP < STEPS):
        words[5 * SLOT : 5 * SLOT + 4] = read(LOAD_W, at[0] + STEP * BLOCK_BYTES, 4, policy)
        if cutlass.const_expr(SCALED):
            words[5 * SLOT + 4] = read(LOAD_SCALE, at[1] + STEP * SCALE_BYTES, 1, policy)[0]
    else:
        ahead = STEP - STEPS
        words[5 * SLOT : 5 * SLOT + 4] = read_if(
            LOAD_W_IF, ahead, following[0] + ahead * BLOCK_BYTES, 4, policy, following[2]
        )
        words[5 * SLOT + 4] = read_if(
            LOAD_SCALE_IF, ahead, following[1] + ahead * SCALE_BYTES, 1, policy, following[3]
        )[0]
    return words
