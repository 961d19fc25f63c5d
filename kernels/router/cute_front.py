"""Front part of the router's CuTe DSL kernels: a tile of weight rows, from memory to published packets."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import as_word, rounded
from ..cute_stages import stage
from ..cute_streaming import EVICT_FIRST, LOAD_W, LOAD_X, multiply, read
from ..cute_waits import LOAD_TARGET, LOAD_WORD, epoch_of, pause, publish_pair
from .cute_words import STORE_TWO, piece

ONE = 0x3F803F80
LOAD_PEER = "ld.global.u32 $0, [$1];"
# turns of which the table's words are asked for beside the activations
EARLY = 2


@cute.jit
def each(text: cutlass.Constexpr, bases: list, offset: Int32, policy: list):
    """Four words from each address plus the offset."""
    words = []
    for base in bases:
        words += read(text, base + offset, 4, policy)
    return words


@cute.jit
def addresses(
    x: Int64,
    w_router: Int64,
    w_down: Int64,
    rows: Int32,
    tile: Int32,
    part: Int32,
    warp: Int32,
    lane: Int32,
    F: cutlass.Constexpr,
):
    """(of a lane's weights, of its activations): one for each of the MMA's tiles; what is not there repeats the last row."""
    wn, wk = warp % F.warps_n, warp // F.warps_n
    group, quad = lane // 4, lane % 4
    start = part * (F.hidden // F.split) + wk * F.width + quad * 8
    w_at, x_at = [], []
    for j in cutlass.range_constexpr(F.n_tiles):
        within = cutlass.min((wn * F.n_tiles + j) * F.per_tile + group // F.chunks, F.tile - 1)
        n = cutlass.min(tile * F.tile + within, F.outputs - 1)
        own = n < F.board.logits
        base = w_router if own else w_down
        row = n if own else n - F.board.logits
        w_at.append(base + (Int64(row) * F.hidden + start + group % F.chunks * 32) * 2)
    for m in cutlass.range_constexpr(F.m_tiles):
        for h in cutlass.range_constexpr(F.halves):
            a = m * 16 + h * 8 + group
            row, chunk = cutlass.min(a % F.tokens, rows - 1), cutlass.min(a // F.tokens, F.chunks - 1)
            x_at.append(x + (Int64(row) * F.hidden + start + chunk * 32) * 2)
    return w_at, x_at


@cute.jit
def keep_sums(acc: list, sums: cute.Tensor, warp: Int32, lane: Int32, F: cutlass.Constexpr):
    """A warp's sums into shared memory: one part a warp and chunk, of products of equal chunks only.

    Two chunks of eight rows: the sums of row g and column 2 q, and of g + 8 and 2 q + 1, are one output's, in one lane.
    """
    wn, wk = warp % F.warps_n, warp // F.warps_n
    group, quad = lane // 4, lane % 4
    size = F.board.rows * F.tile
    for m in cutlass.range_constexpr(F.m_tiles):
        for j in cutlass.range_constexpr(F.n_tiles):
            if cutlass.const_expr(F.merges):
                n = (wn * F.n_tiles + j) * F.per_tile + quad
                if group < F.board.rows and n < F.tile:
                    sums[wk * size + group * F.tile + n] = acc[4 * j] + acc[4 * j + 3]
            for e in cutlass.range_constexpr(0 if F.merges else 2 * F.halves):
                a, column = m * 16 + e // 2 * 8 + group, quad * 2 + e % 2
                row, n = a % F.tokens, (wn * F.n_tiles + j) * F.per_tile + column // F.chunks
                chunk = column % F.chunks
                if a // F.tokens == chunk and row < F.board.rows and n < F.tile:
                    sums[(wk * F.chunks + chunk) * size + row * F.tile + n] = acc[(m * F.n_tiles + j) * 4 + e]


@cute.jit
def pair_of_parts(sums: cute.Tensor, pair: Int32, first: Int32, STRIDE: cutlass.Constexpr, F: cutlass.Constexpr):
    """A pair's two sums over the block's parts, ascending: all of them, or every ``STRIDE``-th from ``first`` on."""
    size = F.board.rows * F.tile
    low, high = sums[2 * pair + first * size], sums[2 * pair + 1 + first * size]
    for k in cutlass.range_constexpr(1, -(-F.parts // STRIDE)):
        part = first + k * STRIDE
        if cutlass.const_expr(F.parts % STRIDE == 0):
            low += sums[2 * pair + part * size]
            high += sums[2 * pair + 1 + part * size]
        else:
            there = part < F.parts
            at = 2 * pair + cutlass.min(part, F.parts - 1) * size
            low += sums[at] if there else Float32(0.0)
            high += sums[at + 1] if there else Float32(0.0)
    return low, high


@cute.jit
def pair_of_blocks(pushed: cute.Tensor, place: Int32, F: cutlass.Constexpr):
    """A pair's two sums over the cluster's blocks, ascending."""
    low, high = pushed[2 * place], pushed[2 * place + 1]
    for r in cutlass.range_constexpr(1, F.split):
        low += pushed[2 * (r * F.share + place)]
        high += pushed[2 * (r * F.share + place) + 1]
    return low, high


@cute.jit
def push_pairs(
    sums: cute.Tensor, pushed: cute.Tensor, arrived: cute.Pointer, part: Int32, t: Int32, F: cutlass.Constexpr
):
    """Each pair's sums over this block to the block of the cluster that finishes it."""
    for p in cutlass.range(t, F.pairs, F.threads, unroll=1):
        low, high = pair_of_parts(sums, p, Int32(0), 1, F)
        at = (pushed.iterator + 2 * (part * F.share + p % F.share)).align(8)
        words = (Int32(as_word(low)), Int32(as_word(high)))
        arch.store_async_dsmem(cute.recast_ptr(at, dtype=Int32).align(8), words, arrived, p // F.share)


@cute.jit
def to_send(peers: Int64, tile: Int32, part: Int32, t: Int32, to: Int32, F: cutlass.Constexpr):
    """What a thread sends in each turn: (whether, whether logits, row, output, word, the table's words).

    The table is read whether or not the slot plays another rank: an address that hung on that would be a second trip to
    memory one after the other.
    """
    B, found = F.board, []
    for turn in cutlass.range_constexpr(F.turns):
        pair = part * F.share + F.place(t, turn)
        n = tile * F.tile + pair % F.columns * 2
        row = pair // F.columns
        there = (F.place(t, turn) < F.share) & (pair < F.pairs) & (n < F.outputs) & (to < B.ranks)
        is_logit = n < B.logits
        word = n if is_logit else B.logits + (n - B.logits) // 2
        at = peers + ((to * B.rows + row) * B.words + word) * 4
        at = at if there else peers
        second = at + (4 if is_logit else 0)
        found.append((there, is_logit, row, n, word, read(LOAD_PEER, at, 1, []), read(LOAD_PEER, second, 1, [])))
    return found


@cute.jit
def keep_pair(
    logits: Int64,
    latent: Int64,
    is_logit: cutlass.Boolean,
    row: Int32,
    n: Int32,
    one: Uint32,
    two: Uint32,
    F: cutlass.Constexpr,
):
    """A pair into this rank's shard in plain memory: FP32 [rows, E/T], BF16 [rows, L/T]."""
    B = F.board
    if is_logit:
        at = logits + (row * B.logits + n) * 4
        arch.inline_ptx("st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[at, one, two])
    else:
        at = latent + (row * B.latents + n - B.logits) * 2
        arch.inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[at, one])


@cute.jit
def front(
    tensors: list, rows: Int32, block: Int32, memory: cute.Pointer, F: cutlass.Constexpr, KEEP: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """``tile`` outputs of all rows from this block's part of K, added over the cluster, published to every rank.

    ``tensors`` are addresses: x, w_router, w_down, peers, logits, latent, targets, epochs, health. A lane loads 8
    neighbouring columns of a weight row in one go, a warp ``32 chunks`` columns of ``8 / chunks`` rows; each chunk is a
    row of the MMA of its own, of x and of w. Sums: MMAs of a (warp, chunk) ascending, chunks and warps ascending (by a warp:
    every 32nd, then by butterfly), then the cluster's blocks ascending. All rows the kernel was compiled for are
    published, those beyond ``rows`` repeat the last one. A slot whose factor is not one plays another rank: its words
    come from ``peers``. Nothing is published once a wait has given up. Returns the epoch.
    """
    x, w_router, w_down, peers, logits, latent, targets, counter, health = tensors
    B = F.board
    t, _, _ = arch.thread_idx()
    lane, warp = t % 32, arch.make_warp_uniform(arch.warp_idx())
    tile, part = block // F.split, block % F.split
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    w_at, x_at = addresses(x, w_router, w_down, rows, tile, part, warp, lane, F)
    policy, stride, depth = Int64(EVICT_FIRST), F.width * F.warps_k * 2, min(F.depth, F.steps)
    w_in = [each(LOAD_W, w_at, s * stride, [policy]) for s in range(depth)]
    sums = piece(memory, 0, Float32, F.sum_bytes // 4)
    pushed, words = sums, sums
    arrived = piece(memory, F.offsets[2], Int64, 2).iterator
    if cutlass.const_expr(F.split > 1):
        pushed = piece(memory, F.offsets[0], Float32, F.pushed_bytes // 4)
        if t == 0:
            arch.mbarrier_init(arrived, 1)
            arch.mbarrier_init_fence()
            mine = cutlass.max(cutlass.min(F.pairs - part * F.share, F.share), 0)
            arch.mbarrier_arrive_and_expect_tx(arrived, mine * (8 * F.split))
        arch.cluster_arrive_relaxed()
    if cutlass.const_expr(F.turns > 1):
        words = piece(memory, F.offsets[1], Float32, F.share * 2)
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")

    x_in = [each(LOAD_X, x_at, s * stride, []) for s in range(depth)]
    epoch = epoch_of(counter, block)
    (claim,) = read(LOAD_WORD, health, 1, [])
    to = F.rank(t)
    whom = read(LOAD_TARGET, targets + cutlass.min(to, B.ranks - 1) * 16, 4, [])
    other = whom[2] != Uint32(ONE)
    sent = []
    if cutlass.const_expr(F.turns <= EARLY):
        sent = to_send(peers, tile, part, t, to, F)
    stage(JITTER, "asked")
    if cutlass.const_expr(RELEASE == "loads" and depth == F.steps):
        arch.griddepcontrol_launch_dependents()
    acc = [Float32(0.0)] * (F.m_tiles * F.n_tiles * 4)
    for r in cutlass.range(F.steps // depth - 1, unroll=1):
        for d in cutlass.range_constexpr(depth):
            acc = multiply(acc, w_in[d], x_in[d], F.halves)
            w_in[d] = each(LOAD_W, w_at, ((r + 1) * depth + d) * stride, [policy])
            x_in[d] = each(LOAD_X, x_at, ((r + 1) * depth + d) * stride, [])
    rest = F.steps % depth
    for d in cutlass.range_constexpr(rest):
        acc = multiply(acc, w_in[d], x_in[d], F.halves)
        w_in[d] = each(LOAD_W, w_at, (F.steps - rest + d) * stride, [policy])
        x_in[d] = each(LOAD_X, x_at, (F.steps - rest + d) * stride, [])
    if cutlass.const_expr(RELEASE == "loads" and depth < F.steps):
        arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(F.turns > EARLY):  # until now sums and operands had the registers
        sent = to_send(peers, tile, part, t, to, F)
    for d in cutlass.range_constexpr(rest, depth):
        acc = multiply(acc, w_in[d], x_in[d], F.halves)
    for d in cutlass.range_constexpr(rest):
        acc = multiply(acc, w_in[d], x_in[d], F.halves)
    keep_sums(acc, sums, warp, lane, F)
    arch.sync_threads()
    stage(JITTER, "product")

    if cutlass.const_expr(F.split > 1):
        arch.cluster_wait()
        push_pairs(sums, pushed, arrived, part, t, F)
        arch.mbarrier_wait(arrived, 0)
    if cutlass.const_expr(F.turns > 1):
        for i in cutlass.range(t, F.share, F.threads, unroll=1):
            if cutlass.const_expr(F.split > 1):
                words[2 * i], words[2 * i + 1] = pair_of_blocks(pushed, i, F)
            else:
                words[2 * i], words[2 * i + 1] = pair_of_parts(sums, i, Int32(0), 1, F)
        arch.sync_threads()
    stage(JITTER, "heard")
    pause(JITTER, epoch, block * 64 + warp)
    parity = Int32(epoch & Uint32(1))
    for turn in cutlass.range_constexpr(F.turns):
        there, is_logit, row, n, word, first, second = sent[turn]
        i = cutlass.min(F.place(t, turn), F.share - 1)
        if cutlass.const_expr(F.turns > 1):
            low, high = words[2 * i], words[2 * i + 1]
        elif cutlass.const_expr(F.split > 1):
            low, high = pair_of_blocks(pushed, i, F)
        elif cutlass.const_expr(F.by_warps):
            low, high = pair_of_parts(sums, i, lane, 32, F)
            for step in cutlass.range_constexpr(5):
                low += arch.shuffle_sync_bfly(low, 16 >> step)
                high += arch.shuffle_sync_bfly(high, 16 >> step)
        else:
            low, high = pair_of_parts(sums, i, Int32(0), 1, F)
        both = rounded(low, high)
        own = as_word(low) if is_logit else both
        two_own = as_word(high)
        one = first[0] if other else own
        two = second[0] if other else two_own
        address = (Int64(whom[1]) << 32 | Int64(whom[0])) + B.within(parity, row, word)
        if there & (claim == Uint32(0)):
            if is_logit:
                arch.inline_ptx(STORE_TWO, read_only_args=[address, one, two, epoch])
            else:
                publish_pair(address, one, epoch, "peer")
        mine = there & (to == 0) & (row < rows) if cutlass.const_expr(KEEP) else False
        if mine:
            keep_pair(logits, latent, is_logit, row, n, own, two_own, F)
    stage(JITTER, "told")
    return epoch
