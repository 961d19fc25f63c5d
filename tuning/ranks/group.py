"""One rank's place in the group: a host group that bounds every wait and names who is late, and the means between GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...kernels.collectives import Collectives
from .request import PREPARE_S, RanksRequest

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Of every rank's environment: NVLink multicast stays off."""
OVERLAPPING = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Where ranks share a GPU."""


@dataclass(frozen=True)
class RankGroup:
    """As one rank sees it."""

    rank: int
    size: int
    host: Collectives
    """Over gloo; a call ends within the request's limit."""
    patient: Collectives
    """The same for what compilers take."""
    store: Any
    """Of torch.distributed."""

    def all(self, value: float) -> list[float]:
        """Every rank's value, in rank order: what all ranks must decide alike is decided from these."""
        import torch

        return [float(one) for one in self.host.all_gather(torch.tensor([value], dtype=torch.float64), 0)]

    def meet(self, *, patient: bool = False) -> None:
        """Wait for all ranks.

        Raises:
            CollectiveError: names who did not come.
        """
        import torch

        (self.patient if patient else self.host).all_gather(torch.zeros(1), 0)


def join(rank: int, request: RanksRequest, store: Any) -> RankGroup:
    """Join the default group over gloo; ``store`` None takes torchrun's."""
    from datetime import timedelta

    import torch.distributed as dist

    from ...kernels.distributed import TorchGroup

    # where ranks wait for a compiler gloo has to be as patient; TorchGroup bounds each call itself
    limit = timedelta(seconds=PREPARE_S)
    if store is None:
        dist.init_process_group("gloo", timeout=limit)
        store = dist.distributed_c10d._get_default_store()
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.size, timeout=limit)
    host = TorchGroup(dist.PrefixStore("k3lab-ranks", store), limit_s=request.limit_s)
    patient = TorchGroup(dist.PrefixStore("k3lab-ranks-patient", store), limit_s=PREPARE_S)
    return RankGroup(rank, request.size, host, patient, store)


class OnHost:
    """Collectives of tensors that lie on a GPU, through host memory."""

    def __init__(self, comm: Collectives) -> None:
        """``comm``: of host tensors."""
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in rank order."""
        return self.comm.all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x`` side by side."""
        return self.comm.all_gather(x.cpu(), dim).to(x.device)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of the sum."""
        return self.comm.reduce_scatter(x.cpu(), dim).to(x.device)
