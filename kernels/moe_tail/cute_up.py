"""Making part of the tail's CuTe DSL kernel: sums of the latents times the up-projection, over a cluster, to every rank."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import RSQRT, as_float, as_word, high, low, rounded, unary
from ..cute_stages import stage
from ..cute_streaming import multiply, read
from ..cute_tiles import LOAD_FOUR, ask_tile, tile_places, tile_words
from ..cute_waits import LOAD_TARGET, LOAD_WORD, epoch_of, pause, release
from .cute_send import planned, send_planned, send_quad
from .cute_sum import LOAD_TWO, STORE_TWO, own_latents, sum_latents, sum_share
from .layout import TILE, TILE_BYTES

LOAD_ONE = "ld.shared.u32 $0, [$1];"
# between the sums in shared memory and those who push them on: all but the two warps of the shared expert
SUMS_DONE, THREADS = 1, 512
TILES = TILE // 8


@cute.jit
def near(text: cutlass.Constexpr, at: Int32, WORDS: cutlass.Constexpr):
    """Words of shared memory."""
    return read(text, Int64(at), WORDS, [])


@cute.jit
def multiply_latents(
    tiles_at: Int32, full: cute.Pointer, x_at: Int32, sums_at: Int32, warp: Int32, lane: Int32, T: cutlass.Constexpr
):
    """A warp's share of 64 columns for all rows of the pass, into shared memory."""
    group, quad = lane // 4, lane % 4
    acc = [Float32(0.0)] * (TILES * 4)
    # in every pass the first phase: no tile is brought twice
    arch.mbarrier_wait(full, 0)
    mine = Int64(tiles_at + warp * (T.chunks_each * TILE_BYTES) + lane * 16)
    for c in cutlass.range_constexpr(T.chunks_each):
        x: list = []
        for h in cutlass.range_constexpr(T.halves):
            at = x_at + ((h * 8 + group) * T.x_words + (c * T.warps_k + warp) * 16 + quad * 4) * 4
            x += near(LOAD_FOUR, at, 4)
        acc = multiply(acc, tile_words(mine + c * TILE_BYTES, TILE), x, T.halves)
    for j in cutlass.range_constexpr(TILES):
        for h in cutlass.range_constexpr(T.halves):
            row = h * 8 + group
            if row < T.pass_rows:
                at = sums_at + ((warp * T.pass_rows + row) * 72 + j * 8 + quad * 2) * 4
                pair = [as_word(acc[4 * j + 2 * h]), as_word(acc[4 * j + 2 * h + 1])]
                arch.inline_ptx(STORE_TWO, read_only_args=[at, *pair])


