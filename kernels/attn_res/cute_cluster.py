"""CuTe DSL kernel: AttnRes and the norm behind it, a row a cluster; scores and the norm's square from one exchange."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import EXP2, LOG2E, as_word, high, low, rounded, unary
from ..cute_streaming import LOAD_X, MMA, read

# no activations: these go before the dependency wait
LOAD_WEIGHTS = "ld.global.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
LOAD_WEIGHT_PAIR = "ld.global.L1::no_allocate.u32 $0, [$1];"
STORE_PAIR = "st.global.u32 [{$r0}], {$r1};"
RCP, RSQRT = "rcp.approx.ftz.f32 {$w0}, {$r0};", "rsqrt.approx.ftz.f32 {$w0}, {$r0};"
HIGHER = "max.f32 {$w0}, {$r0}, {$r1};"
PRODUCT = "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};"
REST = "fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, {$r2};"
LOAD_PAIR = "ld.global.u32 $0, [$1];"
SOURCES, PREFIX, NORM = 9, 8, 9


@cute.jit
def query_halves(gamma: list, query: list):
    """(upper, lower) BF16 halves of norm weight times query: the product rounded, and what that leaves, each exact."""
    upper, lower = [], []
    for g, q in zip(gamma, query, strict=True):
        whole = arch.inline_ptx(PRODUCT, write_only_types=[Uint32], read_only_args=[g, q])
        upper.append(whole)
        negative = whole ^ Uint32(0x80008000)
        lower.append(arch.inline_ptx(REST, write_only_types=[Uint32], read_only_args=[g, q, negative]))
    return upper, lower


@cute.jit
def products(sums: list, saved: list, others: list, BLOCKS: cutlass.Constexpr):
    """32 columns of every source times every source: two MMAs a half of them, each a sum of its own.

    ``saved``: a lane's 8 columns of saved block ``lane // 4``; ``others``: of the prefix or of half the query. They are rows
    0 to 7 and 8 to 15 of one operand, and each alone the columns of the other.
    """
    new = list(sums)
    for k in cutlass.range_constexpr(2):
        a = [saved[2 * k], others[2 * k], saved[2 * k + 1], others[2 * k + 1]]
        for which in cutlass.range_constexpr(0 if BLOCKS > 0 else 1, 2):
            b = saved if which == 0 else others
            at = (2 * which + k) * 4
            args = [*a, b[2 * k], b[2 * k + 1], *new[at : at + 4]]
            new[at : at + 4] = arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=args)
    return new


@cute.jit
def keep_part(
    sums: list, parts: cute.Tensor, warp: Int32, lane: Int32, R: cutlass.Constexpr, BLOCKS: cutlass.Constexpr
):
    """A warp's products into shared memory, of rows that mean something."""
    group, quad = lane // 4, lane % 4
    base = warp * R.words
    if cutlass.const_expr(BLOCKS > 0):
        for half in cutlass.range_constexpr(2):
            parts[base + R.word(group, 2 * quad + half)] = sums[half] + sums[4 + half]
        if group < 3:
            for half in cutlass.range_constexpr(2):
                parts[base + R.word(PREFIX + group, 2 * quad + half)] = sums[2 + half] + sums[6 + half]
    if group < 3 and quad == 0:
        parts[base + R.last_word(PREFIX + group)] = sums[10] + sums[14]


@cute.jit
def tell(parts: cute.Tensor, told: cute.Tensor, arrived: cute.Pointer, part: Int32, t: Int32, R: cutlass.Constexpr):
    """A block's parts, warps ascending, to all blocks of the row: four words a thread of the first warp."""
    if t < R.words // 4:
        four = [parts[4 * t + i] for i in range(4)]
        for warp in cutlass.range_constexpr(1, R.warps):
            four = [one + parts[warp * R.words + 4 * t + i] for i, one in enumerate(four)]
        if cutlass.const_expr(R.cluster > 1):
            at = cute.recast_ptr((told.iterator + (part * R.words + 4 * t)).align(16), dtype=Int32).align(16)
            words = tuple(Int32(as_word(one)) for one in four)
            for peer in cutlass.range_constexpr(R.cluster):
                arch.store_async_dsmem(at, words, arrived, peer)
        else:
            for i in cutlass.range_constexpr(4):
                told[4 * t + i] = four[i]


