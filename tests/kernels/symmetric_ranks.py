"""Real processes, one a rank, on as many GPUs as there are: ``python symmetric_ranks.py SIZE SCENARIO CONFIG FOLDER`` writes ``FOLDER/RANK.pt``.

Processes that share a GPU are time-sliced, so an exchange takes as long as the GPU takes to come round; with a GPU a rank
the stores go over NVLink. Forked before anything touches a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import fork, join, keep
from k3lab.kernels import K3, Config, family
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.device import require
from k3lab.kernels.gpu_cards import GPU_CARDS
from k3lab.kernels.health import check_health, rearm, set_limit
from k3lab.kernels.transports import Symmetric

ROWS, STEPS, MEASURED = 2, 200, 20
WALL_S = 240.0
PATIENT_S = 120.0
LEAST_LIMIT_S, EXCHANGES_A_LIMIT = 1.0, 50
"""A wait may last so many exchanges: time-sliced processes have no pace of their own, so it is measured first."""
CONFIGS: dict[str, tuple[str, Config]] = {
    "fused": ("cute_fused", {}),
    "apart": ("cute_apart", {}),
    "split": ("cute_split", {"packet": "b32e32", "consumer_wait": "exit"}),
    "two_shot": ("cute_split", {"exchange": "two_shot"}),
}
FAMILY = family("output_projection")


def inputs(size: int, rank: int) -> dict[str, torch.Tensor]:
    """Of one rank: x and its columns of the weight are its own, the rest is everyone's."""
    problem = FAMILY.problem(K3, tp=size, rows=ROWS)
    mine, common = FAMILY.inputs(problem, 100 + rank), FAMILY.inputs(problem, 99)
    return {name: (mine if name in ("x", "w_o") else common)[name] for name in mine}


class Rank:
    """A runner over symmetric memory, and its outputs."""

    def __init__(self, size: int, rank: int, form: str) -> None:
        from k3lab.kernels.launch import Runner
        from k3lab.tuning.compiling import compile_config

        device = require("this test")
        problem = FAMILY.problem(K3, tp=size, rows=ROWS)
        name, change = CONFIGS[form]
        engine = FAMILY.engine(name)
        chosen: Config = {**engine.space(problem, device.card or GPU_CARDS["H200"]).default, **change}
        self.runner = Runner(compile_config(engine, problem, chosen, device.arch), transport=Symmetric())
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(problem).items()
        }
        tensors = {name: tensor.cuda() for name, tensor in inputs(size, rank).items()}
        self.call = self.runner.bind({**tensors, **self.outputs})

    def step(self) -> dict[str, torch.Tensor]:
        """One launch, checked."""
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))
        self.call()
        check_health(self.runner.buffers, self.runner.transport.rank)
        return {name: tensor.cpu() for name, tensor in self.outputs.items()}

    def limited(self) -> float:
        """Bound every wait by what exchanges take here; seconds, the same on every rank."""
        self.step()
        dist.barrier()
        started = time.monotonic()
        for _ in range(MEASURED):
            self.step()
        each = torch.tensor((time.monotonic() - started) / MEASURED)
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
        limit = round(max(LEAST_LIMIT_S, EXCHANGES_A_LIMIT * float(each)), 3)
        set_limit(self.runner.buffers, limit)
        torch.cuda.synchronize()
        return limit


def steps(rank: int, size: int, form: str) -> dict:
    """Many launches: the same bits each time."""
    one = Rank(size, rank, form)
    first, changed = one.step(), 0
    started = time.monotonic()
    for _ in range(STEPS):
        again = one.step()
        changed += any(not torch.equal(again[name], first[name]) for name in first)
    return {**first, "changed": changed, "exchange_ms": 1000 * (time.monotonic() - started) / STEPS}


def late(rank: int, size: int, form: str) -> dict:
    """The last rank comes two seconds after the others."""
    one = Rank(size, rank, form)
    first = one.step()
    if rank == size - 1:
        time.sleep(2.0)
    again = one.step()
    return {**again, "changed": sum(not torch.equal(again[name], first[name]) for name in first)}


def stalled(rank: int, size: int, form: str) -> dict:
    """Rank 1 misses a launch; every other rank gives up and names it. All re-arm, and go on."""
    one = Rank(size, rank, form)
    limit = one.limited()
    first, error, started = one.step(), "", time.monotonic()
    if rank != 1:
        try:
            one.step()
        except CollectiveError as caught:
            error = str(caught)
    seconds = time.monotonic() - started
    rearm(one.runner)
    again = one.step()
    changed = sum(not torch.equal(again[name], first[name]) for name in first)
    return {**again, "changed": changed, "error": error, "seconds": seconds, "limit": limit}


def killed(rank: int, size: int, form: str) -> dict:
    """Rank 1 is killed; every other rank ends with an error that names it."""
    one = Rank(size, rank, form)
    limit = one.limited()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        one.step()
    except CollectiveError as caught:
        return {"error": str(caught), "seconds": time.monotonic() - started, "limit": limit}
    return {"error": "", "seconds": time.monotonic() - started, "limit": limit}


SCENARIOS = {one.__name__: one for one in (steps, late, stalled, killed)}


def rank_main(rank: int, size: int, port: int, scenario: str, form: str, folder: Path) -> None:
    """One rank; what went wrong is left as text."""
    join(rank, size, port, PATIENT_S)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        found = SCENARIOS[scenario](rank, size, form)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    keep(found, folder, rank)


def main() -> None:
    """Fork the ranks and see to it that all of them end."""
    size, scenario, form, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    ended = fork(
        size,
        lambda rank, port: rank_main(rank, size, port, scenario, form, folder),
        patience_s=PATIENT_S,
        wall_s=WALL_S,
    )
    sys.exit(not ended)


if __name__ == "__main__":
    main()
