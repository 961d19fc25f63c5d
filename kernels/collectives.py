"""The three collectives the twins use, and groups of ranks that need no second process.

Sums run in rank order, in FP32 (FP64 for FP64), and are rounded once: every rank gets the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .errors import InputError
from .numerics import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Collectives(Protocol):
    """A tensor-parallel group as seen by one rank."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks in rank order, rounded once to ``x.dtype``; the same bits on every rank."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x`` side by side along ``dim``, in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard, along ``dim``, of the sum over ranks."""
        ...


class CollectiveError(RuntimeError):
    """A rank was late, left early, failed, or called something else; the message names it."""


def _shard(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if x.shape[dim] % size:
        raise InputError(f"dimension {dim} of size {x.shape[dim]} does not split over {size} ranks")
    width = x.shape[dim] // size
    return x.narrow(dim, rank * width, width)


def _sum_in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].to(compute_dtype(parts[0]))
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts[0].dtype)


@dataclass(frozen=True)
class SingleRank:
    """A group of one: every collective returns its input."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x``."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """``x``."""
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """``x``."""
        return x


@dataclass(frozen=True)
class StandIn:
    """One rank of a larger group, alone: shapes are right, values are not.

    For timing and demonstrations on one device only. The sum over ranks is this rank's own part, and a
    gather repeats this rank's shard in place of the others'.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InputError(f"rank {self.rank} is not one of a group of {self.size}; ranks are 0..{self.size - 1}")

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x``: the other ranks' parts are missing."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """``x`` repeated ``size`` times along ``dim``."""
        import torch

        return torch.cat([x] * self.size, dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of its own ``x``."""
        return _shard(x, dim, self.rank, self.size)


