"""Before the MLA attention: query norm, up-projection and absorption by a cluster a head; the new cache rows."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute import arch

from ..cute_numbers import RSQRT, as_float, high, low, rounded, sum_lanes, unary
from ..cute_stages import stage
from ..cute_streaming import EVICT_FIRST, LOAD_W, LOAD_X, multiply, read
from .cute_mma_parts import COPY, MATRICES, STORE_FLOAT, TURNED, matrices, mma, shared_float
from .cute_mma_sent import begun, ended, send_word

PEER = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
STORE_PEER = "st.shared::cluster.b32 [{$r0}], {$r1};"
TO_E4M3 = "{ .reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, {$r0}, {$r1}; cvt.u32.u16 {$w0}, both; }"
STORE_GLOBAL = "st.global.b32 [{$r0}], {$r1};"
STORE_SHORT = "{ .reg .b16 both; cvt.u16.u32 both, {$r1}; st.global.b16 [{$r0}], both; }"
STORE_PAIR, STORE_FOUR = (
    "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
)


@cute.jit
def e4m3(first: Float32, second: Float32):
    """Two FP32 values as E4M3, the first below, saturated."""
    return arch.inline_ptx(TO_E4M3, write_only_types=[Uint32], read_only_args=[second, first])


@cute.jit
def scale_of(k_scale: Int64 | None, F: cutlass.Constexpr):
    """Of an E4M3 cache; one of a BF16 cache."""
    if cutlass.const_expr(F.fp8):
        (word,) = read("ld.global.u32 $0, [$1];", k_scale, 1, [])
        return as_float(word)
    return Float32(1.0)


@cute.jit
def store_two(at: Int64, word: Uint32, F: cutlass.Constexpr):
    """Two neighbours of a query, BF16 in a word, where the cache's dtype has them: ``at`` is that of a BF16 query."""
    if cutlass.const_expr(F.fp8):
        arch.inline_ptx(STORE_SHORT, read_only_args=[at, e4m3(low(word), high(word))])
    else:
        arch.inline_ptx(STORE_GLOBAL, read_only_args=[at, word])


@cute.jit
def joined(word: Uint32, F: cutlass.Constexpr, D: cutlass.Constexpr):
    """A word of a query as it goes to other ranks: E4M3 codes of an even lane's values and of the next one's."""
    if cutlass.const_expr(D is None or not F.fp8):
        return word
    codes = e4m3(low(word), high(word))
    return codes | arch.shuffle_sync_bfly(codes, 1) << 16


