"""Triton kernel: AttnRes and the norm behind it, a row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_attn_res_triton_row(
    prefix_ptr, blocks_ptr, res_norm_ptr, res_proj_ptr, norm_w_ptr, out_ptr, rows, saved,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    EPS: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """out[rows, HIDDEN] of the first ``saved`` of blocks[BLOCKS, ROWS, HIDDEN] and prefix[ROWS, HIDDEN].

    Weights are asked for before the dependency wait. Scores source by source, each sum one tree over the row; then the sources
    again, which the L1 or L2 holds, for the mix. ``ROUNDS``: the mix and the normalised value are rounded too.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    norm = tl.load(norm_w_ptr + column, mask=inside, other=0.0)
    query = tl.zeros((BLOCK,), dtype=tl.float32)
    if BLOCKS > 0:
        gamma = tl.load(res_norm_ptr + column, mask=inside, other=0.0)
        query = gamma.to(tl.float32) * tl.load(res_proj_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if row < rows:
        at = prefix_ptr + row * HIDDEN + column
        mix = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if BLOCKS > 0:
            source = tl.arange(0, 16)
            square = tl.sum(mix * mix, axis=0)
            last = tl.sum(mix * query, axis=0) * tl.rsqrt(square / HIDDEN + EPS)
            scores = tl.where(source == saved, last, float("-inf"))
            for i in range(saved):
                value = tl.load(blocks_ptr + (i * ROWS + row) * HIDDEN + column, mask=inside, other=0.0)
                value = value.to(tl.float32)
                square = tl.sum(value * value, axis=0)
                score = tl.sum(value * query, axis=0) * tl.rsqrt(square / HIDDEN + EPS)
                scores = tl.where(source == i, score, scores)
            weights = tl.exp(scores - tl.max(scores, axis=0))
            weights = weights / tl.sum(weights, axis=0)
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for i in range(saved):
                value = tl.load(blocks_ptr + (i * ROWS + row) * HIDDEN + column, mask=inside, other=0.0)
                total += tl.sum(tl.where(source == i, weights, 0.0), axis=0) * value.to(tl.float32)
            mix = total + tl.sum(tl.where(source == saved, weights, 0.0), axis=0) * mix
        if ROUNDS:
            mix = mix.to(out_ptr.dtype.element_ty).to(tl.float32)
        mix = mix * tl.rsqrt(tl.sum(mix * mix, axis=0) / HIDDEN + EPS)
        if ROUNDS:
            mix = mix.to(out_ptr.dtype.element_ty).to(tl.float32)
        result = mix * norm.to(tl.float32)
        tl.store(out_ptr + row * HIDDEN + column, result.to(out_ptr.dtype.element_ty), mask=inside)
