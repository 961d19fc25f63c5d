"""Real processes, one a rank, over gloo: ``python gloo_ranks.py SIZE SCENARIO FOLDER`` writes ``FOLDER/RANK.pt``."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from forked_ranks import gloo_main
from k3lab.kernels.distributed import TorchGroup
from k3lab.kernels.output_projection.twin import output_projection

ROWS, WIDTH, HIDDEN, BLOCKS, EPS = 3, 128, 112, 2, 1e-5
WALL_S = 60.0
LIMIT_S = 1.5
"""Of a collective where a rank is late or dead."""
PATIENT_S = 30.0


def case(dtype: torch.dtype) -> dict:
    """The whole problem, the same in every process."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "x": draw(ROWS, WIDTH), "w_o": draw(HIDDEN, WIDTH) * WIDTH**-0.5, "prefix": draw(ROWS, HIDDEN),
        "blocks": [draw(ROWS, HIDDEN) for _ in range(BLOCKS)], "res_norm": draw(HIDDEN), "res_proj": draw(1, HIDDEN),
        "norm_w": draw(HIDDEN),
    }  # fmt: skip


def shard(whole: dict, rank: int, size: int) -> dict:
    """A rank's columns of x and of the weight."""
    return {**whole, **{name: whole[name].chunk(size, dim=-1)[rank] for name in ("x", "w_o")}}


def twin(rank: int, size: int, store: dist.Store) -> dict:
    """Both outputs, in FP64 and BF16, summed in rank order and as the library sums."""
    found = {}
    for name, plain in (("ordered", False), ("plain", True)):
        comm = TorchGroup(dist.PrefixStore(name, store), plain=plain, limit_s=PATIENT_S)
        for dtype in (torch.float64, torch.bfloat16):
            mine = shard(case(dtype), rank, size)
            found[name, dtype] = output_projection(**mine, eps=EPS, comm=comm)
    comm = TorchGroup(dist.PrefixStore("shards", store), limit_s=PATIENT_S)
    line = torch.arange(2.0 * size).view(2, size)
    found["shards"] = comm.all_gather(line[:, rank : rank + 1], -1), comm.reduce_scatter(line, 1)
    return found


def late(rank: int, size: int, store: dist.Store) -> dict:
    """The last rank comes, but not in time."""
    comm = TorchGroup(store, limit_s=LIMIT_S)
    comm.all_reduce(torch.ones(1))
    if rank == size - 1:
        time.sleep(3 * LIMIT_S)
    return {"sum": comm.all_reduce(torch.ones(1))}


def slow(rank: int, size: int, store: dist.Store) -> dict:
    """The last rank comes in time, after a while."""
    comm = TorchGroup(store, limit_s=PATIENT_S)
    if rank == size - 1:
        time.sleep(0.5)
    return {"sum": comm.all_reduce(torch.ones(1))}


def dead(rank: int, size: int, store: dist.Store) -> dict:
    """Rank 1 dies between two collectives."""
    comm = TorchGroup(store, limit_s=LIMIT_S)
    comm.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"sum": comm.all_reduce(torch.ones(1))}


def dead_inside(rank: int, size: int, store: dist.Store) -> dict:
    """Rank 1 dies in a collective, when all have come to it."""
    comm = TorchGroup(store, plain=True, limit_s=LIMIT_S)
    comm.all_reduce(torch.ones(1))
    if rank == 1:
        dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return {"sum": comm.all_reduce(torch.ones(1))}


def other_shape(rank: int, size: int, store: dist.Store) -> dict:
    """Rank 1 sums something else."""
    return {"sum": TorchGroup(store, limit_s=PATIENT_S).all_reduce(torch.ones(1 + (rank == 1)))}


SCENARIOS = {one.__name__: one for one in (twin, late, slow, dead, dead_inside, other_shape)}


if __name__ == "__main__":
    gloo_main(SCENARIOS, patience_s=PATIENT_S, wall_s=WALL_S)