@cute.jit
def front(
    proj: Int64, q_norm: Int64, kv_norm: Int64, q_b: Int64, w_uk: Int64, k_scale: Int64 | None, table: Int64, context: Int64,
    query: Int64 | None, cache: Int64, rows: Int32, block: Int32, shared: Int32, F: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, peers: Any, D: cutlass.Constexpr,
):  # fmt: skip
    """The whole launch: see :class:`.around.Around`. Where contexts lie over ranks (``D``, a :class:`.ranks.Ranks`) queries go
    to all of them: ``peers`` is [table of targets, the launch's counters, health record, this rank].
    """
    stage(F.build, "begin")
    t, _, _ = arch.thread_idx()
    lane, warp = t % 32, arch.make_warp_uniform(arch.warp_idx())
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    on_head = block < F.head_blocks
    part = block % F.cluster
    head, first_row = block // F.cluster % F.heads, block // F.cluster // F.heads * 16
    group, quad = lane // 4, lane % 4
    # blocks that insert ask for the first head's weights: in the L2 anyway, and the code stays one
    head = head if on_head else Int32(0)
    policy = Int64(EVICT_FIRST)
    start = warp * (F.steps * 32) + quad * 8
    weights = []
    at = []
    for n in cutlass.range_constexpr(F.n_tiles):
        output = cutlass.min(n * 8 + group, F.outputs - 1)
        meets = part * F.own_nope + output
        rest = F.nope + part * F.own_rope + output - F.own_nope
        row = head * (F.nope + F.rope) + (meets if output < F.own_nope else rest)
        at.append(q_b + (Int64(row) * F.q_lora + start) * 2)
    for s in cutlass.range_constexpr(F.steps):
        words = []
        for n in cutlass.range_constexpr(F.n_tiles):
            words += read(LOAD_W, at[n] + s * 64, 4, [policy])
        weights.append(words)
    norms = [read(LOAD_W, q_norm + (start + s * 32) * 2, 4, [policy]) for s in range(F.steps)]
    # W_UK's share, row by row of a head's query
    chunks = F.own_latent // 8
    source = w_uk + (Int64(head) * F.nope * F.latent + part * F.own_latent) * 2
    for e in cutlass.range(t, F.nope * chunks, 256, unroll=1):
        to = shared + e // chunks * F.uk_pitch + e % chunks * 16
        arch.inline_ptx(
            COPY, read_only_args=[to, source + (Int64(e // chunks) * F.latent + e % chunks * 8) * 2, Int32(16)]
        )
    arch.cp_async_commit_group()
    # peers have begun before anything is stored to them
    arch.cluster_arrive_relaxed()
    arch.griddepcontrol_wait()
    stage(F.build, "woken")
    if cutlass.const_expr(RELEASE == "loads"):
        arch.griddepcontrol_launch_dependents()
    sent = begun(peers, block, on_head, D)
    if on_head:
        x = normalised(proj, norms, rows, first_row, start, shared, warp, lane, F)
        acc = [Float32(0.0)] * (4 * F.n_tiles)
        for s in cutlass.range_constexpr(F.steps):
            acc = multiply(acc, weights[s], x[s], F.halves)
        for n in cutlass.range_constexpr(F.n_tiles):
            for e in cutlass.range_constexpr(2 * F.halves):
                row, output = e // 2 * 8 + group, n * 8 + quad * 2 + e % 2
                if output < F.outputs:
                    place = (warp * 16 + row) * F.outputs + output
                    arch.inline_ptx(STORE_FLOAT, read_only_args=[shared + F.sums_at + place * 4, acc[4 * n + e]])
        arch.sync_threads()
        stage(F.build, "product")
    arch.cluster_wait()
    if on_head:
        share_query(query, rows, first_row, head, part, shared, t, F, sent, D)
    arch.cp_async_wait_group(0)
    # stores to peers are there
    arch.cluster_arrive()
    arch.cluster_wait()
    stage(F.build, "heard")
    if on_head:
        absorb(query, rows, first_row, head, part, shared, lane, warp, F, sent, D)
        ended(sent, block, t, D)
    else:
        row = (block - F.head_blocks) * 8 + warp
        if row < rows:
            insert(proj, kv_norm, k_scale, table, context, cache, row, lane, F, peers, D)
    stage(F.build, "finished")


@cute.jit
def normalised(
    proj: Int64, norms: list, rows: Int32, first_row: Int32, start: Int32, shared: Int32, warp: Int32, lane: Int32,
    F: cutlass.Constexpr,
):  # fmt: skip
    """Operands of the rows, for each step of a warp: normed over all warps, rounded once."""
    group, quad = lane // 4, lane % 4
    x = []
    for h in cutlass.range_constexpr(F.halves):
        row = cutlass.min(first_row + h * 8 + group, rows - 1)  # what is not there repeats the last row
        words = [read(LOAD_X, proj + (Int64(row) * F.columns + start + s * 32) * 2, 4, []) for s in range(F.steps)]
        total = Float32(0.0)
        for s in cutlass.range_constexpr(F.steps):
            for w in cutlass.range_constexpr(4):
                total += low(words[s][w]) * low(words[s][w])
                total += high(words[s][w]) * high(words[s][w])
        for step in cutlass.range_constexpr(2):
            total += arch.shuffle_sync_bfly(total, 2 >> step)
        if quad == 0:
            to = shared + F.squares_at + (warp * 16 + h * 8 + group) * 4
            arch.inline_ptx(STORE_FLOAT, read_only_args=[to, total])
        x.append(words)
    arch.sync_threads()
    factors = []
    for h in cutlass.range_constexpr(F.halves):
        total = Float32(0.0)
        for one in cutlass.range_constexpr(8):
            total += shared_float(shared + F.squares_at + (one * 16 + h * 8 + group) * 4)
        factors.append(unary(RSQRT, total * Float32(1.0 / F.q_lora) + Float32(F.eps)))
    found = []
    for s in cutlass.range_constexpr(F.steps):
        step_words = []
        for h in cutlass.range_constexpr(F.halves):
            for w in cutlass.range_constexpr(4):
                word, weight = x[h][s][w], norms[s][w]
                step_words.append(rounded(low(word) * factors[h] * low(weight), high(word) * factors[h] * high(weight)))
        found.append(step_words)
    return found


@cute.jit
def share_query(
    query: Int64 | None, rows: Int32, first_row: Int32, head: Int32, part: Int32, shared: Int32, t: Int32, F: cutlass.Constexpr,
    sent: list | None, D: cutlass.Constexpr,
):  # fmt: skip
    """Sums over the warps, ascending, rounded: what meets the latent to every block of the cluster, the rest to memory or to all
    ranks.
    """
    pairs = F.outputs // 2
    for e in cutlass.range(t, 16 * pairs, 256, unroll=1):
        row, output = e // pairs, e % pairs * 2
        first, second = Float32(0.0), Float32(0.0)
        if row < 8 * F.halves:
            for one in cutlass.range_constexpr(8):
                at = shared + F.sums_at + ((one * 16 + row) * F.outputs + output) * 4
                first += shared_float(at)
                second += shared_float(at + 4)
        word = rounded(first, second)
        mine = joined(word, F, D)
        if output < F.own_nope:
            to = shared + F.nope_at + row * F.nope_pitch + (part * F.own_nope + output) * 2
            for peer in cutlass.range_constexpr(F.cluster):
                there = arch.inline_ptx(PEER, write_only_types=[Uint32], read_only_args=[to, Int32(peer)])
                arch.inline_ptx(STORE_PEER, read_only_args=[there, word])
        else:
            if first_row + row < rows:
                column = F.latent + part * F.own_rope + output - F.own_nope
                if cutlass.const_expr(D is None):
                    place = (Int64(first_row + row) * F.heads + head) * F.width + column
                    store_two(query + place * (1 if F.fp8 else 2), word, F)
                else:
                    send_word(sent, first_row + row, head, column, mine, D)


@cute.jit
def absorb(
    query: Int64 | None, rows: Int32, first_row: Int32, head: Int32, part: Int32, shared: Int32, lane: Int32, warp: Int32,
    F: cutlass.Constexpr, sent: list | None, D: cutlass.Constexpr,
):  # fmt: skip
    """The block's share of the latent of every row: eight columns a warp and turn."""
    group, quad = lane // 4, lane % 4
    tiles = F.own_latent // 8
    a_row = shared + F.nope_at + lane % 16 * F.nope_pitch + lane // 16 * 16
    a = [matrices(MATRICES, a_row + k * 32, 4) for k in range(F.nope // 16)]
    for turn in cutlass.range_constexpr(-(-tiles // 8)):
        tile = turn * 8 + warp
        if tile < tiles:
            acc = [Float32(0.0)] * 4
            for k in cutlass.range_constexpr(F.nope // 32):
                b = matrices(TURNED, shared + (k * 32 + lane) * F.uk_pitch + tile * 16, 4)
                acc = mma(a[2 * k], b[:2], acc, "bf16")
                acc = mma(a[2 * k + 1], b[2:], acc, "bf16")
            for h in cutlass.range_constexpr(F.halves):
                row = first_row + h * 8 + group
                if cutlass.const_expr(D is None):
                    if row < rows:
                        column = part * F.own_latent + tile * 8 + quad * 2
                        place = (Int64(row) * F.heads + head) * F.width + column
                        store_two(query + place * (1 if F.fp8 else 2), rounded(acc[2 * h], acc[2 * h + 1]), F)
                else:
                    mine = joined(rounded(acc[2 * h], acc[2 * h + 1]), F, D)
                    if row < rows:
                        send_word(sent, row, head, part * F.own_latent + tile * 8 + quad * 2, mine, D)


@cute.jit
def insert(
    proj: Int64, kv_norm: Int64, k_scale: Int64 | None, table: Int64, context: Int64, cache: Int64, row: Int32, lane: Int32,
    F: cutlass.Constexpr, peers: Any, D: cutlass.Constexpr,
):  # fmt: skip
    """One token's row of the cache, by one warp: eight neighbours a lane and turn; nothing where another rank holds the token."""
    request = row // F.q_len
    (before,) = read("ld.global.u32 $0, [$1];", context + Int64(request) * 4, 1, [])
    position = Int32(before) + row % F.q_len
    if cutlass.const_expr(D is None):
        insert_at(proj, kv_norm, k_scale, table, cache, row, request, position, lane, F)
    else:
        if position % D.size == peers[3]:
            insert_at(proj, kv_norm, k_scale, table, cache, row, request, position // D.size, lane, F)


@cute.jit
def insert_at(
    proj: Int64, kv_norm: Int64, k_scale: Int64 | None, table: Int64, cache: Int64, row: Int32, request: Int32, position: Int32,
    lane: Int32, F: cutlass.Constexpr,
):  # fmt: skip
    """The same at a position of the request's own blocks."""
    (page,) = read("ld.global.u32 $0, [$1];", table + (Int64(request) * F.pages + position // F.page) * 4, 1, [])
    source = proj + (Int64(row) * F.columns + F.q_lora + lane * 8) * 2
    item = 1 if F.fp8 else 2
    to = cache + ((Int64(page) * F.page + position % F.page) * F.width + lane * 8) * item
    latents = [read(LOAD_X, source + turn * 512, 4, []) for turn in range(F.latent // 256)]
    weights = [read(LOAD_X, kv_norm + (turn * 256 + lane * 8) * 2, 4, []) for turn in range(F.latent // 256)]
    total = Float32(0.0)
    for words in latents:
        for word in words:
            total += low(word) * low(word)
            total += high(word) * high(word)
    scale = scale_of(k_scale, F)
    factor = unary(RSQRT, sum_lanes([total])[0] * Float32(1.0 / F.latent) + Float32(F.eps))
    for turn in cutlass.range_constexpr(F.latent // 256):
        made = []
        for w in cutlass.range_constexpr(4):
            word, weight = latents[turn][w], weights[turn][w]
            made.append(rounded(low(word) * factor * low(weight), high(word) * factor * high(weight)))
        store_eight(to + turn * 256 * item, made, scale, F)
    if lane < F.rope // 8:
        store_eight(to + F.latent * item, read(LOAD_X, source + F.latent * 2, 4, []), scale, F)


@cute.jit
def store_eight(to: Int64, words: list, scale: Float32, F: cutlass.Constexpr):
    """Eight BF16 values as the cache holds them."""
    if cutlass.const_expr(F.fp8):
        codes = [e4m3(low(word) / scale, high(word) / scale) for word in words]
        pair = [codes[0] | codes[1] << 16, codes[2] | codes[3] << 16]
        arch.inline_ptx(STORE_PAIR, read_only_args=[to, *pair])
    else:
        arch.inline_ptx(STORE_FOUR, read_only_args=[to, *words])
