"""Plain CuTe DSL FMA kernel: each thread a strided part of K, then a warp and a block sum."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator


@cute.kernel
def k3_attention_projection_cute_plain(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, OUTPUTS_A_BLOCK: cutlass.Constexpr, THREADS: cutlass.Constexpr, VEC: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; ``rows <= ROWS``.

    Thread t takes elements ``(i * THREADS + t) * VEC`` onwards for i = 0, 1, ... in ascending order;
    then the lanes of a warp by butterfly, then the warps in ascending order.
    """
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    hidden = cute.size(w, mode=[1])
    warps = THREADS // 32
    sums = SmemAllocator().allocate_tensor(
        Float32,
        cute.make_layout((warps, ROWS * OUTPUTS_A_BLOCK), stride=(ROWS * OUTPUTS_A_BLOCK, 1)),
        byte_alignment=16,
    )
    wv = cute.zipped_divide(w, (1, VEC))
    xv = cute.zipped_divide(x, (1, VEC))
    acc = cute.make_rmem_tensor(ROWS * OUTPUTS_A_BLOCK, Float32)
    acc.fill(0.0)
    for i in cutlass.range(hidden // (THREADS * VEC), unroll=2):
        column = i * THREADS + t
        xs = []
        for r in cutlass.range_constexpr(ROWS):
            # a padding row reads the last live one; its sum is dropped at the store
            row = cutlass.min(Int32(r), rows - 1)
            xs.append(xv[(None, (row, column))].load().to(Float32))
        for o in cutlass.range_constexpr(OUTPUTS_A_BLOCK):
            wt = wv[(None, (block * OUTPUTS_A_BLOCK + o, column))].load().to(Float32)
            for r in cutlass.range_constexpr(ROWS):
                acc[r * OUTPUTS_A_BLOCK + o] += (xs[r] * wt).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    for j in cutlass.range_constexpr(ROWS * OUTPUTS_A_BLOCK):
        total = arch.warp_reduction_sum(acc[j])
        if t % 32 == 0:
            sums[t // 32, j] = total
    arch.sync_threads()
    if t < ROWS * OUTPUTS_A_BLOCK:
        row = t // OUTPUTS_A_BLOCK
        if row < rows:
            total = Float32(0.0)
            for s in cutlass.range_constexpr(warps):
                total += sums[s, t]
            out[row, block * OUTPUTS_A_BLOCK + t % OUTPUTS_A_BLOCK] = total.to(BFloat16)


k3_attention_projection_cute_plain.set_name_prefix(
    "k3_attention_projection_cute_plain", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, OUTPUTS_A_BLOCK: cutlass.Constexpr, THREADS: cutlass.Constexpr, VEC: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block per ``OUTPUTS_A_BLOCK`` rows of w."""
    k3_attention_projection_cute_plain(x, w, out, rows, ROWS, OUTPUTS_A_BLOCK, THREADS, VEC).launch(
        grid=[cute.size(w, mode=[0]) // OUTPUTS_A_BLOCK, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
