"""A tile of the MLA attention: scores, highest scores, weights, sums; and what a part leaves."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch

from ..cute_numbers import EXP2, rounded, unary
from .cute_mma_parts import (
    MATRICES,
    ROUND_HALF,
    STORE_FLOAT,
    STORE_WORD,
    TURNED,
    TURNED_PAIR,
    keys_for_scores,
    keys_for_sums,
    latent_of,
    matrices,
    mma,
    shared_float,
)


@cute.jit
def scores_of(
    keys: Int32, shared: Int32, wm: Int32, wn: Int32, lane: Int32, A: cutlass.Constexpr, KIND: cutlass.Constexpr
):
    """A warp's scores: of its tokens with its queries."""
    sums = [[Float32(0.0)] * 4 for _ in range(A.m_own * A.n_own * A.chains)]
    row = shared + A.query_at + (wn * A.n_own * 8 + lane % 8) * A.query_pitch + lane // 8 * 16
    for k in cutlass.range_constexpr(A.width // 32):
        b = [matrices(MATRICES, row + n * 8 * A.query_pitch + k * 64, 4) for n in range(A.n_own)]
        for m in cutlass.range_constexpr(A.m_own):
            two = keys_for_scores(keys + (wm * A.m_own + m) * 16 * A.pitch, k, lane, A)
            for half in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(A.n_own):
                    c = (m * A.n_own + n) * A.chains + half % A.chains
                    sums[c] = mma(two[half], b[n][2 * half : 2 * half + 2], sums[c], KIND)
    found = []
    for c in cutlass.range_constexpr(A.m_own * A.n_own):
        for e in cutlass.range_constexpr(4):
            if cutlass.const_expr(A.chains == 2):
                found.append(sums[2 * c][e] + sums[2 * c + 1][e])
            else:
                found.append(sums[c][e])
    return found


@cute.jit
def seen_only(scores: list, sees: list, token: Int32, last: Int32, scale: Float32, A: cutlass.Constexpr):
    """Scaled, and minus infinity where the query comes before the token or there is none."""
    found = []
    for m in cutlass.range_constexpr(A.m_own):
        for n in cutlass.range_constexpr(A.n_own):
            for e in cutlass.range_constexpr(4):
                own = token + m * 16 + e // 2 * 8
                there = (own < last) & (own <= sees[2 * n + e % 2])
                found.append(scores[4 * (m * A.n_own + n) + e] * scale if there else Float32(-Float32.inf))
    return found


@cute.jit
def tell_highest(scores: list, at: Int32, wm: Int32, wn: Int32, lane: Int32, A: cutlass.Constexpr):
    """The highest score of each of the warp's queries among its tokens, for all warps."""
    for n in cutlass.range_constexpr(A.n_own):
        for e in cutlass.range_constexpr(2):
            top = scores[4 * n + e]
            for m in cutlass.range_constexpr(A.m_own):
                for h in cutlass.range_constexpr(2):
                    top = arch.fmax(top, scores[4 * (m * A.n_own + n) + 2 * h + e])
            for step in cutlass.range_constexpr(3):
                top = arch.fmax(top, arch.shuffle_sync_bfly(top, 16 >> step))
            if lane < 4:
                place = wm * A.queries + (wn * A.n_own + n) * 8 + lane * 2 + e
                arch.inline_ptx(STORE_FLOAT, read_only_args=[at + place * 4, top])


@cute.jit
def keep_weights(
    scores: list,
    base: list,
    shrink: list,
    sums: list,
    at: Int32,
    wm: Int32,
    wn: Int32,
    lane: Int32,
    A: cutlass.Constexpr,
):
    """Weights of the warp's scores, rounded as the MMA takes them, to shared memory; returns their sums, unrounded."""
    group, quad = lane // 4, lane % 4
    found = []
    for n in cutlass.range_constexpr(A.n_own):
        # which of all columns a warp's n-th is hangs on the warp: chosen among values, not indexed
        low, high = base[2 * n], base[2 * n + 1]
        by_low, by_high = shrink[2 * n], shrink[2 * n + 1]
        if cutlass.const_expr(A.warps_n == 2):
            far = wn == 1
            low, high = (base[2 * (A.n_own + n)] if far else low), (base[2 * (A.n_own + n) + 1] if far else high)
            by_low = shrink[2 * (A.n_own + n)] if far else by_low
            by_high = shrink[2 * (A.n_own + n) + 1] if far else by_high
        first, second = sums[2 * n] * by_low, sums[2 * n + 1] * by_high
        for m in cutlass.range_constexpr(A.m_own):
            for h in cutlass.range_constexpr(2):
                c = 4 * (m * A.n_own + n) + 2 * h
                one, two = unary(EXP2, scores[c] - low), unary(EXP2, scores[c + 1] - high)
                first, second = first + one, second + two
                if cutlass.const_expr(A.fp8):
                    word = arch.inline_ptx(ROUND_HALF, write_only_types=[cutlass.Uint32], read_only_args=[two, one])
                else:
                    word = rounded(one, two)
                token = (wm * A.m_own + m) * 16 + h * 8 + group
                to = at + token * A.weight_pitch + ((wn * A.n_own + n) * 8 + quad * 2) * 2
                arch.inline_ptx(STORE_WORD, read_only_args=[to, word])
        found += [first, second]
    return found


@cute.jit
def weights_of(at: Int32, lane: Int32, A: cutlass.Constexpr):
    """The MMA's second operand of each eight queries, of 16 tokens."""
    found = []
    row = at + lane % 16 * A.weight_pitch
    for pair in cutlass.range_constexpr(A.n_tiles // 2):
        four = matrices(TURNED, row + (2 * pair + lane // 16) * 16, 4)
        found += [four[:2], four[2:]]
    if cutlass.const_expr(A.n_tiles % 2):
        found.append(matrices(TURNED_PAIR, row + (A.n_tiles - 1) * 16, 2))
    return found


@cute.jit
def more_sums(acc: list, keys: Int32, at: Int32, lane: Int32, A: cutlass.Constexpr, KIND: cutlass.Constexpr):
    """The warp's sums with a tile's latents, weighed: tokens ascending."""
    sums = list(acc)
    for k in cutlass.range_constexpr(A.tile // 16):
        weights = weights_of(at + k * 16 * A.weight_pitch, lane, A)
        for m in cutlass.range_constexpr(A.m_sums // 2):
            two = keys_for_sums(keys + k * 16 * A.pitch, m, lane, A)
            for half in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(A.n_tiles):
                    c = 4 * ((2 * m + half) * A.n_tiles + n)
                    sums[c : c + 4] = mma(two[half], weights[n], sums[c : c + 4], KIND)
    return sums


@cute.jit
def leave(
    partial: cute.Tensor, lse: cute.Tensor, acc: list, highest: list, sums: list, shared: Int32, wm: Int32, wn: Int32,
    live: Int32, at_query: Int32, t: Int32, lane: Int32, warp: Int32, A: cutlass.Constexpr,
):  # fmt: skip
    """Sums of weights over the block's warps, ascending; then each query's share and logarithm."""
    group, quad = lane // 4, lane % 4
    table = shared + A.highest_at
    if wn < A.warps_n:
        for n in cutlass.range_constexpr(A.n_own):
            for e in cutlass.range_constexpr(2):
                one = sums[2 * n + e]
                for step in cutlass.range_constexpr(3):
                    one += arch.shuffle_sync_bfly(one, 16 >> step)
                if lane < 4:
                    place = wm * A.queries + (wn * A.n_own + n) * 8 + lane * 2 + e
                    arch.inline_ptx(STORE_FLOAT, read_only_args=[table + place * 4, one])
    arch.sync_threads()
    to = partial.iterator.toint() + (Int64(at_query) * A.latent + warp * A.latents) * 4
    for n in cutlass.range_constexpr(A.n_tiles):
        for e in cutlass.range_constexpr(2):
            column = n * 8 + quad * 2 + e
            total = Float32(0.0)
            for m in cutlass.range_constexpr(A.warps_m):
                total += shared_float(table + (m * A.queries + column) * 4)
            some = total > Float32(0.0)
            share = Float32(1.0) / total if some else Float32(0.0)
            if column < live:
                if some:
                    for m in cutlass.range_constexpr(A.m_sums):
                        for h in cutlass.range_constexpr(2):
                            value = acc[4 * (m * A.n_tiles + n) + 2 * h + e] * share
                            at = to + (Int64(column) * A.latent + latent_of(m, group, h, A)) * 4
                            arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[at, value])
                if (warp == 0) & (group == 0):
                    logarithm = highest[2 * n + e] + unary("lg2.approx.f32 {$w0}, {$r0};", total)
                    at = lse.iterator.toint() + Int64(at_query + column) * 4
                    logarithm = logarithm if some else Float32(-Float32.inf)
                    arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[at, logarithm])
