"""CuTe DSL kernels: output projection and all-reduce in two launches, for more rows than one block has warps for."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_mix import mix_of_saved
from ..cute_row import meet
from ..cute_stages import stage
from ..cute_waits import count_launch, epoch_of, pause, release
from .cute_mix import UNITS, finish, own_columns, ranks_at_once, take_unit, weights_of
from .cute_product import COLUMNS, ROW_WORDS, partial
from .cute_slices import SLICES, ask_slices, unit_of


@cute.kernel
def k3_output_projection_cute_split_producer(
    x: cute.Tensor, w: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SHARD: cutlass.Constexpr, CHUNKS: cutlass.Constexpr, DEPTH: cutlass.Constexpr, X_DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Block b makes and publishes columns 56 b onwards of this rank's partial. It waits for no packet."""
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    warp = arch.make_warp_uniform(arch.warp_idx())
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS * ROWS * ROW_WORDS), byte_alignment=16)
    counter = epochs.iterator.toint()
    epoch = partial(
        x.iterator.toint(), w.iterator.toint(), sums, targets.iterator.toint(), counter, health.iterator.toint(), rows, block,
        warp, t % 32, ROWS, WIDTH, HIDDEN, TP, SHARD, CHUNKS, DEPTH, X_DEPTH, WARPS, FORM, STORES, 0, RELEASE, JITTER,
    )  # fmt: skip
    # all warps have read the counter: they have met since
    if t == 0:
        count_launch(counter, block, epoch)


