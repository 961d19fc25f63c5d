"""CuTe DSL kernel: output projection, all-reduce, residual, AttnRes and norm in one launch; rows have blocks of their own."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_mix import mix_of_saved
from ..cute_row import meet
from ..cute_stages import stage
from ..cute_tiles import tile_copy
from ..cute_waits import count_launch, epoch_of, pause, release
from .cute_copied import TILE, partial_copied
from .cute_mix import UNITS, finish, ranks_at_once
from .cute_product import COLUMNS, ROW_WORDS
from .cute_slices import SLICES, ask_slices, unit_of

MIXED = 3


@cute.kernel
def k3_output_projection_cute_apart_step(
    x: cute.Tensor, w_load: cute.CopyAtom, w_map: cute.Tensor, prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor,
    norm_w: cute.Tensor, prefix_out: cute.Tensor, mlp_input: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor,
    scalars: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, saved: Int32, early: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr, CLUSTER: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
    REHEARSE: cutlass.Constexpr,
):  # fmt: skip
    """The first ``ROWS`` clusters finish a row each, 32 / ``CLUSTER`` warps a block; block b of the others makes and publishes
    columns 56 b onwards.

    The row's blocks wait for all others: they must be on the GPU together, two an SM. Nothing of their own stands ahead of the
    saved blocks' loads, and they tell each other the row's sums in shared memory.

    ``early``: the residual and the saved blocks are older than the launch before, so mixers take them, and tell each other
    the blocks' sums, ahead of the dependency wait (*Early* in PROTOCOL.md says when a caller may ask for that).
    """
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    counter = epochs.iterator.toint()
    mixers = UNITS // CLUSTER
    threads, slice_bytes = 32 * max(WARPS, mixers), 448 * mixers
    steps = min(DEPTH, WIDTH // (32 * WARPS))
    # an SM's registers are two blocks'
    at_once = ranks_at_once(FORM, 2 * max(WARPS, mixers))
    # a block of the product has its tiles there, one of a row its slices
    brought = max(WARPS * steps * TILE * 2, SLICES * slice_bytes)
    ring = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(brought), byte_alignment=128).iterator
    bars = SmemAllocator().allocate_tensor(Int64, cute.make_layout(WARPS * steps), byte_alignment=16).iterator
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS * ROWS * ROW_WORDS), byte_alignment=16)
    if block >= ROWS * CLUSTER:
        if warp < WARPS:
            epoch = partial_copied(
                x.iterator.toint(), w_load, w_map, ring, bars, sums, targets.iterator.toint(), counter + ROWS * CLUSTER * 4,
                health.iterator.toint(), rows, block - ROWS * CLUSTER, warp, lane,
                ROWS, WIDTH, HIDDEN, TP, DEPTH, WARPS, FORM, STORES, RELEASE, JITTER,
            )  # fmt: skip
            # all warps have read the counter: they have met since
            if t == 0:
                count_launch(counter, block, epoch)
        else:
            arch.griddepcontrol_wait()
    else:
        row, first = block // CLUSTER, block % CLUSTER * mixers
        if cutlass.const_expr(RELEASE == "entry"):
            release(JITTER, block * 64 + 16 + warp)
        if t == 0:
            ask_slices(
                [one.iterator.toint() for one in (res_norm, res_proj, norm_w)], prefix.iterator.toint(), blocks.iterator.toint(),
                row, first * 224, rows, saved, early, ring, bars, ROWS, HIDDEN, SAVED, RESTART, slice_bytes,
            )  # fmt: skip
        shared = meet(t, SAVED)
        finishes = warp < mixers
        if early == Int32(0):
            arch.griddepcontrol_wait()
        stage(JITTER, "woken")
        epoch = epoch_of(counter, block)
        arch.cluster_wait()
        if row < rows:
            unit, packet = first + warp % mixers, warp * 32 + lane
            zeros = [Float32(0.0)] * 7
            mix, folded, norm, old = zeros, zeros, zeros, [Uint32(0)] * 4
            total, largest = Float32(0.0), Float32(0.0)
            if finishes:
                arch.mbarrier_wait(bars, 0)
                old, sources, folded, norm = unit_of(ring, packet, SAVED, RESTART, slice_bytes)
                mix, total, largest = mix_of_saved(
                    sources, saved, folded, shared, unit, lane, epoch, health.iterator.toint(), block, HIDDEN, EPS, CLUSTER, JITTER
                )  # fmt: skip
                stage(JITTER, "asked")
            arch.griddepcontrol_wait()
            if cutlass.const_expr(RELEASE == "loads"):
                release(JITTER, block * 64 + 16 + warp)
            if cutlass.const_expr(REHEARSE) or finishes:
                finish(
                    mailbox.iterator.toint(), old, mix, total, largest, folded, norm, shared, unit, lane, row, epoch,
                    health.iterator.toint(), block, prefix_out.iterator.toint(), mlp_input.iterator.toint(),
                    ROWS, HIDDEN, TP, 0, SAVED, RESTART, EPS, FORM, at_once, BACKOFF, CLUSTER, JITTER,
                    Int32(1) if finishes else Int32(0),
                )  # fmt: skip
        else:
            arch.griddepcontrol_wait()
            if cutlass.const_expr(RELEASE == "loads"):
                release(JITTER, block * 64 + 16 + warp)
        stage(JITTER, "finished")
        pause(JITTER, epoch, block * 64 + 36)
        arch.barrier(barrier_id=MIXED, number_of_threads=threads)
        if t == 0:
            count_launch(counter, block, epoch)


k3_output_projection_cute_apart_step.set_name_prefix(
    "k3_output_projection_cute_apart_step", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor,
    norm_w: cute.Tensor, prefix_out: cute.Tensor, mlp_input: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor,
    scalars: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, saved: Int32, early: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr,
    DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr, CLUSTER: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
    REHEARSE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: a cluster for a row, then one block for 56 columns."""
    w_load, w_map = tile_copy(w, COLUMNS)
    k3_output_projection_cute_apart_step(
        x, w_load, w_map, prefix, blocks, res_norm, res_proj, norm_w, prefix_out, mlp_input, mailbox, targets, scalars, epochs, health,
        rows, saved, early, ROWS, WIDTH, HIDDEN, TP, SAVED, RESTART, EPS, DEPTH, WARPS, CLUSTER, FORM, STORES, BACKOFF, RELEASE, JITTER,
        REHEARSE,
    ).launch(
        grid=[ROWS * CLUSTER + HIDDEN // COLUMNS, 1, 1], block=[32 * max(WARPS, UNITS // CLUSTER), 1, 1], cluster=[CLUSTER, 1, 1],
        stream=stream, min_blocks_per_mp=2, preferred_smem_carveout=10,
    )  # fmt: skip
