"""CuTe DSL kernel: output projection, all-reduce, residual, AttnRes and norm in one launch, for few rows."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_stages import stage
from ..cute_waits import count_launch, epoch_of, pause
from .cute_mix import UNITS, ranks_at_once, take_unit, weights_of
from .cute_product import ROW_WORDS, partial


@cute.kernel
def k3_output_projection_cute_fused_step(
    x: cute.Tensor, w: cute.Tensor, prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor,
    norm_w: cute.Tensor, prefix_out: cute.Tensor, mlp_input: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor,
    scalars: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, saved: Int32, early: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr,
    CHUNKS: cutlass.Constexpr, DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr, MIXERS: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
    REHEARSE: cutlass.Constexpr,
):  # fmt: skip
    """Block b: the first ``WARPS`` warps make and publish columns 56 b onwards; warp m of the ``MIXERS`` others
    takes unit ``b MIXERS + m`` (row, 224 columns) to the end.

    All blocks wait for each other: they must be on the GPU together. A mixer begins to poll when its own block's
    products are done, so that polls do not stand in the way of the weights.

    ``early``: the residual and the saved blocks are older than the launch before, so mixers take them, and tell each other
    the blocks' sums, ahead of the dependency wait (*Early* in PROTOCOL.md says when a caller may ask for that).
    """
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    lane = t % 32
    warp = arch.make_warp_uniform(arch.warp_idx())
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS * ROWS * ROW_WORDS), byte_alignment=16)
    counter = epochs.iterator.toint()
    if warp < WARPS:
        partial(
            x.iterator.toint(), w.iterator.toint(), sums, targets.iterator.toint(), counter, health.iterator.toint(), rows,
            block, warp, lane,
            ROWS, WIDTH, HIDDEN, TP, 0, CHUNKS, DEPTH, DEPTH, WARPS, FORM, STORES, MIXERS, RELEASE, JITTER,
        )  # fmt: skip
    else:
        number = block * MIXERS + warp - WARPS
        weights = weights_of(
            res_norm.iterator.toint(), res_proj.iterator.toint(), norm_w.iterator.toint(), number % UNITS * 32 + lane, HIDDEN
        )  # fmt: skip
        if early == Int32(0):
            arch.griddepcontrol_wait()
        stage(JITTER, "woken")
        epoch = epoch_of(counter, block)
        tensors = [one.iterator.toint() for one in (prefix, blocks, prefix_out, mlp_input, mailbox, scalars, health)]
        take_unit(
            tensors, weights, number, lane, rows, saved, epoch, block, ROWS, HIDDEN, TP, 0, SAVED, RESTART, EPS, FORM,
            ranks_at_once(FORM, WARPS + MIXERS), BACKOFF, 32 * (WARPS + MIXERS), JITTER, REHEARSE,
        )  # fmt: skip
        # every warp of the block has read its counter before the barrier above; the next launch does after its wait
        stage(JITTER, "finished")
        pause(JITTER, epoch, block * 64 + 36)
        if warp == WARPS and lane == 0:
            count_launch(counter, block, epoch)


k3_output_projection_cute_fused_step.set_name_prefix(
    "k3_output_projection_cute_fused_step", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w: cute.Tensor, prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor,
    norm_w: cute.Tensor, prefix_out: cute.Tensor, mlp_input: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor,
    scalars: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32, saved: Int32, early: Int32,
    ROWS: cutlass.Constexpr, WIDTH: cutlass.Constexpr, HIDDEN: cutlass.Constexpr, TP: cutlass.Constexpr,
    SAVED: cutlass.Constexpr, RESTART: cutlass.Constexpr, EPS: cutlass.Constexpr,
    CHUNKS: cutlass.Constexpr, DEPTH: cutlass.Constexpr, WARPS: cutlass.Constexpr, MIXERS: cutlass.Constexpr,
    FORM: cutlass.Constexpr, STORES: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
    REHEARSE: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block for 56 columns."""
    k3_output_projection_cute_fused_step(
        x, w, prefix, blocks, res_norm, res_proj, norm_w, prefix_out, mlp_input, mailbox, targets, scalars, epochs, health,
        rows, saved, early, ROWS, WIDTH, HIDDEN, TP, SAVED, RESTART, EPS, CHUNKS, DEPTH, WARPS, MIXERS, FORM, STORES, BACKOFF, RELEASE, JITTER,
        REHEARSE,
    ).launch(grid=[HIDDEN // 56, 1, 1], block=[32 * (WARPS + MIXERS), 1, 1], stream=stream)  # fmt: skip
