"""A KDA layer's states in a step: copies in and out for operators that take tensors, the pools for kernels that take places."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .caches import DecodeCache


@dataclass(frozen=True)
class KdaSlots:
    """Of the requests of one step."""

    cache: DecodeCache
    layer: int
    slots: Tensor
    """int64 [B]."""
    places: Tensor
    """int32 [B, 1 + q], see :meth:`~k3lab.decode.caches.DecodeCache.kda_places`."""

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        """History [entries, W-1, 3hD/T] and state [entries, h/T, V, K]."""
        return self.cache.kda_pools[self.layer]

    def read(self) -> tuple[Tensor, Tensor]:
        """History [B, W-1, 3hD/T] and state [B, h/T, V, K] after the last accepted token."""
        return self.cache.kda_read(self.layer, self.slots)

    def write(self, convs: Tensor, states: Tensor) -> None:
        """Both after every token of the step, [B, q, ...]."""
        self.cache.kda_write(self.layer, self.slots, convs, states)
