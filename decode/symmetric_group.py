"""The collectives over PyTorch's symmetric memory, capturable in a CUDA graph: for what a step does outside tuned kernels.

A rank puts its data into memory that every rank has mapped; a barrier on the device; every rank reads the parts in rank
order; a second barrier, so that nobody's data is overwritten while it is read. Plain and slow beside fused kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import _shard, _sum_in_rank_order

MOST_BYTES = 64 * 163840 * 4
"""Of one rank's part: 64 rows of FP32 logits of the whole vocabulary."""


class SymmetricGroup:
    """A :class:`~k3lab.kernels.collectives.Collectives` of processes whose GPUs map each other's memory, or share one."""

    def __init__(self, device: str, *, most_bytes: int = MOST_BYTES, limit_s: float = 60.0) -> None:
        """Join; every rank calls it. Ranks on one GPU need ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``.

        Args:
            device: this rank's GPU.
            most_bytes: of one rank's part in any collective.
            limit_s: seconds of a wait for the others on the device; then the launch fails.

        Raises:
            InputError: symmetric memory refuses.
        """
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._limit_ms = round(limit_s * 1000)
        group: Any = dist.group.WORLD
        try:
            self._own = symmetric.empty(most_bytes, dtype=torch.uint8, device=torch.device(device))
            self._own.zero_()
            torch.cuda.synchronize(device)
            self._handle = symmetric.rendezvous(self._own, group)
        except RuntimeError as error:
            raise InputError(f"PyTorch's symmetric memory refuses: {str(error).strip().splitlines()[0]}") from error

    def _gathered(self, x: Tensor) -> list[Tensor]:
        mine = x.detach().contiguous()
        if mine.numel() * mine.element_size() > self._own.numel():
            raise InputError(
                f"a part of {mine.numel() * mine.element_size()} bytes exceeds the {self._own.numel()} that ranks share"
            )
        flat = mine.flatten().view(torch.uint8)
        self._own[: flat.numel()].copy_(flat)
        self._handle.barrier(channel=0, timeout_ms=self._limit_ms)
        parts = [self._handle.get_buffer(rank, tuple(mine.shape), mine.dtype, 0).clone() for rank in range(self.size)]
        self._handle.barrier(channel=1, timeout_ms=self._limit_ms)
        return parts

    def meet(self) -> None:
        """A barrier of all ranks on the device, behind what this one has launched; can be captured."""
        self._handle.barrier(channel=0, timeout_ms=self._limit_ms)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in rank order, rounded once."""
        return _sum_in_rank_order(self._gathered(x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x`` side by side."""
        return torch.cat(self._gathered(x), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of the sum."""
        _shard(x, dim, self.rank, self.size)
        return _shard(self.all_reduce(x), dim, self.rank, self.size)
