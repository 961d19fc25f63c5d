"""CuTe DSL FMA kernel for very few rows: weights straight into registers, all of K in straight-line code."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, cute, select_
from cutlass.cute import arch, nvgpu
from cutlass.memory import SmemAllocator

EVICT_FIRST = 0x12F0000000000000
"""L2 policy: weights are read once a step and must not push out what is read again."""


@cute.jit
def load(source: cute.Tensor, VEC: cutlass.Constexpr, STREAM: cutlass.Constexpr) -> list[Any]:
    """``VEC`` BF16 of one thread, 8 a load (tensors are 16-byte aligned, no more is promised), as register tensors."""
    wide = min(VEC, 8)
    hint = {"l1c_evict_priority": nvgpu.CacheEvictionPriority.NO_ALLOCATE} if STREAM else {}
    atom = cute.make_copy_atom(nvgpu.CopyG2ROp(), BFloat16, num_bits_per_copy=wide * 16, **hint)
    parts = cute.zipped_divide(source, (wide,))
    loaded = []
    for part in cutlass.range_constexpr(VEC // wide):
        words = cute.make_rmem_tensor(wide, BFloat16)
        if cutlass.const_expr(STREAM):
            cute.copy(atom, parts[None, part], words, cache_policy=Int64(EVICT_FIRST))
        else:
            cute.copy(atom, parts[None, part], words)
        loaded.append(words)
    return loaded


@cute.jit
def widen(loaded: list[Any], MIXED: cutlass.Constexpr) -> list[Any]:
    """FP32 values of BF16 register tensors.

    Blackwell multiplies BF16 into FP32 (FHFMA) where it sees the conversion. Hopper converts, one instruction an
    element when told so by bits: left to itself the compiler takes two for the upper half of a word.
    """
    values = []
    for part in cutlass.range_constexpr(len(loaded)):
        if cutlass.const_expr(MIXED):
            values += [loaded[part][e].to(Float32) for e in range(cute.size(loaded[part]))]
        else:
            words, high_half = cute.recast_tensor(loaded[part], Uint32), Uint32(0xFFFF0000)
            for e in cutlass.range_constexpr(cute.size(words)):
                values += [(words[e] << Uint32(16)).bitcast(Float32), (words[e] & high_half).bitcast(Float32)]
    return values


@cute.jit
def transpose_sum(sums: list[Any], lane: Int32) -> tuple[Any, Any, Any]:
    """Sum each of up to 32 values over the lanes of a warp: (sum, which of the values, may this lane store it).

    Every sum is the butterfly over lane distances 16, 8, 4, 2, 1, whatever the number of values. While a lane
    holds several, it keeps half of them and sends the other half: 32 values cost 31 shuffles, not 160.
    """
    values, steps = list(sums), []
    for step in cutlass.range_constexpr(5):
        upper = (lane & (16 >> step)) != 0
        count = len(values)
        half = (count + 1) // 2
        kept = []
        for j in cutlass.range_constexpr(half):
            mine, theirs = values[j], values[j]
            if cutlass.const_expr(j + half < count):
                mine = Float32(select_(upper, values[j + half], values[j]))
                theirs = Float32(select_(upper, values[j], values[j + half]))
            kept.append(mine + arch.shuffle_sync_bfly(theirs, offset=16 >> step))
        steps.append((upper, count, half))
        values = kept
    which, stores = Int32(0), Boolean(True)
    for step in cutlass.range_constexpr(5):
        upper, count, half = steps[4 - step]
        # a value without a partner is summed by both lanes of a pair: the lower one stores it
        exchanged = which + half < count
        stores = Boolean(stores & Boolean(select_(upper, exchanged, Boolean(True))))
        which = Int32(select_(exchanged & upper, which + half, which))
    return values[0], which, stores


@cute.kernel
def k3_attention_projection_cute_skinny_fma(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, A_BLOCK: cutlass.Constexpr, THREADS: cutlass.Constexpr, VEC: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, PRELOAD: cutlass.Constexpr, X_AHEAD: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, STREAM: cutlass.Constexpr, MIXED: cutlass.Constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, hidden] @ w[outputs, hidden]^T; ``rows <= ROWS``; one block ``A_BLOCK`` outputs.

    Thread t takes elements ``(i * THREADS + t) * VEC`` onwards of tile i, tiles in ascending order, each sum one
    chain of FMAs in FP32; then the lanes of a warp by butterfly, then the warps in ascending order.
    ``DEPTH`` weight tiles are under way at any time, ``PRELOAD`` of them before the dependency wait, and
    ``X_AHEAD`` tiles of x, all after it.
    """
    if cutlass.const_expr(RELEASE == "entry"):
        arch.griddepcontrol_launch_dependents()
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    warps = THREADS // 32
    results = ROWS * A_BLOCK
    tiles = cute.size(w, mode=[1]) // (THREADS * VEC)
    wv = cute.zipped_divide(w, (1, VEC))
    xv = cute.zipped_divide(x, (1, VEC))

    def load_weights(tile: int) -> list[Any]:
        column = tile * THREADS + t
        return [load(wv[(0, None), (block * A_BLOCK + o, column)], VEC, STREAM) for o in range(A_BLOCK)]

    def load_x(tile: int) -> list[Any]:
        # a padding row reads the last live one; its sum is dropped at the store
        column = tile * THREADS + t
        return [load(xv[(0, None), (cutlass.min(Int32(r), rows - 1), column)], VEC, False) for r in range(ROWS)]

    ws = [load_weights(tile) for tile in range(PRELOAD)]
    if cutlass.const_expr(RELEASE == "loads" and tiles == PRELOAD):
        arch.griddepcontrol_launch_dependents()
    arch.griddepcontrol_wait()
    ws += [load_weights(tile) for tile in range(PRELOAD, DEPTH)]
    if cutlass.const_expr(RELEASE == "loads" and PRELOAD < DEPTH and tiles == DEPTH):
        arch.griddepcontrol_launch_dependents()
    xs = [load_x(tile) for tile in range(X_AHEAD)]
    acc = [Float32(0.0) for _ in range(results)]
    for i in cutlass.range_constexpr(tiles):
        if cutlass.const_expr(i + X_AHEAD < tiles):
            xs.append(load_x(i + X_AHEAD))
        xf = [widen(xs[i][r], MIXED) for r in range(ROWS)]
        for o in cutlass.range_constexpr(A_BLOCK):
            wf = widen(ws[i][o], MIXED)
            for r in cutlass.range_constexpr(ROWS):
                for e in cutlass.range_constexpr(VEC):
                    acc[r * A_BLOCK + o] += xf[r][e] * wf[e]
        if cutlass.const_expr(i + DEPTH < tiles):
            ws.append(load_weights(i + DEPTH))
            if cutlass.const_expr(RELEASE == "loads" and i + DEPTH + 1 == tiles):
                arch.griddepcontrol_launch_dependents()
    total, which, stores = transpose_sum(acc, t % 32)
    if cutlass.const_expr(warps > 1):
        sums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((warps, results), stride=(results, 1)), byte_alignment=16
        )
        if stores:
            sums[t // 32, which] = total
        arch.sync_threads()
        which, stores = t, t < results
        if stores:
            total = sums[0, t]
            for s in cutlass.range_constexpr(1, warps):
                total += sums[s, t]
    row = which // A_BLOCK
    if stores & (row < rows):
        out[row, block * A_BLOCK + which % A_BLOCK] = total.to(BFloat16)


k3_attention_projection_cute_skinny_fma.set_name_prefix(
    "k3_attention_projection_cute_skinny_fma", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, A_BLOCK: cutlass.Constexpr, THREADS: cutlass.Constexpr, VEC: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, PRELOAD: cutlass.Constexpr, X_AHEAD: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, STREAM: cutlass.Constexpr, MIXED: cutlass.Constexpr, BLOCKS_PER_SM: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block per ``A_BLOCK`` rows of w, registers for ``BLOCKS_PER_SM`` of them (0: no limit)."""
    made = k3_attention_projection_cute_skinny_fma(
        x, w, out, rows, ROWS, A_BLOCK, THREADS, VEC, DEPTH, PRELOAD, X_AHEAD, RELEASE, STREAM, MIXED
    )
    grid = [cute.size(w, mode=[0]) // A_BLOCK, 1, 1]
    if cutlass.const_expr(BLOCKS_PER_SM > 0):
        # Told how many blocks an SM is to hold, the assembler uses all the registers that leaves and issues loads
        # early; left alone it saves registers by issuing them late. The carveout only spares it asking a driver.
        made.launch(
            grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=BLOCKS_PER_SM, preferred_smem_carveout=10,
        )  # fmt: skip
    else:
        made.launch(grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=True)