@cute.jit
def over_sources(value: Float32, HIGHEST: cutlass.Constexpr):
    """Sum, or the highest, over the sixteen lanes of the sources."""
    for step in cutlass.range_constexpr(4):
        other = arch.shuffle_sync_bfly(value, 8 >> step)
        if cutlass.const_expr(HIGHEST):
            value = arch.inline_ptx(HIGHER, write_only_types=[Float32], read_only_args=[value, other])
        else:
            value = value + other
    return value


@cute.jit
def weigh(
    told: cute.Tensor, totals: cute.Tensor, weights: cute.Tensor, lane: Int32, saved: Int32, R: cutlass.Constexpr,
    BLOCKS: cutlass.Constexpr, EPS: cutlass.Constexpr, ROUNDS: cutlass.Constexpr,
):  # fmt: skip
    """By one warp: from all blocks' parts to the weight of each source, which holds the norm too unless ``ROUNDS``.

    A lane is a source, the prefix lane 8. Blocks' parts ascending. The mix's square is the weights' quadratic form of the
    products of the sources with each other, so that the row meets once.
    """
    if lane < R.words // 4:
        for i in cutlass.range_constexpr(4):
            total = told[4 * lane + i]
            for block in cutlass.range_constexpr(1, R.cluster):
                total += told[block * R.words + 4 * lane + i]
            totals[4 * lane + i] = total
    arch.sync_warp()
    mine = cutlass.min(lane % 16, PREFIX)
    is_prefix = mine == PREFIX
    inner = cutlass.min(mine, PREFIX - 1)
    square = totals[Int32(R.last_word(PREFIX)) if is_prefix else R.word(inner, inner)]
    if cutlass.const_expr(BLOCKS > 0):
        row = []
        for other in cutlass.range_constexpr(SOURCES):
            if cutlass.const_expr(other < PREFIX):
                row.append(totals[R.word(mine, other)])
            else:
                row.append(totals[Int32(R.last_word(PREFIX)) if is_prefix else R.word(PREFIX, inner)])
        first = totals[Int32(R.last_word(PREFIX + 1)) if is_prefix else R.word(PREFIX + 1, inner)]
        second = totals[Int32(R.last_word(PREFIX + 2)) if is_prefix else R.word(PREFIX + 2, inner)]
        score = (first + second) * unary(RSQRT, square * (1.0 / R.hidden) + EPS)
        there = (lane % 16 < saved) | (lane % 16 == PREFIX)
        score = score if there else Float32(-float("inf"))
        top = over_sources(score, True)
        weight = unary(EXP2, (score - top) * LOG2E)
        across = Float32(0.0)
        for other in cutlass.range_constexpr(SOURCES):
            across += arch.shuffle_sync(weight, other) * row[other]
        # the form of weights that are not yet divided by their sum: so neither sum waits for the other
        square, share = over_sources(weight * across, False), unary(RCP, over_sources(weight, False))
        weight, square = weight * share, square * share * share
        # rounding alone may take the square of a mix of opposite sources below zero
        square = square if square >= 0.0 else square * 0.0
    else:
        weight = Float32(1.0)
    norm = unary(RSQRT, square * (1.0 / R.hidden) + EPS)
    if lane < SOURCES:
        weights[lane] = weight if cutlass.const_expr(ROUNDS) else weight * norm
    if lane == SOURCES:
        weights[NORM] = norm


@cute.jit
def exchanged(words: list, lane: Int32, STEP: cutlass.Constexpr, FAR: cutlass.Constexpr):
    """The words with those ``FAR`` apart swapped where the lane's bit ``STEP`` is set: first what the lane will keep."""
    upper = (lane & STEP) != 0
    return [words[i ^ FAR] if upper else words[i] for i in range(4)]


