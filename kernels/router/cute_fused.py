"""CuTe DSL kernel: the router's whole step in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_stages import stage
from ..cute_waits import count_launch
from .cute_front import front
from .cute_route import copy, route


@cute.kernel
def k3_router_cute_fused_step(
    x: cute.Tensor, w_router: cute.Tensor, w_down: cute.Tensor, peers: cute.Tensor, bias: cute.Tensor, logits: cute.Tensor,
    latent: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor, nans: cute.Tensor,
    mailbox: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    F: cutlass.Constexpr, C: cutlass.Constexpr, SCALING: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    JITTER: cutlass.Constexpr,
):  # fmt: skip
    """First the clusters that choose, then those that copy latents, then those that make and publish this rank's shard.

    The first two poll what all ranks, this one too, publish: all blocks must be on the GPU together. They come first because
    where a predecessor still has its SMs the last blocks of a grid start when it has left.
    """
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    counter, record, box = epochs.iterator.toint(), health.iterator.toint(), mailbox.iterator.toint()
    memory = SmemAllocator().allocate_array(Int32, max(F.shared_bytes, C.shared_bytes) // 4, byte_alignment=16)
    epoch = Uint32(0)
    if block < C.blocks:
        at = [one.iterator.toint() for one in (mailbox, bias, logits, ids, weights, nans, epochs, health)]
        epoch = route(at, rows, block, block, memory, SCALING, C, True, BACKOFF, RELEASE, JITTER)
    elif block < 2 * C.blocks:
        epoch = copy(
            box, latent.iterator.toint(), counter, record, rows, block, block - C.blocks, C, BACKOFF, RELEASE, JITTER
        )
    else:
        own = 2 * C.blocks
        at = [one.iterator.toint() for one in (x, w_router, w_down, peers, logits, latent, targets)]
        epoch = front([*at, counter + own * 4, record], rows, block - own, memory, F, False, RELEASE, JITTER)
    stage(JITTER, "finished")
    if t == 0:  # all warps of the block have read the counter: they have met since
        count_launch(counter, block, epoch)


k3_router_cute_fused_step.set_name_prefix(
    "k3_router_cute_fused_step", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    x: cute.Tensor, w_router: cute.Tensor, w_down: cute.Tensor, peers: cute.Tensor, bias: cute.Tensor, logits: cute.Tensor,
    latent: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor, nans: cute.Tensor,
    mailbox: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    F: cutlass.Constexpr, C: cutlass.Constexpr, SCALING: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: clusters that choose and copy, and one a tile."""
    k3_router_cute_fused_step(
        x, w_router, w_down, peers, bias, logits, latent, ids, weights, nans, mailbox, targets, epochs, health,
        rows, F, C, SCALING, BACKOFF, RELEASE, JITTER,
    ).launch(grid=[F.blocks + 2 * C.blocks, 1, 1], block=[F.threads, 1, 1], cluster=[F.split, 1, 1], stream=stream)  # fmt: skip
