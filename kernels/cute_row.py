"""How the warps of a row tell each other its sums: packets in the GPU's memory, shared memory of a cluster or of one block.

Families share this. ``CLUSTER`` says which: blocks of the cluster, 1 for packets in memory, :data:`OWN_BLOCK` for one block.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from .cute_polls import poll
from .cute_streaming import read
from .cute_waits import ROW, publish

UNITS = 32
# a row's packets by kind: up to six for the saved blocks' sums, one for their mix, one for the prefix
KINDS, MIX_PACKET, SUM_PACKET = 8, 6, 7
# bytes from a kind to the next: one place of 16 bytes a warp of the row
STEP = UNITS * 16
OWN_BLOCK = 0
# meets all warps of a row that is one block's
ROW_TOLD = 7
STORE_OWN = "st.shared.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
LOAD_OWN = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];"


@cute.jit
def kinds_of_saved(SAVED: cutlass.Constexpr):
    """Packets of three in which a warp tells two sums a saved block."""
    return -(-2 * SAVED // 3)


@cute.jit
def meet(thread: Int32, SAVED: cutlass.Constexpr):
    """Shared memory for a row's sums, and two barriers that count the bytes that come: of the saved blocks; of the rest.

    Before anyone writes there its peers have begun: the cluster is entered here, and waited for before the first
    sum is told.
    """
    sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(KINDS * STEP // 4), byte_alignment=16).iterator
    bars = SmemAllocator().allocate_tensor(Int64, cute.make_layout(2), byte_alignment=8).iterator
    if thread == 0:
        arch.mbarrier_init(bars, 1)
        arch.mbarrier_init(bars + 1, 1)
        arch.mbarrier_arrive_and_expect_tx(bars, STEP * kinds_of_saved(SAVED))
        arch.mbarrier_arrive_and_expect_tx(bars + 1, STEP * (2 if SAVED > 0 else 1))
    arch.mbarrier_init_fence()
    arch.cluster_arrive_relaxed()
    return [sums, bars]


@cute.jit
def row_of_block(thread: Int32, THREADS: cutlass.Constexpr, WARPS: cutlass.Constexpr):
    """Shared memory for the sums of a row that ``WARPS`` warps of one block have, zero where no warp tells any; all
    ``THREADS`` of the block call this, and a block barrier comes before the first :func:`tell`.
    """
    sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(KINDS * STEP // 4), byte_alignment=16)
    for word in cutlass.range_constexpr(-(-KINDS * STEP // 4 // THREADS)):
        if word * THREADS + thread < KINDS * STEP // 4:
            sums[word * THREADS + thread] = Int32(0)
    return [sums.iterator, Int32(32 * WARPS)]


@cute.jit
def tell(
    row_at: list, kind: Int32, unit: Int32, words: list, epoch: Uint32, LATER: cutlass.Constexpr, CLUSTER: cutlass.Constexpr
):  # fmt: skip
    """Three words of a warp, as packet ``kind`` of the row: to all warps of the row.

    ``row_at``: address of the row's packets in memory, or what :func:`meet` or :func:`row_of_block` returned; ``LATER``: which
    barrier of a cluster counts them.
    """
    if cutlass.const_expr(CLUSTER == OWN_BLOCK):
        at = row_at[0].toint() + (kind * STEP + unit * 16)
        arch.inline_ptx(STORE_OWN, read_only_args=[at, *words, epoch])
    elif cutlass.const_expr(CLUSTER > 1):
        sums, bars = row_at
        place = (sums + (kind * STEP + unit * 16) // 4).align(16)
        whole = tuple(Int32(word) for word in [*words, epoch])
        for block in cutlass.range_constexpr(CLUSTER):
            arch.store_async_dsmem(place, whole, bars + LATER, block)
    else:
        publish(row_at[0] + (kind * STEP + unit * 16), [*words, epoch], "gpu")


@cute.jit
def hear(
    row_at: list, FIRST: cutlass.Constexpr, COUNT: cutlass.Constexpr, lane: Int32, epoch: Uint32, health: Int64, block: Int32,
    BACKOFF: cutlass.Constexpr, CLUSTER: cutlass.Constexpr, live: Int32 | None = None,
):  # fmt: skip
    """Words of ``COUNT`` kinds of packets of warp ``lane`` of the row, four each.

    The barriers of a cluster have no limit of their own: every warp tells its sums, since all its other waits end.
    """
    if cutlass.const_expr(CLUSTER != 1):
        sums = row_at[0]
        if cutlass.const_expr(CLUSTER == OWN_BLOCK):
            number = row_at[2] if cutlass.const_expr(len(row_at) > 2) else ROW_TOLD
            arch.barrier(barrier_id=number, number_of_threads=row_at[1])
        else:
            told = row_at[1] + (1 if FIRST > 0 else 0)
            if cutlass.const_expr(live is None):
                arch.mbarrier_wait(told, 0)
            else:
                if live != Int32(0):
                    arch.mbarrier_wait(told, 0)
        words = []
        for kind in cutlass.range_constexpr(COUNT):
            at = sums.toint() + ((FIRST + kind) * STEP + lane * 16)
            words += read(LOAD_OWN, Int64(at), 4, [])
    else:
        at = row_at[0] + (FIRST * STEP + lane * 16)
        if cutlass.const_expr(BACKOFF > 0):
            # all tell at the same time: who asks at once asks in vain, and knows it a whole trip later
            arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(BACKOFF)])
        words, _ = poll([at], COUNT, STEP, "gpu", "scalars", epoch, health, ROW, 0, block, BACKOFF, True, live, True)
    return words