@cute.kernel
def k3_output_projection_cute_split_consumer(
    prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor, norm_w: cute.Tensor,
    prefix_out: cute.Tensor, mlp_input: cute.Tensor, mailbox: cute.Tensor, totals: cute.Tensor, totals_targets: cute.Tensor,
    scalars: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, saved: Int32,
    ROWS: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr, SHARD: cutlass.Constexpr,
    SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr, MIXERS: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    FORM: cutlass.Constexpr, CLUSTER: cutlass.Constexpr, WAIT: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Warp m of block b takes unit ``b MIXERS + m`` (row, 224 columns) to the end.

    Two-shot (``SHARD`` packets of a row are a rank's own): warp m of block b first sums 32 packets of this rank's
    columns, the ``m blocks + b``-th of them, and sends the sums to all ranks.
    The packets say themselves when they are there. ``WAIT`` exit: the dependency wait only keeps this launch from
    ending before the producer's, and the activations are read before it. That is right because the producer releases
    after its own wait: what came before it had ended when this began, its results in memory. The blocks of a row
    wait for each other: all must be on the GPU together. With ``CLUSTER`` blocks they are a cluster, and tell each
    other the row's sums in shared memory.
    """
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    warp = arch.make_warp_uniform(arch.warp_idx())
    lane = t % 32
    number = block * MIXERS + warp
    prefixes, saved_at = prefix.iterator.toint(), blocks.iterator.toint()
    row, first, slice_bytes = block // CLUSTER, block % CLUSTER * MIXERS, 448 * MIXERS
    shared: list = []
    weights: list = []
    if cutlass.const_expr(CLUSTER > 1):
        slices = (
            SmemAllocator().allocate_tensor(Uint8, cute.make_layout(SLICES * slice_bytes), byte_alignment=128).iterator
        )
        here = SmemAllocator().allocate_tensor(Int64, cute.make_layout(2), byte_alignment=16).iterator
        # ahead of all else, so that they come while the packets are on their way
        if t == 0:
            ask_slices(
                [one.iterator.toint() for one in (res_norm, res_proj, norm_w)], prefixes, saved_at, row, first * 224, rows, saved,
                Int32(1 if WAIT == "exit" else 0), slices, here, ROWS, HIDDEN, SAVED, RESTART, slice_bytes,
            )  # fmt: skip
        shared = meet(t, SAVED)
    release(JITTER, block * 64 + 16 + warp)
    if cutlass.const_expr(CLUSTER == 1):
        weights = weights_of(
            res_norm.iterator.toint(), res_proj.iterator.toint(), norm_w.iterator.toint(), number % UNITS * 32 + lane, HIDDEN
        )  # fmt: skip
    if cutlass.const_expr(WAIT == "start"):
        arch.griddepcontrol_wait()
    stage(JITTER, "woken")
    # counters of the producer's blocks come first
    counter = epochs.iterator.toint() + HIDDEN // COLUMNS * 4
    epoch = epoch_of(counter, block)
    summed = mailbox
    if cutlass.const_expr(SHARD > 0):
        # the first warps of every block, so that all SMs take part
        own_columns(
            mailbox.iterator.toint(), totals_targets.iterator.toint(), warp * (ROWS * UNITS // MIXERS) + block, lane, epoch,
            health.iterator.toint(), block, ROWS, TP, SHARD, FORM, ranks_at_once(FORM, MIXERS), BACKOFF, JITTER,
        )  # fmt: skip
        summed = totals
    if cutlass.const_expr(CLUSTER > 1):
        arch.cluster_wait()
        if row < rows:
            arch.mbarrier_wait(here, 0)
            old, sources, folded, norm = unit_of(slices, warp * 32 + lane, SAVED, RESTART, slice_bytes)
            mix, total, largest = mix_of_saved(
                sources, saved, folded, shared, first + warp, lane, epoch, health.iterator.toint(), block, HIDDEN, EPS, CLUSTER, JITTER
            )  # fmt: skip
            stage(JITTER, "asked")
            finish(
                summed.iterator.toint(), old, mix, total, largest, folded, norm, shared, first + warp, lane, row, epoch,
                health.iterator.toint(), block, prefix_out.iterator.toint(), mlp_input.iterator.toint(),
                ROWS, HIDDEN, TP, SHARD, SAVED, RESTART, EPS, FORM, ranks_at_once(FORM, MIXERS), BACKOFF, CLUSTER, JITTER,
            )  # fmt: skip
    else:
        tensors = [
            prefixes,
            saved_at,
            *(one.iterator.toint() for one in (prefix_out, mlp_input, summed, scalars, health)),
        ]
        take_unit(
            tensors, weights, number, lane, rows, saved, epoch, block, ROWS, HIDDEN, TP, SHARD, SAVED, RESTART, EPS, FORM,
            ranks_at_once(FORM, MIXERS), BACKOFF, 0, JITTER,
        )  # fmt: skip
    stage(JITTER, "finished")
    pause(JITTER, epoch, block * 64 + 36)
    if cutlass.const_expr(WAIT == "exit"):
        arch.griddepcontrol_wait()
    arch.sync_threads()
    if t == 0:
        count_launch(counter, block, epoch)


k3_output_projection_cute_split_producer.set_name_prefix(
    "k3_output_projection_cute_split_producer", remove_cutlass_symbol=True, keep_mangled_name=False
)
k3_output_projection_cute_split_consumer.set_name_prefix(
    "k3_output_projection_cute_split_consumer", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch_producer(
    x: cute.Tensor, w: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SHARD: cutlass.Constexpr, CHUNKS: cutlass.Constexpr, DEPTH: cutlass.Constexpr, X_DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block for 56 columns."""
    k3_output_projection_cute_split_producer(
        x, w, targets, epochs, health, rows, ROWS, WIDTH, HIDDEN, TP, SHARD, CHUNKS, DEPTH, X_DEPTH, WARPS, FORM, STORES,
        RELEASE, JITTER,
    ).launch(grid=[HIDDEN // COLUMNS, 1, 1], block=[32 * WARPS, 1, 1], stream=stream)  # fmt: skip


@cute.jit
def launch_consumer(
    prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor, norm_w: cute.Tensor,
    prefix_out: cute.Tensor, mlp_input: cute.Tensor, mailbox: cute.Tensor, totals: cute.Tensor, totals_targets: cute.Tensor,
    scalars: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, saved: Int32,
    ROWS: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr, SHARD: cutlass.Constexpr,
    SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr, MIXERS: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    FORM: cutlass.Constexpr, CLUSTER: cutlass.Constexpr, WAIT: cutlass.Constexpr, JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: ``MIXERS`` units a block."""
    k3_output_projection_cute_split_consumer(
        prefix, blocks, res_norm, res_proj, norm_w, prefix_out, mlp_input, mailbox, totals, totals_targets, scalars, epochs, health, rows, saved, ROWS, HIDDEN,
        TP, SHARD, SAVED, RESTART, EPS, MIXERS, BACKOFF, FORM, CLUSTER, WAIT, JITTER,
    ).launch(grid=[ROWS * UNITS // MIXERS, 1, 1], block=[32 * MIXERS, 1, 1], cluster=[CLUSTER, 1, 1], stream=stream)  # fmt: skip
