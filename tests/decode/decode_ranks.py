"""Real processes, one a rank, over gloo: ``python decode_ranks.py SIZE SCENARIO FOLDER`` writes ``FOLDER/RANK.pt``."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
import torch.distributed as dist
from forked_ranks import gloo_main
from k3lab.decode.caches import DecodeCache
from k3lab.decode.context_parallel import context_group
from k3lab.decode.delays import Delayed
from k3lab.decode.group import Group
from k3lab.decode.measure_bars import Load
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.prefill import prefill
from k3lab.decode.prefill_operators import PrefillOperators
from k3lab.decode.random_weights import random_weights
from k3lab.decode.run_pair import run_pair
from k3lab.decode.step import step
from k3lab.kernels import SMALL_K3
from k3lab.kernels.distributed import TorchGroup

CARD = replace(
    SMALL_K3, name="tiny-k3", num_hidden_layers=6, mla_layers=(2, 4, 5), attn_res_block_size=2, num_experts=16
)
STEPS = ([[1], [2]], [[3, 4], [5, 6]], [[7], [8]])
LIMIT_S, PATIENT_S, WALL_S = 4.0, 60.0, 120.0


PROMPT = (17, 400, 3, 256, 8, 9, 44)


def logits(comm: Any, operators: Any, dcp: int = 1, *, steps: int = len(STEPS), chunk: int = 3) -> torch.Tensor:
    """Of a prompt and a few steps behind it, all in one row."""
    weights = random_weights(CARD, seed=5, dtype=torch.float64, tp=comm.size, rank=comm.rank)
    cache = DecodeCache(
        CARD, tp=comm.size, max_requests=2, max_context=20, max_verify=2, dtype=torch.float64, block_size=2, dcp=dcp
    )
    slots = [cache.add(), cache.add()]
    many = PrefillOperators(CARD, dtype=torch.float64, device="cpu", context_group=context_group(comm, dcp))
    found = [prefill(weights, cache, slots[1], torch.tensor(PROMPT), many, comm, chunk=chunk)]
    for ids in STEPS[:steps]:
        found.append(step(weights, cache, torch.tensor(ids), slots, operators, comm).flatten())
        cache.accept(slots, [1, 1])
    return torch.cat(found)


class Dying(ReferenceOperators):
    """Is killed in the middle of the second step."""

    calls = 0

    def router(self, *args: Any) -> Any:
        Dying.calls += 1
        if Dying.calls == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().router(*args)


def plain(rank: int, size: int, store: dist.Store) -> dict:
    """With whole contexts on every rank, and with each of them over all."""
    comm = TorchGroup(store, limit_s=PATIENT_S)
    shared = ReferenceOperators(CARD, context_group=comm)
    return {"logits": logits(comm, ReferenceOperators(CARD)), "shared": logits(comm, shared, dcp=size)}


def late(rank: int, size: int, store: dist.Store) -> dict:
    """The same with random pauses, other ones on every rank."""
    comm = TorchGroup(store, limit_s=PATIENT_S)
    return {"logits": logits(comm, Delayed(ReferenceOperators(CARD), f"3/{rank}", most_us=3000))}


def killed(rank: int, size: int, store: dist.Store) -> dict:
    """Rank 1 dies half-way."""
    return {"logits": logits(TorchGroup(store, limit_s=LIMIT_S), (Dying if rank == 1 else ReferenceOperators)(CARD))}


def pair(rank: int, size: int, store: dist.Store) -> dict:
    """A KDA and an MLA layer on all ranks, each context over all of them."""
    host = TorchGroup(store, limit_s=PATIENT_S)
    group = Group(rank, size, host, f"{size} processes over gloo", None, host=host)
    # without a GPU nothing is looked for in it: the twins stand for what it would have
    bundle: Any = SimpleNamespace(entries=())
    loads = [Load(1, 2, 5, size), Load(1, 1, 5, size)]
    return {"record": run_pair(CARD, group, bundle, loads, pairs=2, samples=2)}


SCENARIOS = {one.__name__: one for one in (plain, late, killed, pair)}


if __name__ == "__main__":
    gloo_main(SCENARIOS, patience_s=PATIENT_S, wall_s=WALL_S)
