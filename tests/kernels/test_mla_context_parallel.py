"""The MLA core with each context over several ranks equals the one with the whole context on every rank."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3lab.kernels.collectives import SingleRank, run_virtual_ranks
from k3lab.kernels.mla.twin import Shard, mla
from k3lab.kernels.mla.twin_context import merged

from .mla_ranks import CONTEXT, KINDS, PAGE, STEP, case, one_rank, pages

HERE = Path(__file__).parent


def whole_step(whole):
    """(output, its cache, its table) with every token on one rank."""
    cache, table = pages(whole, Shard())
    step = {"q_len": whole["q_len"], "k_scale": whole["k_scale"], **STEP}
    return mla(whole["proj"], whole["weights"], cache, table, whole["context"], **step), cache, table


def test_every_token_lies_with_one_rank_in_order():
    for size in (1, 2, 3, 4, 16):
        for tokens in range(40):
            parts = [Shard(rank, size) for rank in range(size)]
            assert sorted(t for part in parts for t in part.own(0, tokens)) == list(range(tokens))
            for part in parts:
                assert len(part.own(0, tokens)) == part.below(tokens)
                assert [t // size for t in part.own(0, tokens)] == list(range(part.below(tokens)))
                for first in range(tokens):
                    assert [t // size for t in part.own(first, tokens)] == list(
                        range(part.below(first), part.below(tokens))
                    )


@pytest.mark.parametrize(("kind", "q_len"), KINDS)
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_equals_the_whole_context_on_every_rank(kind, q_len, size):
    whole = case(kind, q_len)
    wanted, cache, table = whole_step(whole)
    ranks = run_virtual_ranks(size, lambda comm: one_rank(whole, comm)) if size > 1 else [one_rank(whole, SingleRank())]
    torch.testing.assert_close(torch.cat([out for out, _, _ in ranks], dim=-1), wanted, rtol=1e-9, atol=1e-9)
    for rank, (_, mine, where) in enumerate(ranks):
        for request, before in enumerate(CONTEXT):
            for place, token in enumerate(Shard(rank, size).own(0, before + q_len)):
                held = mine[where[request, place // PAGE], place % PAGE].view(torch.uint8)
                assert torch.equal(held, cache[table[request, token // PAGE], token % PAGE].view(torch.uint8))
        unwritten = len(CONTEXT) * where.shape[1] * PAGE - sum(Shard(rank, size).below(b + q_len) for b in CONTEXT)
        assert int(mine.to(torch.float64).isnan().all(-1).sum()) == unwritten


@pytest.mark.parametrize("size", [2, 4])
def test_real_processes_equal_the_whole_context(size, tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "mla_ranks.py"), str(size), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr[-2000:]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(size)]
    for kind in KINDS:
        wanted, _, _ = whole_step(case(*kind))
        torch.testing.assert_close(torch.cat([one[kind] for one in found], dim=-1), wanted, rtol=1e-9, atol=1e-9)


def test_parts_without_tokens_weigh_nothing_whatever_they_hold():
    latents = torch.tensor([[[1.0, 2.0]], [[torch.nan, torch.inf]], [[3.0, 6.0]]], dtype=torch.float64)
    logarithms = torch.tensor([[0.0], [-torch.inf], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(merged(latents, logarithms), torch.tensor([[2.0, 4.0]], dtype=torch.float64))
    skewed = merged(latents[[0, 2]], torch.tensor([[1000.0], [1000.0 + math.log(3.0)]], dtype=torch.float64))
    torch.testing.assert_close(skewed, torch.tensor([[2.5, 5.0]], dtype=torch.float64))
