"""The MLA core with contexts over ranks: one problem's shards, small enough for the CPU, and what all ranks' twins leave."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from k3lab.kernels import K3, family
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.mla.family import WEIGHTS, Mla
from k3lab.kernels.mla.twin import MlaWeights, Shard
from k3lab.kernels.mla.twin_context import mla_context_parallel
from k3lab.kernels.twin_family import in_fp32
from k3lab.tuning.compare import compare

FAMILY = family("mla")
ENGINE = FAMILY.engine("cute_mma")
SMALL = {"heads": 1, "q_lora": 256, "kv_lora": 256, "context": 200}


def problem(rows: int, kind: str, tp: int, **changes: Any) -> Mla:
    made = dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), **changes)
    assert isinstance(made, Mla)
    return made


def small(rows: int, kind: str, tp: int, **changes: Any) -> Mla:
    return problem(rows, kind, tp, **{**SMALL, **changes})


def rank_inputs(
    one: Mla, contexts: list[int], rank: int, live: int | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Of one rank: its heads, gate and pages are its own, the rest is everyone's. Cache rows without a token are NaN, those of
    new tokens among them; so are dead rows, and dead requests' tables lead nowhere.
    """
    live = one.rows if live is None else live
    mine, common = FAMILY.inputs(one, 100 * seed + 1 + rank), FAMILY.inputs(one, 100 * seed)
    if one.fp8:  # so far from one that no tolerance hides it
        common["k_scale"] = torch.full((1,), 0.625)
    found = {name: (common if name in ("q_a_norm", "kv_a_norm", "k_scale") else mine)[name] for name in mine}
    gate = one.q_lora + one.width
    found["proj"] = torch.cat([common["proj"][:, :gate], mine["proj"][:, gate:]], dim=1)
    found["context"] = torch.tensor(contexts, dtype=torch.int32)
    seen = torch.zeros(found["cache"].shape[:2], dtype=torch.bool)
    alive = -(-live // one.q_len)
    for request, tokens in enumerate(contexts[:alive]):
        for place in range(Shard(rank, one.dcp).below(tokens)):
            seen[int(found["block_table"][request, place // one.block_size]), place % one.block_size] = True
    found["cache"].view(torch.uint8)[~seen] = 0xFF  # NaN in both formats
    found["proj"][live:] = torch.nan
    found["block_table"][alive:], found["context"][alive:] = 2**30, 2**30
    return found


def twins(one: Mla, inputs: list[dict[str, torch.Tensor]], live: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's output and cache after the step, in FP32, over live rows alone: they end with whole requests' first rows."""
    alive = -(-live // one.q_len)
    missing = alive * one.q_len - live

    def body(comm: Any) -> dict[str, torch.Tensor]:
        t = in_fp32(inputs[comm.rank])
        cache_ = inputs[comm.rank]["cache"].clone() if one.fp8 else t["cache"].clone()
        proj = torch.nn.functional.pad(t["proj"][:live], (0, 0, 0, missing))
        out = mla_context_parallel(
            proj, MlaWeights(**{name: t[name] for name in WEIGHTS}), cache_, t["block_table"][:alive], t["context"][:alive],
            q_len=one.q_len, eps=one.eps, nope=one.nope, rope=one.rope, comm=comm,
            k_scale=float(t["k_scale"]) if one.fp8 else 1.0,
        )  # fmt: skip
        return {"out": out[:live], "cache": cache_}

    return run_virtual_ranks(one.tp, body)


def own_rows(one: Mla, inputs: dict[str, torch.Tensor], rank: int, live: int) -> torch.Tensor:
    """Which rows of a rank's cache the live rows of a step write."""
    mask = torch.zeros(inputs["cache"].shape[:2], dtype=torch.bool)
    for row in range(live):
        request = row // one.q_len
        at = int(inputs["context"][request]) + row % one.q_len
        if at % one.dcp == rank:
            place = at // one.dcp
            mask[int(inputs["block_table"][request, place // one.block_size]), place % one.block_size] = True
    return mask


def judge_rank(
    one: Mla, rank: int, inputs: dict, out: torch.Tensor, after: torch.Tensor, wanted: dict, live: int
) -> None:
    """Live rows within tolerance of the twin, the others still poison; new rows of the cache here alone, no other touched."""
    result = compare("out", out[:live], wanted["out"], FAMILY.tolerance(one, "out"))
    assert result.ok, f"rank {rank}: {result.message}"
    assert bool(out[live:].isnan().all())
    mask = own_rows(one, inputs, rank, live)
    before = inputs["cache"]
    assert torch.equal(after[~mask].view(torch.uint8), before[~mask].view(torch.uint8)), f"rank {rank}"
    new, right = after[mask].float(), wanted["cache"][mask].float()
    code = 2**-3 if one.fp8 else 2**-7
    assert bool(((new - right).abs() <= code * right.abs() + 2**-9).all()), f"rank {rank}"


@cache
def all_ranks(one: Mla, contexts: tuple[int, ...]) -> tuple[list[dict], list[dict]]:
    """(inputs, twins) of all ranks, of all rows."""
    inputs = [rank_inputs(one, list(contexts), rank) for rank in range(one.tp)]
    return inputs, twins(one, inputs, one.rows)
