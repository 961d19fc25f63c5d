"""Producer part of the CuTe DSL kernels: 56 columns of a rank's partial sums, from weights to published packets."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import rounded
from ..cute_packets import both, send, send_to_all
from ..cute_stages import stage
from ..cute_streaming import EVICT_FIRST, LOAD_W, LOAD_X, multiply, read
from ..cute_waits import LOAD_TARGET, LOAD_WORD, epoch_of, pause, release
from .cute_mix import SUMS_DONE

COLUMNS = 56
# FP32 sums of one row in shared memory: eight packets of eight, and two more so that rows fall on other banks
ROW_WORDS = 66
GEMM_DONE = 1


@cute.jit
def run(
    text: cutlass.Constexpr,
    base: Int64,
    COUNT: cutlass.Constexpr,
    STRIDE: cutlass.Constexpr,
    first: cutlass.Constexpr,
    policy: list,
):
    """Four words from each of ``COUNT`` addresses, ``STRIDE`` bytes apart."""
    words = []
    for i in cutlass.range_constexpr(COUNT):
        words += read(text, base + (first + i * STRIDE), 4, policy)
    return words


@cute.jit
def each(text: cutlass.Constexpr, bases: list, offset: Int32):
    """Four words from each address plus the offset."""
    words = []
    for base in bases:
        words += read(text, base + offset, 4, [])
    return words


@cute.jit
def place(column: Int32):
    """Where a column of the 56 lies among the eight packets of eight FP32 values."""
    at = column % 16 // 2 * 8 + column // 16 * 2 + column % 2
    return at if column < 48 else (column - 48) * 8 + 6


@cute.jit
def where_to(
    counter: Int64,
    targets: Int64,
    health: Int64,
    block: Int32,
    quad: Int32,
    TP: cutlass.Constexpr,
    SHARD: cutlass.Constexpr,
    STORES: cutlass.Constexpr,
):
    """(epoch, claim of the health record, lines of the table of targets).

    A lane publishes to every fourth rank; with ``SHARD`` packets a rank owns, to the columns' owner alone; where one
    store reaches all ranks, to line 0.
    """
    epoch, whom = epoch_of(counter, block), []
    (claim,) = read(LOAD_WORD, health, 1, [])
    if cutlass.const_expr(SHARD > 0):
        whom.append(read(LOAD_TARGET, targets + block * 8 // SHARD * 16, 4, []))
    elif cutlass.const_expr(STORES == "multicast"):
        whom.append(read(LOAD_TARGET, targets, 4, []))
    else:
        for i in cutlass.range_constexpr(-(-TP // 4)):
            whom.append(read(LOAD_TARGET, targets + cutlass.min(quad + 4 * i, TP - 1) * 16, 4, []))
    return epoch, claim, whom


@cute.jit
def address_of(target: list):
    """Where a line of the table of targets points."""
    return Int64(target[1]) << 32 | Int64(target[0])


@cute.jit
def partial(
    x: Int64, w: Int64, sums: cute.Tensor, targets: Int64, counter: Int64, health: Int64, rows: Int32, block: Int32,
    warp: Int32, lane: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SHARD: cutlass.Constexpr, CHUNKS: cutlass.Constexpr, DEPTH: cutlass.Constexpr, X_DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, WAITERS: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Columns ``56 block`` onwards of ``x w^T``, rounded once to BF16, into this rank's slot on every rank.

    ``WARPS`` warps share K. A lane loads 8 neighbouring columns of a w row in one go, a warp a run of
    ``32 CHUNKS`` columns of ``8 / CHUNKS`` rows; x goes ``X_DEPTH``, a divisor of DEPTH, steps ahead. With two chunks, which takes at most 8 rows of x, the MMA sees each
    as rows of their own, of x and of w, and the products of equal chunks are added. Within 32 columns K is permuted,
    for x and w alike. Sums: MMAs of a (warp, chunk) ascending, its two chunks, then the warps ascending.
    Published are all ``ROWS`` rows, so that every slot is as new as the epoch says; those beyond ``rows`` repeat the
    last one. Nothing is published once a wait has given up: what came of it may be in x.
    """
    group, quad = lane // 4, lane % 4
    per_tile, width = 8 // CHUNKS, 32 * CHUNKS
    n_tiles, steps = COLUMNS // per_tile, WIDTH // (width * WARPS)
    depth = min(DEPTH, steps)
    halves = CHUNKS if ROWS <= 8 else 2
    m_tiles = -(-ROWS // 16)
    start = warp * width + quad * 8
    w_at = w + (Int64(block * COLUMNS + group // CHUNKS) * WIDTH + start + group % CHUNKS * 32) * 2
    policy = Int64(EVICT_FIRST)
    if cutlass.const_expr(RELEASE == "entry"):
        release(JITTER, block * 64 + 16 + warp)
    hop = width * WARPS * 2
    w_in = [run(LOAD_W, w_at, n_tiles, per_tile * WIDTH * 2, s * hop, [policy]) for s in range(depth)]
    arch.griddepcontrol_wait()
    stage(JITTER, "woken")

    x_at = []
    for m in cutlass.range_constexpr(m_tiles):
        for h in cutlass.range_constexpr(halves):
            row = group if cutlass.const_expr(ROWS <= 8) else m * 16 + h * 8 + group
            shift = h * 32 if cutlass.const_expr(ROWS <= 8) else 0
            x_at.append(x + (Int64(cutlass.min(row, rows - 1)) * WIDTH + start + shift) * 2)
    ahead = min(X_DEPTH, depth)
    x_in = [each(LOAD_X, x_at, s * hop) for s in range(ahead)]
    epoch, claim, whom = Uint32(0), Uint32(0), []
    if cutlass.const_expr(ROWS <= 16):
        epoch, claim, whom = where_to(counter, targets, health, block, quad, TP, SHARD, STORES)

    stage(JITTER, "asked")
    if cutlass.const_expr(RELEASE == "loads" and depth == steps):
        release(JITTER, block * 64 + 16 + warp)
    acc = [Float32(0.0)] * (m_tiles * n_tiles * 4)
    for r in cutlass.range(steps // depth - 1, unroll=1):
        for d in cutlass.range_constexpr(depth):
            acc = multiply(acc, w_in[d], x_in[d % ahead], halves)
            at = r * (depth * hop) + (depth + d) * hop
            w_in[d] = run(LOAD_W, w_at + at, n_tiles, per_tile * WIDTH * 2, 0, [policy])
            x_in[d % ahead] = each(LOAD_X, x_at, at + (ahead - depth) * hop)
    rest = steps % depth
    for d in cutlass.range_constexpr(depth):
        acc = multiply(acc, w_in[d], x_in[d % ahead], halves)
        if cutlass.const_expr(d < rest):
            w_in[d] = run(LOAD_W, w_at, n_tiles, per_tile * WIDTH * 2, (steps - rest + d) * hop, [policy])
        if cutlass.const_expr(d + ahead < depth + rest):
            x_in[d % ahead] = each(LOAD_X, x_at, (steps - rest - depth + d + ahead) * hop)
    if cutlass.const_expr(RELEASE == "loads" and depth < steps):
        release(JITTER, block * 64 + 16 + warp)
    for d in cutlass.range_constexpr(rest):
        acc = multiply(acc, w_in[d], x_in[d % ahead], halves)
        if cutlass.const_expr(d + ahead < rest):
            x_in[d % ahead] = each(LOAD_X, x_at, (steps - rest + d + ahead) * hop)

    if cutlass.const_expr(ROWS > 16):  # sums of more rows leave no registers for these meanwhile
        epoch, claim, whom = where_to(counter, targets, health, block, quad, TP, SHARD, STORES)
    put_sums(acc, sums, warp, group, quad, ROWS, CHUNKS, m_tiles, n_tiles)
    publish_sums(
        sums, epoch, claim, whom, block, warp, lane, ROWS, HIDDEN, TP, SHARD, WARPS, FORM, STORES, WAITERS, JITTER
    )
    return epoch


@cute.jit
def put_sums(
    acc: list, sums: cute.Tensor, warp: Int32, group: Int32, quad: Int32, ROWS: cutlass.Constexpr, CHUNKS: cutlass.Constexpr,
    m_tiles: cutlass.Constexpr, n_tiles: cutlass.Constexpr,
):  # fmt: skip
    """A warp's sums to shared memory, each column at its place in its packet."""
    halves = CHUNKS if ROWS <= 8 else 2
    size = ROWS * ROW_WORDS
    for m in cutlass.range_constexpr(m_tiles):
        for j in cutlass.range_constexpr(n_tiles):
            c = (m * n_tiles + j) * 4
            if cutlass.const_expr(CHUNKS == 2):
                if group < ROWS:
                    sums[warp * size + group * ROW_WORDS + place(j * 4 + quad)] = acc[c] + acc[c + 3]
            else:
                for e in cutlass.range_constexpr(2 * min(halves, 2)):
                    row = m * 16 + e // 2 * 8 + group
                    if row < ROWS:
                        sums[warp * size + row * ROW_WORDS + place(j * 8 + quad * 2 + e % 2)] = acc[c + e]


@cute.jit
def publish_sums(
    sums: cute.Tensor, epoch: Uint32, claim: Uint32, whom: list, block: Int32, warp: Int32, lane: Int32, ROWS: cutlass.Constexpr,
    HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr, SHARD: cutlass.Constexpr, WARPS: cutlass.Constexpr, FORM: cutlass.Constexpr,
    STORES: cutlass.Constexpr, WAITERS: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """The warps' sums added up in their order, rounded, as packets to all ranks, or to the columns' owner."""
    group, quad, size = lane // 4, lane % 4, ROWS * ROW_WORDS
    arch.barrier(barrier_id=GEMM_DONE, number_of_threads=32 * WARPS)
    stage(JITTER, "product")
    if cutlass.const_expr(WAITERS > 0):
        arch.barrier_arrive(barrier_id=SUMS_DONE, number_of_threads=32 * (WARPS + WAITERS), aligned=False)

    parity = Int32(epoch & Uint32(1))
    pause(JITTER, epoch, block * 64 + warp)
    for turn in cutlass.range_constexpr(-(-ROWS // WARPS)):
        row = turn * WARPS + warp
        if row < ROWS:
            # lane 4 p + e has word e of packet p: two neighbouring sums of each warp
            at = row * ROW_WORDS + lane * 2
            first, second = sums[at], sums[at + 1]
            for part in cutlass.range_constexpr(1, WARPS):
                first += sums[at + part * size]
                second += sums[at + part * size + 1]
            mine = rounded(first, second)
            # of the rank's own columns, of all columns
            of_row = SHARD if cutlass.const_expr(SHARD > 0) else HIDDEN // 7
            packet = (parity * ROWS + row) * of_row + block * 8 % of_row + group
            if cutlass.const_expr(STORES == "multicast"):
                beside = arch.shuffle_sync_bfly(mine, 4)
                word = mine if quad < 3 else both(mine, beside)
                if claim == Uint32(0):
                    send_to_all(address_of(whom[0]), packet, quad, word, whom[0][2], epoch)
            else:
                whole = [arch.shuffle_sync(mine, (lane & 28) + word) for word in range(4)]
                if cutlass.const_expr(FORM == "b32e32"):
                    whole[3] = both(whole[3], arch.shuffle_sync(mine, ((lane & 28) ^ 4) + 3))
                for i in cutlass.range_constexpr(len(whom)):
                    rank = quad if cutlass.const_expr(SHARD > 0) else quad + 4 * i
                    if rank < (1 if SHARD > 0 else TP) and claim == Uint32(0):
                        send(address_of(whom[i]), packet, whole, whom[i][2], epoch, FORM)
    stage(JITTER, "told")
    pause(JITTER, epoch, block * 64 + 35)
