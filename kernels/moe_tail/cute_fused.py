"""CuTe DSL kernel: the whole tail of an MoE layer in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_stages import stage
from ..cute_tiles import tile_copy
from ..cute_waits import count_launch, pause
from .cute_next import finish_rows
from .cute_up import make_columns
from .layout import TILE


@cute.kernel
def k3_moe_tail_cute_fused_step(
    latent_partial: cute.Tensor, shared_partial: cute.Tensor, latent_norm: cute.Tensor, w_load: cute.CopyAtom, w_map: cute.Tensor,
    prefix: cute.Tensor, blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor, norm_w: cute.Tensor, prefix_out: cute.Tensor,
    next_input: cute.Tensor, latents: cute.Tensor, latents_targets: cute.Tensor, shares: cute.Tensor, shares_targets: cute.Tensor,
    totals: cute.Tensor, totals_targets: cute.Tensor, deltas: cute.Tensor, deltas_targets: cute.Tensor, epochs: cute.Tensor,
    health: cute.Tensor, rows: Int32, saved: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """The first blocks make this rank's columns of all rows and publish them; each of the others finishes a row.

    All blocks wait for each other: they must be on the GPU together.
    """
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    counter = epochs.iterator.toint()
    record = health.iterator.toint()
    # a block is either the one or the other
    memory = SmemAllocator().allocate_array(Int32, T.memory_bytes // 4, byte_alignment=128)
    if block < T.making:
        tensors = [
            one.iterator.toint()
            for one in (
                latent_partial, shared_partial, latent_norm, latents, shares, totals, latents_targets, shares_targets,
                totals_targets, deltas_targets,
            )
        ]  # fmt: skip
        epoch = make_columns(
            [*tensors, counter, record], w_load, w_map, memory, rows, block, t, T, EPS, AT_ONCE, BACKOFF, RELEASE, JITTER
        )  # fmt: skip
        # all warps of the block have read its counter before a barrier that is behind them
        stage(JITTER, "finished")
        pause(JITTER, epoch, block * 64 + 36)
        if t == 0:
            count_launch(counter, block, epoch)
    else:
        tensors = [
            one.iterator.toint()
            for one in (prefix, blocks, res_norm, res_proj, norm_w, prefix_out, next_input, deltas)
        ]  # fmt: skip
        epoch = finish_rows(
            [*tensors, counter, record], memory, rows, saved, block, t, T, EPS, BACKOFF, RELEASE, JITTER
        )
        stage(JITTER, "finished")
        pause(JITTER, epoch, block * 64 + 36)
        if t == 0:
            count_launch(counter, block, epoch)


k3_moe_tail_cute_fused_step.set_name_prefix(
    "k3_moe_tail_cute_fused_step", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    latent_partial: cute.Tensor, shared_partial: cute.Tensor, latent_norm: cute.Tensor, w_up: cute.Tensor, prefix: cute.Tensor,
    blocks: cute.Tensor, res_norm: cute.Tensor, res_proj: cute.Tensor, norm_w: cute.Tensor, prefix_out: cute.Tensor,
    next_input: cute.Tensor, latents: cute.Tensor, latents_targets: cute.Tensor, shares: cute.Tensor, shares_targets: cute.Tensor,
    totals: cute.Tensor, totals_targets: cute.Tensor, deltas: cute.Tensor, deltas_targets: cute.Tensor, epochs: cute.Tensor,
    health: cute.Tensor, rows: Int32, saved: Int32,
    T: cutlass.Constexpr, EPS: cutlass.Constexpr, AT_ONCE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr,
    RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: clusters of ``split`` blocks."""
    w_load, w_map = tile_copy(w_up, TILE)
    k3_moe_tail_cute_fused_step(
        latent_partial, shared_partial, latent_norm, w_load, w_map, prefix, blocks, res_norm, res_proj, norm_w, prefix_out, next_input,
        latents, latents_targets, shares, shares_targets, totals, totals_targets, deltas, deltas_targets, epochs, health, rows,
        saved, T, EPS, AT_ONCE, BACKOFF, RELEASE, JITTER,
    ).launch(grid=[T.blocks, 1, 1], block=[512, 1, 1], cluster=[T.split, 1, 1], stream=stream)  # fmt: skip
