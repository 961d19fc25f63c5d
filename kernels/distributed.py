"""The collectives over torch.distributed: one real process a rank, every wait bounded, the late rank named.

Before a collective each rank says in the group's store that it has come, and waits there for the others: so the
error knows who was late, which the transports of torch.distributed do not say. For tests and references; the decode
path's kernels have exchanges of their own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .collectives import CollectiveError, _shard, _sum_in_rank_order
from .errors import InputError
from .numerics import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

PAUSE_S = 0.001
"""Between two looks at the store."""


class TorchGroup:
    """A :class:`~k3lab.kernels.collectives.Collectives` over a process group of torch.distributed.

    ``all_reduce`` gathers and adds in rank order, so that it has the bits of the other groups; with ``plain`` it is
    ``torch.distributed.all_reduce`` in the compute dtype, which has an order of its own. After a collective
    that failed half-way the process group is of no use any more.
    """

    def __init__(
        self, store: Store, group: ProcessGroup | None = None, *, plain: bool = False, limit_s: float = 60.0
    ) -> None:
        """Join.

        Args:
            store: what the ranks find each other by; a ``PrefixStore`` of its own for each group.
            group: the process group, or None for the default one.
            plain: see the class.
            limit_s: seconds that ranks wait for each other before a collective, and in it; where one failed half-way
                it takes up to two more to learn whose fault it was.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InputError("torch.distributed.init_process_group comes first")
        if limit_s <= 0:
            raise InputError(f"a collective needs a limit above zero, got {limit_s:g} s")
        self._store, self._group, self._limit = store, group, limit_s
        self.plain = plain
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """See the class; rounded once to ``x.dtype``."""
        if not self.plain:
            return _sum_in_rank_order(self._gathered(x, "all_reduce"))
        import torch.distributed as dist

        total = x.detach().to(compute_dtype(x), copy=True).contiguous()
        self._together("all_reduce", x, lambda: dist.all_reduce(total, group=self._group, async_op=True))
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x`` side by side."""
        import torch

        return torch.cat(self._gathered(x, f"all_gather along dim {dim}"), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of the sum."""
        _shard(x, dim, self.rank, self.size)  # refuse before the others are kept waiting
        return _shard(self.all_reduce(x), dim, self.rank, self.size)

    def _gathered(self, x: Tensor, name: str) -> list[Tensor]:
        import torch
        import torch.distributed as dist

        mine = x.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._together(name, x, lambda: dist.all_gather(parts, mine, group=self._group, async_op=True))
        return parts

    def _together(self, name: str, x: Tensor, collective: Callable[[], Any]) -> None:
        """Run a collective that every rank has come to, or raise CollectiveError."""
        call, self._calls = self._calls, self._calls + 1
        what = f"{name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        self._say(2 * call, what)
        if late := self._missing(2 * call, what):
            raise CollectiveError(f"rank {late} did not reach call {call}, {what}, within {self._limit:g} s")
        try:
            collective().wait(timedelta(seconds=self._limit))
        except RuntimeError as error:  # a rank died or hung inside: who does not come out is at fault
            self._say(2 * call + 1, "")
            # who noticed at once waits for those that notice by the limit
            late = self._missing(2 * call + 1, limits=2)
            culprit = f"rank {late} did not come out" if late else "all ranks came out"
            raise CollectiveError(f"call {call}: {what} failed, {culprit} ({str(error).splitlines()[0]})") from error
        self._say(2 * call + 1, "")

    def _say(self, place: int, what: str) -> None:
        """Tell the others: place 2 c is before call c, 2 c + 1 behind it."""
        try:
            self._store.set(f"rank-{self.rank}", f"{place} {what}")
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.rank} lost the store, and with it whoever serves it") from error

    def _missing(self, place: int, what: str | None = None, limits: int = 1) -> str:
        """Wait for every rank to come to the place, so many limits at most; the ranks that did not.

        Raises:
            CollectiveError: a rank is there with something other than ``what``.
        """
        deadline = time.monotonic() + limits * self._limit
        late = set(range(self.size)) - {self.rank}
        while True:
            for rank in sorted(late):
                at, said = self._heard(rank)
                if what is not None and at == place and said != what:
                    raise CollectiveError(f"call {place // 2}: rank {self.rank} is in {what}, rank {rank} in {said}")
                if at >= place:
                    late.discard(rank)
            if not late or time.monotonic() > deadline:
                return ", ".join(map(str, sorted(late)))
            time.sleep(PAUSE_S)

    def _heard(self, rank: int) -> tuple[int, str]:
        """(place, what) a rank said last; (-1, "") before its first."""
        try:
            if not self._store.check([f"rank-{rank}"]):
                return -1, ""
            place, _, what = self._store.get(f"rank-{rank}").decode().partition(" ")
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.rank} lost the store, and with it whoever serves it") from error
        return int(place), what
