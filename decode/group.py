"""The tensor-parallel group that a run belongs to: one process a rank under torchrun, one rank alone, or one rank in all.

Ranks under torchrun find each other by gloo, which also tells who is late or gone. Between GPUs the kernels publish
through symmetric memory (:mod:`k3lab.kernels.transports`), and what no kernel does goes through it too
(:mod:`k3lab.decode.symmetric_group`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..kernels import InputError
from ..kernels.collectives import CollectiveError, Collectives, SingleRank, StandIn
from ..kernels.device import Device, gpu_count
from ..kernels.env import torchrun

if TYPE_CHECKING:
    from ..kernels.transports import Transport

T = TypeVar("T")
TRANSPORTS = ("loopback", "symmetric", "multicast")
LIMIT_S = 60.0
"""That ranks wait for one another outside kernels."""
NO_LINK = "no link cost is in these times: the other ranks are not there"

NO_NUMBERS = (
    "what a rank alone computes means nothing, and is in no figure: stand-ins and two-shot sums over loopback repeat its own"
    " columns; times and launches do not depend on it"
)


@dataclass(frozen=True)
class Group:
    """As one rank sees it."""

    rank: int
    size: int
    comm: Collectives
    words: str
    """How the ranks run."""
    device: Device | None
    transport: Transport | None = None
    """Of kernels that publish; None where this rank is alone."""
    host: Collectives | None = None
    """Of torchrun's processes: bounded, and names who is late or gone."""

    @property
    def alone(self) -> bool:
        """One rank in place of a larger group."""
        return isinstance(self.comm, StandIn)

    def meet(self) -> None:
        """Wait on the host for all ranks, if there are others: whoever was slow is waited for here, not in a kernel.

        Raises:
            CollectiveError: a rank did not come within :data:`LIMIT_S`, or is gone.
        """
        if self.host is not None:
            import torch

            self.host.all_gather(torch.zeros(1), 0)

    def together(self, what: str, body: Callable[[], T]) -> T:
        """Run what needs all ranks; who does not come to it, or out of it, is named.

        Raises:
            CollectiveError: a rank did not come within :data:`LIMIT_S`, or is gone.
        """
        if self.host is None:
            return body()
        import torch

        here = torch.zeros(1)
        self.host.all_gather(here, 0)
        try:
            done = body()
        except CollectiveError:
            raise
        except RuntimeError as error:  # a device that waited for a rank that is gone says no more than that it stopped
            try:
                self.host.all_gather(here, 0)
            except CollectiveError as late:
                raise CollectiveError(f"{what}: {late}") from error
            raise
        self.host.all_gather(here, 0)
        return done

    def close(self) -> None:
        """Leave the process group."""
        if self.host is not None:
            import torch.distributed as dist

            dist.destroy_process_group()


def started() -> int:
    """Ranks that torchrun started; 1 without it."""
    place = torchrun()
    return place.size if place else 1


def of_rank(path: Path | None) -> Path | None:
    """A file that every process of a group writes: under torchrun each has one of its own, ``steps.json`` as ``steps.rank3.json``."""
    place = torchrun()
    if path is None or place is None or place.size == 1:
        return path
    stem, dot, kinds = path.name.partition(".")
    return path.with_name(f"{stem}.rank{place.rank}{dot}{kinds}")


def join(
    tp: int, device: Device | None, *, rank: int | None = None, transport: str | None = None, limit_s: float = LIMIT_S
) -> Group | None:
    """The group of a run; None where all ranks are to be threads of this process.

    Args:
        tp: tensor-parallel size.
        device: the GPU here; of several, each rank under torchrun takes the one of its local rank.
        rank: runs alone as this rank of the group.
        transport: ``loopback`` for a rank alone; ``symmetric`` (default) or ``multicast`` under torchrun.
        limit_s: of waits outside kernels.

    Raises:
        InputError: torchrun started another number of ranks, or a transport that does not go with the group.
    """
    place = torchrun()
    if transport is not None and transport not in TRANSPORTS:
        raise InputError(f"unknown transport {transport!r}; transports: {', '.join(TRANSPORTS)}")
    if place is not None and place.size > 1:
        if rank is not None:
            raise InputError("--rank runs one rank alone; torchrun starts all of them")
        if place.size != tp:
            raise InputError(f"torchrun started {place.size} ranks, the run has TP {tp}; they must be equal")
        if transport == "loopback":
            raise InputError(
                "transport loopback is for one rank alone; ranks under torchrun have symmetric or multicast"
            )
        return _processes(place.rank, place.size, place.local_rank, device, transport or "symmetric", limit_s)
    if transport in ("symmetric", "multicast"):
        raise InputError(f"transport {transport} needs all ranks: start them with torchrun --nproc-per-node {tp}")
    if tp == 1:
        return Group(0, 1, SingleRank(), "one rank", device)
    if rank is None and device is None:
        if transport is not None:
            raise InputError("transport loopback is for one rank alone; here all ranks run: say which one with --rank")
        return None
    own = rank or 0
    words = f"rank {own} of {tp} alone over loopback, stand-in collectives; {NO_LINK}"
    return Group(own, tp, StandIn(own, tp), words, device)


def _processes(rank: int, size: int, local: int, device: Device | None, transport: str, limit_s: float) -> Group:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from ..kernels.distributed import TorchGroup

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    store = dist.distributed_c10d._get_default_store()
    host = TorchGroup(dist.PrefixStore("k3lab-decode", store), limit_s=limit_s)
    if device is None:
        return Group(rank, size, host, f"{size} processes over gloo", None, host=host)
    from ..kernels.transports import Multicast, Symmetric
    from .symmetric_group import SymmetricGroup

    own = replace(device, index=local % gpu_count())
    torch.cuda.set_device(own.index)
    sent: Transport = Multicast(device=f"cuda:{own.index}") if transport == "multicast" else Symmetric()
    comm = SymmetricGroup(f"cuda:{own.index}", limit_s=limit_s)
    return Group(rank, size, comm, f"{size} processes, transport {transport}", own, sent, host)
