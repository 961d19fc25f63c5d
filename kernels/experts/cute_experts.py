"""CuTe DSL kernel: routed MXFP4 experts and the shared expert in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import as_float, rounded
from ..cute_stages import stage
from ..cute_streaming import LOAD_X, read
from ..cute_waits import count_launch, epoch_of
from .cute_group import group, pair_of, slots
from .cute_mxfp8 import hidden_words, publish_wide, quantize_rows
from .cute_parts import (
    LOAD_X_IF,
    all_done,
    factors,
    four,
    item_of,
    load_packets,
    publish_four,
    read_if,
    settled,
    situ,
    step,
)
from .cute_ring import behind, fill, first_of, refill, weights_of
from .cute_shared import shared_first, shared_hidden, shared_second
from .layout import ACTIVATION_EXPONENT, WEIGHT_EXPONENT
from .plan import TOKENS

UNSCALE = 2.0 ** -(WEIGHT_EXPONENT + ACTIVATION_EXPONENT)
ACTIVATION = 2.0**ACTIVATION_EXPONENT
LOAD_WEIGHT = "ld.global.u32 $0, [$1];"
STORE_PAIR = "st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};"


@cute.jit
def lane_x(unit: Int32, ends: list, table: cute.Tensor, x: Int64, warp: Int32, lane: Int32, PLAN: cutlass.Constexpr):
    """Address of this lane's activations of a unit of the routed first product. A row that is not there repeats the last one."""
    row = Int32(0)
    if cutlass.const_expr(not PLAN.single):
        item = (cutlass.max(cutlass.min(unit, ends[1] - 1), ends[0]) - ends[0]) // PLAN.tiles
        _, place, count = PLAN.item_parts(table[PLAN.items_at + item])
        row = table[PLAN.rows_at + place + cutlass.min(lane // 4, count - 1)]
    return x + Int64(row) * (2 * PLAN.latent) + (warp * (PLAN.steps1 * 64) + lane % 4 * 16)


@cute.jit
def routed_hidden(
    unit: Int32, parts: cute.Tensor, parity: Int32, table: cute.Tensor, turn: Int32, warp: Int32, lane: Int32, hidden: Int64,
    epoch: Uint32, PLAN: cutlass.Constexpr, BETA: cutlass.Constexpr, LINEAR: cutlass.Constexpr,
):  # fmt: skip
    """Add all warps' sums of a unit of the routed first product and publish the hidden values: a warp for two tokens."""
    item = unit // PLAN.tiles
    _, place, count = item_of(table, item, warp, PLAN)
    row = lane % 16
    for k in cutlass.range_constexpr(-(-4 // PLAN.warps)):
        pair = (warp + turn) % PLAN.warps + k * PLAN.warps
        if 2 * pair < cutlass.min(count, TOKENS):
            token = 2 * pair + lane // 16
            both = []
            for tile in cutlass.range_constexpr(2):
                value = parts[PLAN.part_at(parity, 0, tile, row, token)]
                for w in cutlass.range_constexpr(1, PLAN.warps):
                    value += parts[PLAN.part_at(parity, w, tile, row, token)]
                both.append(value * UNSCALE)
            values = four(situ(both[0], both[1], BETA, LINEAR), lane)
            if lane % 4 == 0 and token < count:
                at = PLAN.hidden_at(place + token, 0, 0, 0) + (unit - item * PLAN.tiles) * 4 + row // 4
                if cutlass.const_expr(PLAN.hidden_rounding == ""):
                    publish_four(hidden + Int64(at) * 16, [value * ACTIVATION for value in values], epoch)
                else:
                    publish_wide(hidden + Int64(at) * 16, values, epoch)


@cute.jit
def weighted_sum(
    row: Int32, packet: Int32, outputs: Int64, weights: Int64, table: cute.Tensor, lane: Int32, epoch: Uint32,
    health: Int64, block: Int32, earnest: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """Four columns of a row: its experts' outputs times their weights, slots ascending; a single row's slots all in one round."""
    slot = cutlass.min(lane, PLAN.top_k - 1)
    mine = slot
    if cutlass.const_expr(not PLAN.single):
        mine = pair_of(table, row, slot, PLAN)
    factor = as_float(read(LOAD_WEIGHT, weights + Int64(row * PLAN.top_k + slot) * 4, 1, [])[0])
    sums = [Float32(0.0)] * 4
    each = PLAN.summed
    for k0 in cutlass.range_constexpr(0, PLAN.top_k, each):
        slots = range(k0, min(k0 + each, PLAN.top_k))
        if cutlass.const_expr(PLAN.single):
            wanted = [outputs + Int64(packet) * 16 + k * PLAN.row_packets * 16 for k in slots]
        else:
            wanted = [outputs + Int64(PLAN.output_at(arch.shuffle_sync(mine, k), packet)) * 16 for k in slots]
        got = settled(load_packets(wanted), wanted, 2, epoch, health, block, earnest)
        for k in cutlass.range_constexpr(len(wanted)):
            weight = arch.shuffle_sync(factor, k0 + k)
            for i in cutlass.range_constexpr(4):
                word = got[2 * k + i // 2]
                value = as_float(word << 16 if cutlass.const_expr(i % 2 == 0) else word & Uint32(0xFFFF0000))
                sums[i] = sums[i] + weight * value
    return sums


@cute.jit
def lane_hidden(unit: Int32, ends: list, table: cute.Tensor, warp: Int32, lane: Int32, PLAN: cutlass.Constexpr):
    """This lane's first packet of hidden values of a unit of the routed second product; of the last unit where there is no such.

    A number, not an address: it lives across waits and MMAs, where registers are fewest.
    """
    item = (cutlass.max(cutlass.min(unit, ends[3] - 1), ends[2]) - ends[2]) // PLAN.chunks
    _, place, count = item_of(table, item, warp, PLAN)
    pair = place + cutlass.min(lane // 4, count - 1)
    return Int32(PLAN.hidden_at(pair, 0, lane % 4, 0))


@cute.jit
def stash(
    place: Int32, parity: Int32, table: cute.Tensor, hidden: Int64, warp: Int32, lane: Int32, epoch: Uint32, health: Int64,
    block: Int32, PLAN: cutlass.Constexpr,
):  # fmt: skip
    """Take the hidden values of an item of a single row into the block's table. Ends with a barrier.

    Two parities: some warps take the next item's, while others still multiply these; they are done before the barrier behind it.
    """
    for k in cutlass.range_constexpr(-(-PLAN.hidden_packets // PLAN.threads)):
        first = warp * 32 + k * PLAN.threads
        if first < PLAN.hidden_packets:
            # whole warps wait; lanes beyond the last packet wait for it, too
            packet = cutlass.min(first + lane, PLAN.hidden_packets - 1)
            wanted = [hidden + Int64(place * PLAN.hidden_packets + packet) * 16]
            got = settled(load_packets(wanted), wanted, 2, epoch, health, block)
            for i in cutlass.range_constexpr(2):
                table[PLAN.stashed_at(parity, packet) + i] = Int32(got[i])
    arch.sync_threads()


@cute.jit
def batch_of(hidden: Int64, first: Int32, PLAN: cutlass.Constexpr):
    """Addresses of the packets of so many groups as a warp holds at once."""
    return [hidden + Int64(first) * 16 + PLAN.hidden_at(0, b // 2, 0, b % 2) * 16 for b in range(2 * PLAN.batch)]


@cute.jit
def lot(block: Int32, PLAN: cutlass.Constexpr):
    """[first unit of a block, how far apart its units lie, whether any are the shared expert's, whether any are routed]."""
    unit, stride, wide, routed = Int32(block), Int32(PLAN.blocks), Int32(1), Int32(1)
    if cutlass.const_expr(PLAN.reserved > 0):
        if block < PLAN.reserved:
            stride, routed = Int32(PLAN.reserved), Int32(0)
        else:
            unit, stride, wide = block - PLAN.reserved, Int32(PLAN.blocks - PLAN.reserved), Int32(0)
    return [unit, stride, wide, routed]


@cute.kernel
def k3_experts_cute_stream(
    latent: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor, w13: cute.Tensor, w13_scale: cute.Tensor, w2: cute.Tensor,
    w2_scale: cute.Tensor, x: cute.Tensor, gate_up: cute.Tensor, down: cute.Tensor, out: cute.Tensor, shared_out: cute.Tensor,
    hidden: cute.Tensor, outputs: cute.Tensor, wide: cute.Tensor, done: cute.Tensor, coarse: cute.Tensor, ready: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, early: Int32,
    PLAN: cutlass.Constexpr, BETA: cutlass.Constexpr, LINEAR: cutlass.Constexpr, EARLY: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, latent], this rank's partial of the routed experts, and shared_out[rows, hidden]; ``rows <= PLAN.rows``.

    A warp keeps ``PLAN.depth`` steps of weights in flight through all its units, whatever their kind: the first steps of
    the next unit are asked for during the last ones of this, and the shared expert's before the dependency wait. Hidden values
    and expert outputs go from block to block as packets that carry the launch's epoch: blocks wait for one another. First products
    never wait, second ones for first ones only, sums for second ones.
    Sums: MMAs of a scale group ascending (shared: of all groups of a warp), groups of a warp ascending in FP32, then (first
    products) warps ascending; expert outputs rounded to BF16, weighted and added by slots ascending.

    ``EARLY``: the shared expert's first products come before tokens are grouped; with ``early``, when x is older than the
    launch before, ahead of the dependency wait too.
    """
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    memory = SmemAllocator()
    parts = memory.allocate_tensor(Float32, cute.make_layout(PLAN.parts), byte_alignment=16)
    table = memory.allocate_tensor(Int32, cute.make_layout(PLAN.table_words), byte_alignment=16)
    token, quad = lane // 4, lane % 4
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    bases = [one.iterator.toint() for one in (w13, w13_scale, w2, w2_scale, gate_up, down)]
    counter, record, latent_at, x_at, hidden_at, outputs_at, wide_at, done_at, ready_at = [
        one.iterator.toint() for one in (epochs, health, latent, x, hidden, outputs, wide, done, ready)
    ]
    unit, stride, takes_wide, takes_routed = lot(block, PLAN)
    turn = Int32(0)
    ends = [takes_wide * PLAN.shared_first]
    asked = Int32(PLAN.depth) if unit < ends[0] else Int32(0)
    at = [bases[4] + PLAN.shared_first_block(Int64(unit), warp) * 512 + lane * 16, bases[1], asked, Int32(0)]
    ring = fill(at, PLAN, False) if cutlass.const_expr(PLAN.wide > 0) else [Uint32(0)] * (5 * PLAN.depth)
    if cutlass.const_expr(EARLY):  # noqa: SIM102, compiled in or not, then asked at run time
        if early == Int32(0):
            arch.griddepcontrol_wait()
    if cutlass.const_expr(not EARLY):
        arch.griddepcontrol_wait()
    stage(JITTER, "woken")
    epoch = epoch_of(counter, block)
    if cutlass.const_expr(EARLY):
        ends *= 4  # nothing is known yet of what comes behind the shared expert's units
        while unit < ends[0]:
            following = weights_of(unit + stride, ends, table, bases, warp, lane, PLAN)
            ring = shared_first(ring, at, following, x_at, rows, parts, turn % 2, warp, lane, PLAN)
            arch.sync_threads()
            shared_hidden(unit, parts, turn % 2, turn, warp, lane, wide_at, done_at, epoch, PLAN, BETA, LINEAR)
            unit, turn, at = unit + stride, turn + 1, following
        arch.griddepcontrol_wait()
        ends = ends[:1]
    if cutlass.const_expr(PLAN.latent_rounding != ""):
        number = block * PLAN.warps + warp
        quantize_rows(latent_at, coarse.iterator.toint(), ready_at, rows, number, lane, epoch, PLAN)
    near, held, items, left = Int64(0), [], Int32(0), Int32(0)
    if cutlass.const_expr(PLAN.single):
        # a single row's activations are known before its experts: ahead of the weights, not in their queue
        if cutlass.const_expr(PLAN.known and (EARLY or PLAN.wide == 0)):
            near = lane_x(unit, ends, table, latent_at, warp, lane, PLAN)
            for e in cutlass.range_constexpr(PLAN.x_depth):
                held += read(LOAD_X, near + e * 64, 4, [])
        items = slots(ids.iterator.toint(), table, warp, lane, PLAN) * takes_routed
    else:
        items = group(ids.iterator.toint(), rows, table, t, PLAN) * takes_routed
    first = ends[0] + items * PLAN.tiles + PLAN.hole
    ends += [first, first + takes_wide * PLAN.shared_second]
    ends.append(ends[2] + items * PLAN.chunks)
    unit = behind(unit, ends, block, PLAN)
    if unit >= ends[0]:
        at = weights_of(unit, ends, table, bases, warp, lane, PLAN)
        ring = fill(at, PLAN, True)
    stage(JITTER, "asked")

    if cutlass.const_expr(PLAN.wide > 0 and not EARLY):
        while unit < ends[0]:
            after = behind(unit + stride, ends, block, PLAN)
            following = weights_of(after, ends, table, bases, warp, lane, PLAN)
            ring = shared_first(ring, at, following, x_at, rows, parts, turn % 2, warp, lane, PLAN)
            arch.sync_threads()
            # some warps finish the unit, while the others begin the next; they are back before the next barrier but one
            shared_hidden(unit, parts, turn % 2, turn, warp, lane, wide_at, done_at, epoch, PLAN, BETA, LINEAR)
            unit, turn, at = after, turn + 1, following

    if cutlass.const_expr(PLAN.latent_rounding != ""):
        all_done(ready_at, rows * PLAN.spans, t, epoch, record, block, PLAN)
        latent_at = coarse.iterator.toint()
    if cutlass.const_expr(len(held) == 0):
        near = lane_x(unit, ends, table, latent_at, warp, lane, PLAN)
        left = Int32(PLAN.x_depth) if unit < ends[1] else Int32(0)
        for e in cutlass.range_constexpr(PLAN.x_depth):
            held += read_if(LOAD_X_IF, e, near + e * 64, 4, [], left)
    while unit < ends[1]:
        after = behind(unit + stride, ends, block, PLAN)
        following = weights_of(after, ends, table, bases, warp, lane, PLAN)
        then = lane_x(after, ends, table, latent_at, warp, lane, PLAN)
        left = Int32(PLAN.x_depth) if after < ends[1] else Int32(0)
        acc = [Float32(0.0)] * 8
        for s in cutlass.range_constexpr(PLAN.steps1):
            d, e = 5 * (s % PLAN.depth), 4 * (s % PLAN.x_depth)
            acc = step(ring[d : d + 4], ring[d + 4], factors(held[e : e + 4]), acc)
            ring = refill(ring, s % PLAN.depth, s + PLAN.depth, PLAN.steps1, at, following, True)
            ahead = s + PLAN.x_depth - PLAN.steps1
            if cutlass.const_expr(PLAN.single and PLAN.x_depth == PLAN.steps1):
                pass  # every unit multiplies the same row
            elif cutlass.const_expr(ahead < 0):
                held[e : e + 4] = read(LOAD_X, near + (s + PLAN.x_depth) * 64, 4, [])
            else:
                held[e : e + 4] = read_if(LOAD_X_IF, ahead, then + ahead * 64, 4, [], left)
        for tile in cutlass.range_constexpr(2):
            for upper in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    place = PLAN.part_at(turn % 2, warp, tile, 8 * upper + token, 2 * quad + i)
                    parts[place] = acc[4 * tile + 2 * upper + i]
        arch.sync_threads()
        routed_hidden(
            first_of(unit - ends[0], PLAN), parts, turn % 2, table, turn, warp, lane, hidden_at, epoch, PLAN, BETA, LINEAR
        )  # fmt: skip
        unit, turn, at, near = after, turn + 1, following, then

    stage(JITTER, "sent")
    if cutlass.const_expr(PLAN.wide > 0):
        if unit < ends[2]:
            all_done(done_at, PLAN.eights * PLAN.shared_first, t, epoch, record, block, PLAN)
        while unit < ends[2]:
            after = behind(unit + stride, ends, block, PLAN)
            following = weights_of(after, ends, table, bases, warp, lane, PLAN)
            ring = shared_second(
                unit - ends[1], ring, at, following, wide_at, rows, shared_out.iterator.toint(), warp, lane, PLAN
            )  # fmt: skip
            unit, at = after, following

    if cutlass.const_expr(PLAN.spared > 0):
        stride = Int32(PLAN.blocks - PLAN.spared)
    # packets are asked for one batch ahead: while the one before is multiplied, they come, or are seen to be late
    near, then, sent = Int32(0), Int32(0), []
    if cutlass.const_expr(not PLAN.stashed):
        near = lane_hidden(unit, ends, table, warp, lane, PLAN)
        sent = load_packets(batch_of(hidden_at, near, PLAN))
    while unit < ends[3]:
        following = weights_of(unit + stride, ends, table, bases, warp, lane, PLAN)
        if cutlass.const_expr(not PLAN.stashed):
            then = lane_hidden(unit + stride, ends, table, warp, lane, PLAN)
        item = (unit - ends[2]) // PLAN.chunks
        _, place, count = item_of(table, item, warp, PLAN)
        task = ((unit - ends[2] - item * PLAN.chunks) * PLAN.warps + warp) * PLAN.tasks
        acc, values = [Float32(0.0)] * 8, []
        if cutlass.const_expr(PLAN.stashed):
            stash(place, turn % 2, table, hidden_at, warp, lane, epoch, record, block, PLAN)
        for s in cutlass.range_constexpr(PLAN.steps2):
            d, g = 5 * (s % PLAN.depth2), s % PLAN.groups2
            if cutlass.const_expr(PLAN.stashed):
                words = PLAN.stashed_at(turn % 2, PLAN.hidden_at(0, g, quad, 0))
                values = [Uint32(table[words + i]) for i in range(4)]
            elif cutlass.const_expr(g % PLAN.batch == 0):
                here = batch_of(hidden_at, near + PLAN.hidden_at(0, g, 0, 0), PLAN)
                if cutlass.const_expr(PLAN.hidden_rounding == ""):
                    values = settled(sent, here, 2, epoch, record, block)
                else:
                    sent = settled(sent, here, 3, epoch, record, block)
                    values = hidden_words(sent, ACTIVATION, PLAN.hidden_rounding == "ceil")
                if cutlass.const_expr(s + PLAN.batch < PLAN.steps2):
                    later = near + PLAN.hidden_at(0, (g + PLAN.batch) % PLAN.groups2, 0, 0)
                    sent = load_packets(batch_of(hidden_at, later, PLAN))
                else:
                    sent = load_packets(batch_of(hidden_at, then, PLAN))
            if cutlass.const_expr(g == 0):
                acc = [Float32(0.0)] * 8
            h = 0 if cutlass.const_expr(PLAN.stashed) else g % PLAN.batch * 4
            acc = step(ring[d : d + 4], ring[d + 4], values[h : h + 4], acc)
            ring = refill(ring, s % PLAN.depth2, s + PLAN.depth2, PLAN.steps2, at, following, True)
            if cutlass.const_expr(g == PLAN.groups2 - 1):
                for i in cutlass.range_constexpr(2):
                    if 2 * quad + i < count:
                        where = PLAN.output_at(place + 2 * quad + i, (task + s // PLAN.groups2) * 8 + token)
                        publish_four(
                            outputs_at + Int64(where) * 16, [acc[2 * k + i] * UNSCALE for k in range(4)], epoch
                        )
        unit, turn, at, near = unit + stride, turn + 1, following, then
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()

    stage(JITTER, "told")
    # blocks with the fewest units first: those at the end, or those that second products were spared
    pieces = PLAN.row_packets // 32
    unit = warp * PLAN.blocks + (block if cutlass.const_expr(PLAN.spared > 0) else PLAN.blocks - 1 - block)
    earnest = Int32(0) if cutlass.const_expr(PLAN.single) else Int32(1)
    while unit < rows * pieces:
        row = unit // pieces
        packet = (unit - row * pieces) * 32 + lane
        sums = weighted_sum(
            row, packet, outputs_at, weights.iterator.toint(), table, lane, epoch, record, block, earnest, PLAN
        )
        if earnest > Int32(0):
            where = out.iterator.toint() + (Int64(row) * PLAN.latent + packet * 4) * 2
            arch.inline_ptx(STORE_PAIR, read_only_args=[where, rounded(sums[0], sums[1]), rounded(sums[2], sums[3])])
            unit += PLAN.blocks * PLAN.warps
        earnest = Int32(1)  # a single row's first turn is for nothing: it fetches the code, while outputs are under way
    stage(JITTER, "finished")
    if cutlass.const_expr(PLAN.single):
        arch.sync_threads()  # there is none before it that all warps must pass
    if t == 0:
        count_launch(counter, block, epoch)


k3_experts_cute_stream.set_name_prefix("k3_experts_cute_stream", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch(
    latent: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor, w13: cute.Tensor, w13_scale: cute.Tensor, w2: cute.Tensor,
    w2_scale: cute.Tensor, x: cute.Tensor, gate_up: cute.Tensor, down: cute.Tensor, out: cute.Tensor, shared_out: cute.Tensor,
    hidden: cute.Tensor, outputs: cute.Tensor, wide: cute.Tensor, done: cute.Tensor, coarse: cute.Tensor, ready: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, early: Int32,
    PLAN: cutlass.Constexpr, BETA: cutlass.Constexpr, LINEAR: cutlass.Constexpr, EARLY: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, PER_SM: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: registers for ``PER_SM`` blocks an SM; the carveout only spares the compiler asking a driver."""
    k3_experts_cute_stream(
        latent, ids, weights, w13, w13_scale, w2, w2_scale, x, gate_up, down, out, shared_out, hidden, outputs, wide, done, coarse, ready, epochs,
        health, rows, early, PLAN, BETA, LINEAR, EARLY, RELEASE, JITTER,
    ).launch(
        grid=[PLAN.blocks, 1, 1], block=[PLAN.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=PER_SM,
        preferred_smem_carveout=50,
    )  # fmt: skip
