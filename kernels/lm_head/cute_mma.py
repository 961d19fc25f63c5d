"""CuTe DSL kernels of the head: the vocabulary's rows streamed into MMA registers, then logits, or the best token of all ranks."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from ..cute_numbers import rounded
from .cute_best import STORE_WORD, comes_last, conclude, offer
from .cute_stream import pair_of_parts, stream


@cute.kernel
def k3_lm_head_cute_mma_shard(
    h: cute.Tensor, w: cute.Tensor, logits: cute.Tensor, rows: Int32, H: cutlass.Constexpr, RELEASE: cutlass.Constexpr
):
    """logits[rows, vocab] = h[rows, hidden] @ w[vocab, hidden]^T, rounded once to BF16; block b makes columns ``tile b`` on."""
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(H.sum_words), byte_alignment=16)
    warp = arch.make_warp_uniform(arch.warp_idx())
    stream(h.iterator.toint(), w.iterator.toint(), sums, rows, block, warp, t % 32, H, RELEASE)
    for pair in cutlass.range(t, rows * H.columns, H.threads, unroll=1):
        low, high = pair_of_parts(sums, pair, H)
        n = block * H.tile + pair % H.columns * 2
        if n < H.vocab:
            at = logits.iterator.toint() + (pair // H.columns * H.vocab + n) * 2
            arch.inline_ptx(STORE_WORD, read_only_args=[at, rounded(low, high)])


@cute.kernel
def k3_lm_head_cute_mma_argmax(
    h: cute.Tensor, w: cute.Tensor, peers: cute.Tensor, ids: cute.Tensor, best: cute.Tensor, keys: cute.Tensor,
    arrived: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    rank: Int32, H: cutlass.Constexpr, RELEASE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
):  # fmt: skip
    """ids[rows], best[rows]: the likeliest token over all ranks and its logit. The block that comes last speaks for this rank."""
    t, _, _ = arch.thread_idx()
    block, _, _ = arch.block_idx()
    memory = SmemAllocator()
    sums = memory.allocate_tensor(Float32, cute.make_layout(H.sum_words), byte_alignment=16)
    better = memory.allocate_tensor(Int32, cute.make_layout(H.best_words), byte_alignment=16)
    said = memory.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
    warp, lane = arch.make_warp_uniform(arch.warp_idx()), t % 32
    stream(h.iterator.toint(), w.iterator.toint(), sums, rows, block, warp, lane, H, RELEASE)
    offer(sums, better, keys.iterator.toint(), t, rows, block, H)
    if comes_last(arrived.iterator.toint(), said, t, H):
        tensors = [one.iterator.toint() for one in (peers, ids, best, keys, arrived, mailbox, targets, epochs, health)]
        conclude(tensors, rows, rank, t, warp, lane, block, H, BACKOFF, JITTER)


k3_lm_head_cute_mma_shard.set_name_prefix(
    "k3_lm_head_cute_mma_shard", remove_cutlass_symbol=True, keep_mangled_name=False
)
k3_lm_head_cute_mma_argmax.set_name_prefix(
    "k3_lm_head_cute_mma_argmax", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch_shard(
    h: cute.Tensor, w: cute.Tensor, logits: cute.Tensor, rows: Int32, H: cutlass.Constexpr, RELEASE: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block a tile."""
    k3_lm_head_cute_mma_shard(h, w, logits, rows, H, RELEASE).launch(
        grid=[H.tiles, 1, 1], block=[H.threads, 1, 1], stream=stream
    )


@cute.jit
def launch_argmax(
    h: cute.Tensor, w: cute.Tensor, peers: cute.Tensor, ids: cute.Tensor, best: cute.Tensor, keys: cute.Tensor,
    arrived: cute.Tensor, mailbox: cute.Tensor, targets: cute.Tensor, epochs: cute.Tensor, health: cute.Tensor, rows: Int32,
    rank: Int32, H: cutlass.Constexpr, RELEASE: cutlass.Constexpr, BACKOFF: cutlass.Constexpr, JITTER: cutlass.Constexpr,
    stream: cuda.CUstream,
):  # fmt: skip
    """Host side: one block a tile."""
    k3_lm_head_cute_mma_argmax(
        h, w, peers, ids, best, keys, arrived, mailbox, targets, epochs, health, rows, rank, H, RELEASE, BACKOFF, JITTER
    ).launch(grid=[H.tiles, 1, 1], block=[H.threads, 1, 1], stream=stream)
