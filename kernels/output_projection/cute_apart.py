"""CuTe DSL kernel: output projection, all-reduce, residual, AttnRes and norm in one launch; rows have blocks of their own."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_row import meet
from ..cute_stages import stage
from ..cute_waits import count_launch, epoch_of, pause
from .cute_copied import TILE, partial_copied, tile_copy
from .cute_mix import UNITS, ask_unit, ranks_at_once, take_unit, weights_of
from .cute_product import COLUMNS, ROW_WORDS

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
    steps = min(DEPTH, WIDTH // (32 * WARPS))
    ring = (
        SmemAllocator().allocate_tensor(Uint8, cute.make_layout(WARPS * steps * TILE * 2), byte_alignment=128).iterator
    )
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
        number = block * mixers + warp
        packet = number % UNITS * 32 + lane
        tensors = [one.iterator.toint() for one in (prefix, blocks, prefix_out, mlp_input, mailbox, scalars, health)]
        if warp < mixers:
            if early == Int32(0):
                arch.griddepcontrol_wait()
            stage(JITTER, "woken")
            # ahead of all else: what is asked for later comes behind the weights
            asked = ask_unit(tensors[0], tensors[1], number // UNITS, packet, saved, ROWS, HIDDEN, SAVED, RESTART)
            weights = weights_of(
                res_norm.iterator.toint(), res_proj.iterator.toint(), norm_w.iterator.toint(), packet, HIDDEN
            )  # fmt: skip
            epoch = epoch_of(counter, block)
            shared = meet(t, SAVED)
            arch.cluster_wait()
            take_unit(
                tensors, shared, weights, number, lane, rows, saved, epoch, block, ROWS, HIDDEN, TP, 0, SAVED, RESTART, EPS, FORM,
                ranks_at_once(FORM, mixers), BACKOFF, 0, CLUSTER, JITTER, REHEARSE, True, asked,
            )  # fmt: skip
            stage(JITTER, "finished")
            pause(JITTER, epoch, block * 64 + 36)
            arch.barrier(barrier_id=MIXED, number_of_threads=32 * mixers)
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
    w_load, w_map = tile_copy(w)
    k3_output_projection_cute_apart_step(
        x, w_load, w_map, prefix, blocks, res_norm, res_proj, norm_w, prefix_out, mlp_input, mailbox, targets, scalars, epochs, health,
        rows, saved, early, ROWS, WIDTH, HIDDEN, TP, SAVED, RESTART, EPS, DEPTH, WARPS, CLUSTER, FORM, STORES, BACKOFF, RELEASE, JITTER,
        REHEARSE,
    ).launch(
        grid=[ROWS * CLUSTER + HIDDEN // COLUMNS, 1, 1], block=[32 * max(WARPS, UNITS // CLUSTER), 1, 1], cluster=[CLUSTER, 1, 1],
        stream=stream, min_blocks_per_mp=2, preferred_smem_carveout=10,
    )  # fmt: skip
