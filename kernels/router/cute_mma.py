"""CuTe DSL kernels of the router: the front alone, and the choice alone."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_stages import stage
from ..cute_waits import count_launch
from .cute_front import front
from .cute_route import route


@cute.kernel
def k3_router_cute_mma_front(
    x: cute.Tensor, w_router: cute.Tensor, w_down: cute.Tensor, peers: cute.Tensor, logits: cute.Tensor, latent: cute.Tensor,
    targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    F: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Every block a part of K of a tile of weight rows; this rank's shard is published, and kept in plain tensors too."""
    stage(JITTER, "begin")
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    tensors = [one.iterator.toint() for one in (x, w_router, w_down, peers, logits, latent, targets, epochs, health)]
    memory = SmemAllocator().allocate_array(Int32, F.shared_bytes // 4, byte_alignment=16)
    epoch = front(tensors, rows, block, memory, F, True, RELEASE, JITTER)
    if t == 0:  # all warps have read the counter: they have met since
        count_launch(epochs.iterator.toint(), block, epoch)


@cute.kernel
def k3_router_cute_mma_choice(
    logits: cute.Tensor, bias: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor,
    nans: cute.Tensor, rows: Int32,
    C: cutlass.Constexpr, SCALING: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """Experts and weights of each row of plain logits."""
    stage(JITTER, "begin")
    block, _, _ = arch.block_idx()
    at = [one.iterator.toint() for one in (logits, bias, logits, ids, weights, nans, nans, nans)]
    memory = SmemAllocator().allocate_array(Int32, C.shared_bytes // 4, byte_alignment=16)
    route(at, rows, block, block, memory, SCALING, C, False, 0, RELEASE, JITTER)
    stage(JITTER, "finished")


k3_router_cute_mma_front.set_name_prefix(
    "k3_router_cute_mma_front", remove_cutlass_symbol=True, keep_mangled_name=False
)
k3_router_cute_mma_choice.set_name_prefix(
    "k3_router_cute_mma_choice", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch_front(
    x: cute.Tensor, w_router: cute.Tensor, w_down: cute.Tensor, peers: cute.Tensor, logits: cute.Tensor, latent: cute.Tensor,
    targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    F: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one cluster a tile."""
    k3_router_cute_mma_front(
        x, w_router, w_down, peers, logits, latent, targets, epochs, health, rows, F, RELEASE, JITTER
    ).launch(grid=[F.blocks, 1, 1], block=[F.threads, 1, 1], cluster=[F.split, 1, 1], stream=stream)


@cute.jit
def launch_choice(
    logits: cute.Tensor, bias: cute.Tensor, ids: cute.Tensor, weights: cute.Tensor,
    nans: cute.Tensor, rows: Int32,
    C: cutlass.Constexpr, SCALING: cutlass.Constexpr, RELEASE: cutlass.Constexpr, JITTER: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """Host side: some rows a block."""
    k3_router_cute_mma_choice(logits, bias, ids, weights, nans, rows, C, SCALING, RELEASE, JITTER).launch(
        grid=[C.blocks, 1, 1], block=[32 * C.warps, 1, 1], stream=stream
    )
