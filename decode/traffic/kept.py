"""Contexts between turns, in host memory: what the target keeps of them and, with drafts, what the drafter does."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..saved import SavedRequest


@dataclass(frozen=True)
class Context:
    """A request as it can be put back."""

    saved: SavedRequest
    drafter: tuple[Tensor, ...] = ()
    """Rows of the drafter, [length, row] a layer; none without drafts."""

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        parts = [one for pair in self.saved.kda.values() for one in pair]
        return sum(one.nbytes for one in (*parts, *(self.saved.rows or {}).values(), *self.drafter))

    def to(self, device: torch.device) -> Context:
        """A copy there."""
        kda = {layer: (conv.to(device), state.to(device)) for layer, (conv, state) in self.saved.kda.items()}
        rows = self.saved.rows
        moved = {layer: own.to(device) for layer, own in rows.items()} if rows is not None else None
        return Context(replace(self.saved, kda=kda, rows=moved), tuple(own.to(device) for own in self.drafter))


class Kept:
    """Contexts in host memory; the one that was used longest ago goes first.

    Args:
        limit: bytes; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes, self._all = limit, 0, OrderedDict[str, tuple[Context, int]]()
        self.evicted = 0

    def put(self, name: str, context: Context) -> None:
        """Keep a copy in host memory, as far as there is room."""
        size = context.bytes
        self.drop(name)
        if size > self._limit:
            self.evicted += self._limit > 0
            return
        while self._bytes + size > self._limit:
            _, (_, freed) = self._all.popitem(last=False)
            self._bytes -= freed
            self.evicted += 1
        self._all[name] = (context.to(torch.device("cpu")), size)
        self._bytes += size

    def get(self, name: str) -> Context | None:
        """What was kept."""
        if name not in self._all:
            return None
        self._all.move_to_end(name)
        return self._all[name][0]

    def drop(self, name: str) -> None:
        """Forget it."""
        if name in self._all:
            self._bytes -= self._all.pop(name)[1]
