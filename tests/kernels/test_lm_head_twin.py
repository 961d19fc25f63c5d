"""Embedding and head: sharded by vocabulary equals unsharded."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.collectives import SingleRank, run_virtual_ranks
from k3lab.kernels.lm_head.twin import best_token, embed, lm_head, next_token

BF16, F64 = torch.bfloat16, torch.float64
VOCAB, H = 48, 20


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, F64])
def test_embedding_is_the_exact_row_on_every_rank(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(VOCAB, H, dtype=F64).to(dtype), torch.tensor([0, VOCAB - 1, 5, 5, VOCAB // 2, 3])
    for got in run_virtual_ranks(size, lambda comm: embed(ids, table.chunk(size)[comm.rank], comm)):
        assert got.dtype == dtype
        assert torch.equal(got, table[ids])


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_logits_are_in_vocabulary_order(size: int) -> None:
    torch.manual_seed(1)
    h, w = torch.randn(5, H, dtype=F64), torch.randn(VOCAB, H, dtype=F64)
    for got in run_virtual_ranks(size, lambda comm: lm_head(h, w.chunk(size)[comm.rank], comm)):
        torch.testing.assert_close(got, h @ w.T, rtol=1e-9, atol=1e-9)


def test_logits_are_rounded_once() -> None:
    torch.manual_seed(2)
    h, w = torch.randn(5, H).to(BF16), torch.randn(VOCAB, H).to(BF16)
    assert torch.equal(lm_head(h, w, SingleRank()), (h.float() @ w.float().T).to(BF16))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(InputError, match=r"token ids must lie in 0\.\.47"):
        embed(torch.tensor([3, token]), torch.zeros(VOCAB, H), SingleRank())


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_likeliest_token_is_the_same_however_the_vocabulary_is_cut(size: int) -> None:
    torch.manual_seed(3)
    h, w = torch.randint(-2, 3, (9, H)).double(), torch.randint(-1, 2, (VOCAB, H)).double()  # many equal logits
    h[4, 0], w[7, 0] = float("nan"), 1.0
    logits = h @ w.T
    first = [int((row == row.max()).nonzero()[0]) if not row.isnan().any() else VOCAB - 1 for row in logits]
    assert any((row == row.max()).sum() > 1 for row in logits)
    for best, ids in run_virtual_ranks(size, lambda comm: next_token(h, w.chunk(size)[comm.rank], comm)):
        assert ids.tolist() == first
        assert best.isnan().tolist() == [row == 4 for row in range(9)]
        assert torch.equal(best[~best.isnan()], logits.amax(-1)[~best.isnan()])


def test_greedy_decoding_takes_the_same_token() -> None:
    from types import SimpleNamespace

    from k3lab.decode.greedy import next_tokens

    logits = torch.randint(-3, 4, (50, VOCAB)).to(BF16)
    logits[7, 3] = float("nan")
    weights = SimpleNamespace(lm_head=torch.zeros(VOCAB, 1))
    taken = next_tokens(logits, weights, SingleRank())  # type: ignore[arg-type]
    assert torch.equal(best_token(logits, 0, VOCAB)[1], taken)
    assert taken[7] == VOCAB - 1
