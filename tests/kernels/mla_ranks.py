"""The MLA core with the context over ranks: one problem, its shards, and real processes over gloo.

``python mla_ranks.py SIZE FOLDER`` writes ``FOLDER/RANK.pt``.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from k3lab.kernels.collectives import Collectives
from k3lab.kernels.mla.twin import MlaWeights, Shard
from k3lab.kernels.mla.twin_context import mla_context_parallel

HEADS, Q_LORA, LATENT, NOPE, ROPE, V = 16, 12, 10, 6, 4, 5
COLUMNS = Q_LORA + LATENT + ROPE + HEADS * V
STEP = {"eps": 1e-2, "nope": NOPE, "rope": ROPE}
CONTEXT, PAGE = [7, 0, 12, 1], 4
"""At four ranks with one new token: shards of three tokens and one, of none and one, of none."""
KINDS = (("fp64", 3), ("fp64", 1), ("fp8", 2))
F64, FP8 = torch.float64, torch.float8_e4m3fn


def case(kind: str, q_len: int) -> dict:
    """Weights, and every token of every context in the order of positions [requests, tokens, width]; the same everywhere."""
    generator = torch.Generator().manual_seed(q_len)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    weights = MlaWeights(
        q_a_norm=1 + 0.3 * draw(Q_LORA), kv_a_norm=1 + 0.3 * draw(LATENT), q_b=draw(HEADS * (NOPE + ROPE), Q_LORA),
        w_uk=draw(HEADS, NOPE, LATENT) * 0.5, w_uv=draw(HEADS, V, LATENT),
    )  # fmt: skip
    past = draw(len(CONTEXT), max(CONTEXT) + q_len, LATENT + ROPE)
    return {
        "weights": weights, "proj": draw(len(CONTEXT) * q_len, COLUMNS), "past": past.to(FP8) if kind == "fp8" else past,
        "context": torch.tensor(CONTEXT), "q_len": q_len, "k_scale": 0.5 if kind == "fp8" else 1.0,
    }  # fmt: skip


def pages(whole: dict, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache, block table) of the tokens that a rank holds, blocks in a scrambled order, what is not yet written NaN."""
    q_len, past = whole["q_len"], whole["past"]
    each = -(-shard.below(max(CONTEXT) + q_len) // PAGE)
    generator = torch.Generator().manual_seed(shard.rank)
    table = torch.randperm(len(CONTEXT) * each, generator=generator).view(len(CONTEXT), each)
    cache = torch.full((len(CONTEXT) * each, PAGE, LATENT + ROPE), torch.nan, dtype=F64).to(past.dtype)
    for request, tokens in enumerate(CONTEXT):
        for place, token in enumerate(shard.own(0, tokens)):
            cache.view(torch.uint8 if past.dtype == FP8 else F64)[table[request, place // PAGE], place % PAGE] = past[
                request, token
            ].view(torch.uint8 if past.dtype == FP8 else F64)
    return cache, table


def one_rank(whole: dict, comm: Collectives) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output of this rank's heads, its cache, its table) after a step."""
    weights, proj = whole["weights"], whole["proj"]
    shared, gate = proj[:, : COLUMNS - HEADS * V], proj[:, COLUMNS - HEADS * V :]
    local = {name: getattr(weights, name).chunk(comm.size)[comm.rank] for name in ("q_b", "w_uk", "w_uv")}
    cache, table = pages(whole, Shard(comm.rank, comm.size))
    out = mla_context_parallel(
        torch.cat([shared, gate.chunk(comm.size, dim=-1)[comm.rank]], dim=-1), dataclasses.replace(weights, **local),
        cache, table, whole["context"], q_len=whole["q_len"], k_scale=whole["k_scale"], comm=comm, **STEP,
    )  # fmt: skip
    return out, cache, table


def _rank_main(rank: int, size: int, port: int, folder: Path) -> None:
    from forked_ranks import join, keep
    from k3lab.kernels.distributed import TorchGroup

    torch.set_num_threads(1)
    store = join(rank, size, port, 30.0)
    comm = TorchGroup(dist.PrefixStore("mla", store), limit_s=30.0)
    keep({kind: one_rank(case(*kind), comm)[0] for kind in KINDS}, folder, rank)


def main() -> None:
    """Fork the ranks and see to it that all of them end."""
    from forked_ranks import fork

    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    ended = fork(size, lambda rank, port: _rank_main(rank, size, port, folder), patience_s=30.0, wall_s=60.0)
    sys.exit(not ended)


if __name__ == "__main__":
    main()
