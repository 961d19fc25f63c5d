"""Triton kernel: the exact best experts of a row and their weights, one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

# exact.sigmoid: the same constants, which a test holds to arithmetic.py
LEAST = tl.constexpr(-87.0)
BIG = tl.constexpr(88.0)
LOG2E = tl.constexpr(1.4426950408889634)
MAGIC = tl.constexpr(12582912.0)
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.4286068203094173e-06)
C6 = tl.constexpr(0.0013863713247701526)
C5 = tl.constexpr(0.008367558009922504)
C4 = tl.constexpr(0.04166724160313606)
C3 = tl.constexpr(0.16666533052921295)


@triton.jit
def sigmoid(logits):
    """Every step one FP32 operation, rounded once: an explicit multiply-add where two are one, and none elsewhere."""
    zero = tl.zeros_like(logits)
    a = tl.maximum(-logits, LEAST)
    m = tl.fma(a, zero + LOG2E, zero + MAGIC)
    n = m - MAGIC
    r = tl.fma(n, zero - LN2_HIGH, a)
    r = tl.fma(n, zero - LN2_LOW, r)
    p = tl.fma(zero + C6, r, zero + C5)
    p = tl.fma(p, r, zero + C4)
    p = tl.fma(p, r, zero + C3)
    p = tl.fma(p, r, zero + 0.5)
    p = tl.fma(p, r, zero + 1.0)
    p = tl.fma(p, r, zero + 1.0)
    two = ((m.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    # added to zero in one step, so that the sum below does not take the product in
    e = tl.where(a > BIG, float("inf"), tl.fma(p, two, zero))
    s = tl.math.div_rn(zero + 1.0, e + 1.0)
    return tl.where(logits != logits, float("nan"), s)


@triton.jit
def k3_router_triton_choice(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, rows,
    scaling: tl.constexpr, experts: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr, PDL: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """ids[row, TOP_K] int32 and weights[row, TOP_K] FP32 of logits[row, experts]; program ``row``, if it is live.

    Experts are ordered by 64-bit keys: the biased score, NaN as minus infinity, then the lower id. Scores of the chosen are
    added in halves.
    """
    if PDL and RELEASE == "entry":
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    there = expert < experts
    bias = tl.load(bias_ptr + expert, mask=there, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if row < rows:
        logits = tl.load(logits_ptr + row * experts + expert, mask=there, other=0.0)
        biased = sigmoid(logits) + bias
        bits = tl.where(biased != biased, float("-inf"), biased).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - expert).to(tl.int64)
        key = tl.where(there, key, -0x7FFFFFFFFFFFFFFF)
        best = tl.topk(key, TOP_K)
        chosen = (BLOCK - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        scores = sigmoid(tl.load(logits_ptr + row * experts + chosen))
        total = scores
        for step in tl.static_range(HALVINGS):
            total = tl.sum(tl.reshape(total, (2, TOP_K >> (step + 1))), axis=0)
        total = tl.sum(total, axis=0)
        weights = tl.math.div_rn(scores, tl.zeros_like(scores) + (total + 1e-20)) * scaling
        slot = tl.arange(0, TOP_K)
        tl.store(ids_ptr + row * TOP_K + slot, chosen)
        tl.store(weights_ptr + row * TOP_K + slot, weights)