@cute.jit
def push(
    sums_at: Int32, squares_at: Int32, pushed: cute.Pointer, bar: cute.Pointer, half: Int32, part: Int32, t: Int32,
    T: cutlass.Constexpr,
):  # fmt: skip
    """The block's sums, each to the block of the cluster that owns its columns; squares and lateness to all of them."""
    if t < T.pass_rows * 16:
        row, quad = t // 16, t % 16
        total = [as_float(word) for word in near(LOAD_FOUR, sums_at + (row * 72 + quad * 4) * 4, 4)]
        for warp in cutlass.range_constexpr(1, T.warps_k):
            more = near(LOAD_FOUR, sums_at + ((warp * T.pass_rows + row) * 72 + quad * 4) * 4, 4)
            total = [a + as_float(b) for a, b in zip(total, more, strict=True)]
        at = pushed + (T.pushed(half, part, row) + quad % T.quads_own * 4)
        words = tuple(Int32(as_word(one)) for one in total)
        arch.store_async_dsmem(at.align(16), words, bar, quad // T.quads_own)
    other = t - 256
    if other >= 0 and other < T.pass_rows * T.split:
        row = other // T.split
        square = as_float(near(LOAD_ONE, squares_at + row * (T.row_warps * 4), 1)[0])
        for warp in cutlass.range_constexpr(1, T.row_warps):
            square += as_float(near(LOAD_ONE, squares_at + (row * T.row_warps + warp) * 4, 1)[0])
        late = Uint32(0)
        for warp in cutlass.range_constexpr(16):
            late |= near(LOAD_ONE, squares_at + (T.pass_rows * T.row_warps + warp) * 4, 1)[0]
        at = pushed + (T.pushed(half, part, row) + T.own)
        words = (Int32(as_word(square)), Int32(late), Int32(0), Int32(0))
        arch.store_async_dsmem(at.align(16), words, bar, other % T.split)


@cute.jit
def publish_columns(
    pushed_at: Int32, shares_at: Int32, line: list, half: Int32, row0: Int32, first_column: Int32, t: Int32, rows: Int32,
    epoch: Uint32, claim: Uint32, block: Int32,
    EPS: cutlass.Constexpr, T: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """A thread's quads of a row of the block's own columns to one rank, whose line of the table is ``line``.

    Sums over the blocks of the cluster ascending, times the norm's factor of the row, rounded; plus the shared expert's, rounded.
    Nothing if a wait of the cluster gave up.
    """
    row, _, first = T.published(t)
    late = claim | near(LOAD_ONE, shares_at + T.pass_rows * T.own * 2, 1)[0]
    late |= near(LOAD_ONE, shares_at + T.pass_rows * T.own * 2 + 4, 1)[0]
    total: list = []
    square = Float32(0.0)
    for source in cutlass.range_constexpr(T.split):
        at = pushed_at + T.pushed(half, source, row) * 4
        one = []
        for quad in cutlass.range_constexpr(T.quads_each):
            one += [as_float(word) for word in near(LOAD_FOUR, at + (first + quad) * 16, 4)]
        total = [a + b for a, b in zip(total, one, strict=True)] if source > 0 else one
        more = near(LOAD_FOUR, at + T.own * 4, 4)
        square += as_float(more[0])
        late |= more[1]
    r = unary(RSQRT, square * (1.0 / T.latent) + EPS)
    pause(JITTER, epoch, block * 64 + 48)
    for quad in cutlass.range_constexpr(T.quads_each):
        share = near(LOAD_TWO, shares_at + (row * T.quads_own + first + quad) * 8, 2)
        words = []
        for i in cutlass.range_constexpr(2):
            up = rounded(total[4 * quad + 2 * i] * r, total[4 * quad + 2 * i + 1] * r)
            words.append(rounded(low(up) + low(share[i]), high(up) + high(share[i])))
        within = T.within(T.shard, Int32(epoch & Uint32(1)), row0 + row, first_column + (first + quad) * 4)
        if late == Uint32(0) and row0 + row < rows:
            send_quad(line, within, words, epoch)


@cute.jit
def make_pass(
    mailboxes: list, deltas_to: Int64, places: list, pushed: cute.Pointer, bars: cute.Pointer,
    turn: Int32, rows: Int32, cluster: Int32, part: Int32, block: Int32, t: Int32, warp: Int32, lane: Int32, epoch: Uint32,
    claim: Uint32, health: Int64,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    JITTER: cutlass.Constexpr,
):  # fmt: skip
    """One pass of rows: ``places`` are what :attr:`.layout.Cut.making_bytes` names."""
    tiles_at, x_at, sums_at, squares_at, shares_at, gamma_at, pushed_at = places
    if cutlass.const_expr(T.share_first):  # noqa: SIM102, compiled in or not, then asked at run time
        if warp >= 14:
            sum_share(
                mailboxes[1], shares_at, 0, cluster * 64 + part * T.own, t - 448, epoch, health, block, AT_ONCE, BACKOFF, T,
                JITTER,
            )  # fmt: skip
    row0, half, phase = turn * T.pass_rows, turn % 2, turn // 2 % 2
    column = cluster * 64 + part * T.own
    sum_latents(
        mailboxes[0], gamma_at + t * 8, x_at, squares_at, row0, part, warp, lane, epoch, claim, health, block, AT_ONCE, BACKOFF,
        T, JITTER,
    )  # fmt: skip
    line_at = deltas_to + t % T.tp * 16
    # asked for before the block and its cluster are waited for: a trip to memory is no shorter
    line = read(LOAD_TARGET, line_at, 4, [])
    arch.sync_threads()
    stage(JITTER, "heard")
    if warp < T.warps_k:
        multiply_latents(tiles_at, bars + 2 + warp, x_at, sums_at, warp, lane, T)
    if warp < 14:
        arch.barrier(barrier_id=SUMS_DONE, number_of_threads=448)
        stage(JITTER, "product")
        pause(JITTER, epoch, block * 64 + 47)
        push(sums_at, squares_at, pushed, bars + half, half, part, t, T)
    elif cutlass.const_expr(not T.share_first):
        sum_share(
            mailboxes[1], shares_at, row0, column, t - 448, epoch, health, block, AT_ONCE, BACKOFF, T, JITTER
        )  # fmt: skip
    # waits of the cluster end: each block pushes, since all its other waits end
    arch.mbarrier_wait(bars + half, phase)
    stage(JITTER, "told")
    if cutlass.const_expr(not T.share_first):
        arch.sync_threads()
    if cutlass.const_expr(T.passes > 2):  # noqa: SIM102, compiled in or not, then asked at run time
        if t == 0 and turn + 2 < T.live_passes(rows):
            arch.mbarrier_arrive_and_expect_tx(bars + half, T.pushed_bytes)
    if t < T.publishing:
        publish_columns(
            pushed_at, shares_at, line, half, row0, column, t, rows, epoch, claim, block, EPS, T, JITTER
        )  # fmt: skip


@cute.jit
def make_columns(
    tensors: list, w_load: cute.CopyAtom, w_map: cute.Tensor, memory: cute.Pointer, rows: Int32, block: Int32, t: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """All of a making block, but for its counter: from its weights to its columns on every rank.

    ``tensors``: addresses of latent_partial, shared_partial, latent_norm, the mailboxes latents, shares and totals, the
    tables of latents, shares, totals and deltas, the counters and the health record. Returns the epoch.
    """
    latent, share, norm, latents, shares, totals, latents_to, shares_to, totals_to, deltas_to, counter, health = tensors
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    cluster, part = block // T.split, block % T.split
    first = [sum(T.making_bytes[:i]) for i in range(8)]
    places = [memory.toint() + place for place in first[:7]]
    pushed = memory + first[6] // 4
    bars = cute.recast_ptr(memory + first[7] // 4, dtype=Int64).align(8)

    if cutlass.const_expr(RELEASE == "entry"):
        release(JITTER, block * 64 + 16 + warp)
    if t == 0:
        for i in cutlass.range_constexpr(2):
            arch.mbarrier_init(bars + i, 1)
            arch.mbarrier_arrive_and_expect_tx(bars + i, T.pushed_bytes)
    if warp < T.warps_k:
        with arch.elect_one():
            arch.mbarrier_init(bars + 2 + warp, 1)
    arch.mbarrier_init_fence()
    arch.sync_warp()
    if warp < T.warps_k:
        # nothing is ever written there again
        ring = memory + warp * (T.chunks_each * TILE_BYTES // 4)
        source, target = tile_places(w_load, w_map, ring, cluster, TILE, T.chunks_each)
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(bars + 2 + warp, T.chunks_each * TILE_BYTES)
        for c in cutlass.range_constexpr(T.chunks_each):
            ask_tile(w_load, source, target, bars + 2 + warp, part * T.chunks + c * T.warps_k + warp, c)
    _, place, _ = T.quad(0, warp, lane)
    gamma = read(
        "ld.global.L1::no_allocate.v2.u32 {$0, $1}, [$2];",
        norm + (part * T.span + cutlass.min(place, T.span // 4 - 1) * 4) * 2, 2, [],
    )  # fmt: skip
    # neighbouring warps in different blocks: all blocks have as much to send
    number = warp * T.making + block
    ahead = min(T.tasks_ahead, T.turns)
    plans = [
        planned(latent, share, latents_to, shares_to, number + i * (T.making * 16), rows, lane, T) for i in range(ahead)
    ]
    arch.cluster_arrive_relaxed()
    if cutlass.const_expr(RELEASE == "loads"):
        release(JITTER, block * 64 + 16 + warp)
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")

    epoch = epoch_of(counter, block)
    (claim,) = read(LOAD_WORD, health, 1, [])
    send_planned(plans, epoch, claim, block, T, JITTER)
    for begin in cutlass.range(ahead, T.turns, ahead, unroll=1):
        more = [
            planned(
                latent, share, latents_to, shares_to, number + (begin + i) * (T.making * 16), rows, lane, T
            )
            for i in range(ahead)
        ]  # fmt: skip
        send_planned(more, epoch, claim, block, T, JITTER)
    stage(JITTER, "sent")
    at_once = min(T.tp, AT_ONCE)
    if cutlass.const_expr(T.two_shot):
        own_latents(latents, totals_to, number, rows, lane, epoch, claim, health, block, at_once, BACKOFF, T, JITTER)
    arch.cluster_wait()
    # each thread's own place, for all passes; behind the barrier, or the compiler waits for these words before it sends
    arch.inline_ptx(STORE_TWO, read_only_args=[places[5] + t * 8, *gamma])
    mailboxes = [totals if cutlass.const_expr(T.two_shot) else latents, shares]
    if cutlass.const_expr(T.passes == 1):
        make_pass(
            mailboxes, deltas_to, places, pushed, bars, 0, rows, cluster, part, block, t, warp, lane, epoch, claim,
            health, T, EPS, at_once, BACKOFF, JITTER,
        )  # fmt: skip
    else:
        for turn in cutlass.range(0, T.live_passes(rows), 1, unroll=1):
            make_pass(
                mailboxes, deltas_to, places, pushed, bars, turn, rows, cluster, part, block, t, warp, lane, epoch,
                claim, health, T, EPS, at_once, BACKOFF, JITTER,
            )  # fmt: skip
    return epoch
