"""What stands beside the kernels in the same run: all-reduces of NCCL and of symmetric memory, and chains of operators over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ...kernels.moe_tail.chain import columns
from ...kernels.output_projection.chain import rest
from ...kernels.router.chain import chosen
from .beside_names import ALL_REDUCES
from .clock import Call
from .gpu_clock import ended
from .group import RankGroup
from .request import RanksError


def all_reduces(
    rows: int, hidden: int, group: RankGroup, nccl: Any, limit_s: float
) -> Iterator[tuple[str, Call | str]]:
    """(name, a call, or why there is none) of an all-reduce of BF16 [rows, hidden]; checked on small whole numbers first.

    Raises:
        RanksError: a sum is wrong.
        CollectiveError: a rank is late or gone.
    """
    world = dist.group.WORLD
    assert world is not None
    plain = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    shared = symmetric.empty(rows, hidden, dtype=torch.bfloat16, device=plain.device)
    symmetric.rendezvous(shared, world)
    out, name = torch.empty_like(plain), world.group_name
    ops = torch.ops.symm_mem
    calls: dict[str, tuple[Callable[[], Any], Tensor, Tensor]] = {
        "nccl": (lambda: dist.all_reduce(plain, group=nccl), plain, plain),
        "symm_mem_one_shot": (lambda: ops.one_shot_all_reduce_out(shared, "sum", name, out), shared, out),
        "symm_mem_two_shot": (lambda: ops.two_shot_all_reduce_(shared, "sum", name), shared, shared),
    }
    for which in ALL_REDUCES:
        call, given, made = calls[which]
        given.fill_(group.rank + 1)
        ended(group, limit_s)
        group.meet()
        try:
            call()
        except (RuntimeError, AttributeError) as error:  # of all ranks alike: this PyTorch or these GPUs cannot
            yield which, " ".join(str(error).split())[:300]
            continue
        ended(group, limit_s)
        if not bool((made == group.size * (group.size + 1) // 2).all()):
            raise RanksError(f"rank {group.rank}: all-reduce {which} of {rows} rows has a wrong sum")
        group.meet()  # nobody clears what another still reads
        given.zero_()  # sums in place would grow without end
        yield which, _quiet(call)


def _quiet(call: Callable[[], Any]) -> Call:
    def run() -> None:
        call()

    return run


def chain_call(family: str, problem: Any, tensors: dict[str, Tensor], nccl: Any) -> Call:
    """One step of the family on fixed tensors over NCCL, capturable in a graph."""
    return {"output_projection": _projection, "router": _router, "moe_tail": _tail}[family](problem, tensors, nccl)


def _projection(problem: Any, t: dict[str, Tensor], nccl: Any) -> Call:
    def call() -> None:
        partial = torch.mm(t["x"], t["w_o"].T)
        dist.all_reduce(partial, group=nccl)
        prefix, mlp_input = rest(problem.eps, t, partial[None])
        t["prefix_out"].copy_(prefix)
        t["mlp_input"].copy_(mlp_input)

    return call


def _gathered(mine: Tensor, size: int, nccl: Any) -> Tensor:
    """[rows, columns] of every rank side by side."""
    whole = torch.empty(size, *mine.shape, dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(whole.flatten(0, 1), mine, group=nccl)
    return whole.transpose(0, 1).flatten(1)


def _router(problem: Any, t: dict[str, Tensor], nccl: Any) -> Call:
    def call() -> None:
        logits = _gathered(torch.mm(t["x"], t["w_router"].T, out_dtype=torch.float32), problem.tp, nccl)
        t["logits"].copy_(logits)
        t["latent"].copy_(_gathered(torch.mm(t["x"], t["w_down"].T), problem.tp, nccl))
        made = chosen(logits, t["bias"], problem.top_k, problem.scaling)
        t["ids"].copy_(made["ids"])
        t["weights"].copy_(made["weights"])

    return call


def _tail(problem: Any, t: dict[str, Tensor], nccl: Any) -> Call:
    def call() -> None:
        latent = t["latent_partial"].clone()
        dist.all_reduce(latent, group=nccl)
        parts = t["shared_partial"].unflatten(-1, (problem.tp, -1)).transpose(0, 1).contiguous()
        share = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=nccl)
        mine = columns(problem, t, latent[None], share[None])
        prefix, following = rest(problem.eps, t, _gathered(mine, problem.tp, nccl)[None])
        t["prefix_out"].copy_(prefix)
        t["next_input"].copy_(following)

    return call