@cute.jit
def mixed(saved: list, weight: Float32, lane: Int32):
    """Two neighbouring columns of the saved blocks' mix, from the 8 columns that eight lanes hold of a block each.

    A word is two columns. Each step of the exchange halves what a lane holds; the last one does not, so that two lanes
    end with the same pair.
    """
    words = exchanged(exchanged(saved, lane, 16, 2), lane, 8, 1)
    left = []
    for word in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            part = low if cutlass.const_expr(half == 0) else high
            left.append(weight * part(words[word]) + arch.shuffle_sync_bfly(weight * part(words[2 + word]), 16))
    left = [left[i] + arch.shuffle_sync_bfly(left[2 + i], 8) for i in range(2)]
    return [one + arch.shuffle_sync_bfly(one, 4) for one in left]


@cute.kernel
def k3_attn_res_cute_cluster_mix(
    prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor, norm_w: cute.Tensor,
    out: cute.Tensor, rows: Int32, saved: Int32, R: cutlass.Constexpr, ROWS: cutlass.Constexpr, BLOCKS: cutlass.Constexpr,
    EPS: cutlass.Constexpr, ROUNDS: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, hidden] of the first ``saved`` of blocks[BLOCKS, ROWS, hidden] and prefix[ROWS, hidden]; row i is cluster i's.

    A lane holds 8 columns of a saved block and of the prefix in each of its warp's steps; the MMA makes all sums over columns
    at once: every source times every source, and times the two halves of the query. Sums: MMAs of a warp ascending,
    even and odd halves apart, then warps, then blocks ascending. ``ROUNDS``: the mix and the normalised value are rounded too.
    """
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane, warp = t % 32, arch.make_warp_uniform(arch.warp_idx())
    row, part = block // R.cluster, block % R.cluster
    group = lane // 4
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    at = [(R.column(part, warp, step) + lane % 4 * 8) * 2 for step in range(R.steps)]
    gamma, query = [], []
    if cutlass.const_expr(BLOCKS > 0):
        for step in cutlass.range_constexpr(R.ahead):
            gamma.append(read(LOAD_WEIGHTS, res_norm.iterator.toint() + at[step], 4, []))
            query.append(read(LOAD_WEIGHTS, res_proj.iterator.toint() + at[step], 4, []))
    norm = []
    for step in cutlass.range_constexpr(R.steps):
        place = (R.column(part, warp, step) + R.out_column(lane)) * 2
        norm += read(LOAD_WEIGHT_PAIR, norm_w.iterator.toint() + place, 1, [])
    memory = SmemAllocator()
    parts = memory.allocate_tensor(Float32, cute.make_layout(R.part_words), byte_alignment=16)
    told = memory.allocate_tensor(Float32, cute.make_layout(R.told_words), byte_alignment=16)
    totals = memory.allocate_tensor(Float32, cute.make_layout(R.words), byte_alignment=16)
    weights = memory.allocate_tensor(Float32, cute.make_layout(12), byte_alignment=16)
    arrived = memory.allocate_tensor(Int64, cute.make_layout(2), byte_alignment=16).iterator
    if cutlass.const_expr(R.cluster > 1):
        if t == 0:
            arch.mbarrier_init(arrived, 1)
            arch.mbarrier_arrive_and_expect_tx(arrived, R.told_words * 4)
        arch.mbarrier_init_fence()
        arch.cluster_arrive_relaxed()
    arch.griddepcontrol_wait()

    live = cutlass.min(row, rows - 1)  # what is not there is loaded as the last row, and not used
    mine = cutlass.min(group, saved - 1)
    held, last, tail = [], [], []
    for step in cutlass.range_constexpr(R.steps):
        if cutlass.const_expr(BLOCKS > 0):
            source = blocks.iterator.toint() + (Int64(mine) * ROWS + live) * (R.hidden * 2)
            held.append(read(LOAD_X, source + at[step], 4, []))
        else:
            held.append([Uint32(0)] * 4)
        residual = prefix.iterator.toint() + Int64(live) * (R.hidden * 2)
        last.append(read(LOAD_X, residual + at[step], 4, []))
        tail += read(LOAD_PAIR, residual + (R.column(part, warp, step) + R.out_column(lane)) * 2, 1, [])
    if cutlass.const_expr(RELEASE == "loads" and (BLOCKS == 0 or R.ahead == R.steps)):
        arch.griddepcontrol_launch_dependents()
    sums = [Float32(0.0)] * 16
    for step in cutlass.range_constexpr(R.steps):
        others = last[step]
        if cutlass.const_expr(BLOCKS > 0):
            upper, lower = query_halves(gamma[step % R.ahead], query[step % R.ahead])
            if cutlass.const_expr(step + R.ahead < R.steps):
                gamma[step % R.ahead] = read(LOAD_WEIGHTS, res_norm.iterator.toint() + at[step + R.ahead], 4, [])
                query[step % R.ahead] = read(LOAD_WEIGHTS, res_proj.iterator.toint() + at[step + R.ahead], 4, [])
            if cutlass.const_expr(RELEASE == "loads" and step + R.ahead + 1 == R.steps):
                arch.griddepcontrol_launch_dependents()
            halves = [one if group == 1 else two for one, two in zip(upper, lower, strict=True)]
            others = [one if (group == 1) | (group == 2) else two for one, two in zip(halves, last[step], strict=True)]
        sums = products(sums, held[step], others, BLOCKS)
    keep_part(sums, parts, warp, lane, R, BLOCKS)
    arch.sync_threads()
    if cutlass.const_expr(R.cluster > 1):
        arch.cluster_wait()  # every peer has begun
    if row < rows:
        if warp == 0:
            tell(parts, told, arrived, part, t, R)
            if cutlass.const_expr(R.cluster > 1):
                arch.mbarrier_wait(arrived, 0)
            else:
                arch.sync_warp()
            weigh(told, totals, weights, lane, saved, R, BLOCKS, EPS, ROUNDS)
        arch.sync_threads()
        own, prefixes, scale = weights[group], weights[PREFIX], weights[NORM]
        for step in cutlass.range_constexpr(R.steps):
            first, second = prefixes * low(tail[step]), prefixes * high(tail[step])
            if cutlass.const_expr(BLOCKS > 0):
                one, two = mixed(held[step], own, lane)
                first, second = first + one, second + two
            if cutlass.const_expr(ROUNDS):
                word = rounded(first, second)
                word = rounded(low(word) * scale, high(word) * scale)
                first, second = low(word), high(word)
            word = rounded(first * low(norm[step]), second * high(norm[step]))
            to = Int64(row) * (R.hidden * 2) + (R.column(part, warp, step) + R.out_column(lane)) * 2
            if (lane & 4) == 0:
                arch.inline_ptx(STORE_PAIR, read_only_args=[out.iterator.toint() + to, word])


k3_attn_res_cute_cluster_mix.set_name_prefix(
    "k3_attn_res_cute_cluster_mix", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor, norm_w: cute.Tensor,
    out: cute.Tensor, rows: Int32, saved: Int32, R: cutlass.Constexpr, ROWS: cutlass.Constexpr, BLOCKS: cutlass.Constexpr,
    EPS: cutlass.Constexpr, ROUNDS: cutlass.Constexpr, RELEASE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster a row."""
    k3_attn_res_cute_cluster_mix(
        prefix, blocks, res_norm, res_proj, norm_w, out, rows, saved, R, ROWS, BLOCKS, EPS, ROUNDS, RELEASE
    ).launch(grid=[ROWS * R.cluster, 1, 1], block=[R.threads, 1, 1], cluster=[R.cluster, 1, 1], stream=stream)