@dataclass(frozen=True)
class LoopbackGroup:
    """What kernels over the loopback transport compute: one rank plays all, rank r with ``factors[r]`` times its data.

    Factors are powers of two, or zero, so that no product is rounded. What goes from one rank to another comes back to
    this one: slot r of a reduce-scatter is what this rank sends to rank r, its columns r, times ``factors[r]``, and
    a gather repeats this rank's shard, times the factors too.
    """

    factors: tuple[float, ...]
    rank: int = 0

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.factors)

    def all_reduce(self, x: Tensor) -> Tensor:
        """``sum of factors[r] x`` in rank order, rounded once."""
        return _sum_in_rank_order([x * factor for factor in self.factors])

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """``factors[r] x`` side by side."""
        import torch

        return torch.cat([x * factor for factor in self.factors], dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """``sum of factors[r] x[columns r]`` in rank order, rounded once."""
        return _sum_in_rank_order([_shard(x, dim, rank, self.size) * f for rank, f in enumerate(self.factors)])


@dataclass(frozen=True)
class TwoShot:
    """A group whose all-reduce is a reduce-scatter of the columns and a gather of the sums.

    In a real group that gives the bits of the one-shot sum; over loopback columns of all ranks are added up, and the
    gather shows the sums everywhere.
    """

    group: Collectives

    @property
    def rank(self) -> int:
        """Of the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Of the group."""
        return self.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Column owners sum, then broadcast; two collectives of the group."""
        return self.group.all_gather(self.group.reduce_scatter(x, -1), -1)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Of the group."""
        return self.group.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Of the group."""
        return self.group.reduce_scatter(x, dim)


@dataclass
class _Exchange:
    """Where the virtual ranks of one group meet."""

    size: int
    deadline: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    posted: dict[int, dict[int, tuple[str, Any]]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    failed: list[tuple[int, BaseException]] = field(default_factory=list)

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            if error is not None:
                self.failed.append((rank, error))
            self.finished.add(rank)
            self.changed.notify_all()

    def give_up(self) -> None:
        """Every rank fails in its next collective, or in the one after it."""
        with self.changed:
            self.deadline = 0.0
            self.changed.notify_all()

    def swap(self, rank: int, call: int, what: str, value: Any) -> list[Any]:
        """Post a value for collective number ``call`` and return every rank's."""
        with self.changed:
            here = self.posted.setdefault(call, {})
            here[rank] = (what, value)
            self.changed.notify_all()
            self.waiting.add(rank)
            while len(here) < self.size:
                absent = sorted(set(range(self.size)) - set(here))
                if self.failed:
                    bad, error = self.failed[0]
                    raise CollectiveError(f"rank {rank} waits in {what} (call {call}), but rank {bad} failed: {error}")
                if gone := sorted(self.finished & set(absent)):
                    raise CollectiveError(
                        f"rank {gone[0]} returned before {what} (call {call}), where rank {rank} waits"
                    )
                left = self.deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(map(str, absent))
                    raise CollectiveError(f"rank {late} did not reach {what} (call {call}) in time; rank {rank} waited")
                self.changed.wait(left)
            self.waiting.discard(rank)
            for peer in range(self.size):
                if here[peer][0] != what:
                    raise CollectiveError(f"call {call}: rank {rank} is in {what}, rank {peer} in {here[peer][0]}")
            values = [here[peer][1] for peer in range(self.size)]
            self.taken[call] = self.taken.get(call, 0) + 1
            if self.taken[call] == self.size:
                del self.posted[call], self.taken[call]
            return values


class _VirtualRank:
    """One thread's view of a group of threads."""

    def __init__(self, rank: int, exchange: _Exchange) -> None:
        self.rank = rank
        self.size = exchange.size
        self._exchange = exchange
        self._calls = 0

    def _swap(self, name: str, x: Tensor, dim: int | None = None) -> list[Tensor]:
        call, self._calls = self._calls, self._calls + 1
        along = "" if dim is None else f" along dim {dim}"
        what = f"{name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{along}"
        # a copy: the caller may change x as soon as this returns, before a slower rank has read it
        return self._exchange.swap(self.rank, call, what, x.detach().clone())

    def all_reduce(self, x: Tensor) -> Tensor:
        return _sum_in_rank_order(self._swap("all_reduce", x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        import torch

        return torch.cat(self._swap("all_gather", x, dim), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        _shard(x, dim, self.rank, self.size)  # refuse before the others are kept waiting
        return _shard(_sum_in_rank_order(self._swap("reduce_scatter", x, dim)), dim, self.rank, self.size)


INTERRUPTED_S = 5.0
"""How long an interrupted run waits for its ranks to end."""


def run_virtual_ranks(size: int, fn: Callable[[Collectives], T], timeout_s: float = 60.0) -> list[T]:
    """Run ``fn`` once a rank, in ``size`` threads of this process, and return the results by rank.

    Args:
        size: Ranks in the group.
        fn: Called with the rank's :class:`Collectives`; must call the same collectives in the same
            order on every rank.
        timeout_s: Seconds for the whole run; every wait ends by then.

    Raises:
        CollectiveError: a rank was late, returned early, or called another collective; names it.
        Exception: what the first failing rank raised, with a note that names the rank.
    """
    if size < 1:
        raise InputError(f"a group has at least one rank, got {size}")
    exchange = _Exchange(size, time.monotonic() + timeout_s)
    results: dict[int, T] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(_VirtualRank(rank, exchange))
        except BaseException as error:
            exchange.end(rank, error)
        else:
            exchange.end(rank, None)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        with exchange.changed:
            while len(exchange.finished) < size and not exchange.failed:
                left = exchange.deadline - time.monotonic()
                if left <= 0 or not exchange.changed.wait(left):
                    break
    except KeyboardInterrupt:  # a thread that is in PyTorch while the interpreter is taken down aborts the process
        exchange.give_up()
        end = time.monotonic() + INTERRUPTED_S
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, end - time.monotonic()))
        raise
    with exchange.changed:
        failed = exchange.failed[:1]
        unfinished = set(range(size)) - exchange.finished
        # a rank that waits is late for another's sake, unless it was just woken
        late = sorted(unfinished - exchange.waiting or unfinished)
    if failed:
        rank, error = failed[0]
        error.add_note(f"raised on virtual rank {rank} of {size}")
        raise error
    if len(exchange.finished) < size:
        raise CollectiveError(f"rank {', '.join(map(str, late))} did not finish within {timeout_s:g} s")
    return [results[rank] for rank in range(size)]
