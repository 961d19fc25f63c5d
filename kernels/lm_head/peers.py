"""The other ranks' best tokens, or embedding rows, where one GPU plays one rank: a table in place of what they would publish.

Over the loopback transport the slot with factor one gets this rank's own packet; every other slot plays another rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..transports import loopback_factors

if TYPE_CHECKING:
    from torch import Tensor

LIKELIEST, SPREAD = 4.0, 0.4
"""Mean and standard deviation of a rank's best logit: where the best of thousands of N(0, 1) lies."""


def own_slot(ranks: int) -> int:
    """The loopback slot that plays this rank, which is rank 0 there."""
    return loopback_factors(ranks).index(1.0)


def played(ranks: int) -> list[int]:
    """Which rank each loopback slot plays: its own number's, but for the own slot, which is rank 0, and slot 0."""
    found, own = list(range(ranks)), own_slot(ranks)
    found[0], found[own] = found[own], found[0]
    return found


def best_of_peers(ranks: int, rows: int, vocab: int, seed: int) -> Tensor:
    """int32 [ranks, rows, 2]: bits of an FP32 logit that BF16 holds, and a token id of the rank that the slot plays.

    Args:
        ranks: slots.
        rows: token rows.
        vocab: vocabulary rows of one rank.
        seed: the same for the same table.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((ranks, rows), generator=generator) * SPREAD + LIKELIEST
    bits = logits.to(torch.bfloat16).float().view(torch.int32)
    first = torch.tensor(played(ranks))[:, None] * vocab
    ids = first + torch.randint(vocab, (ranks, rows), generator=generator)
    return torch.stack([bits, ids.to(torch.int32)], dim=-1)


def tokens_of_others(ranks: int, rows: int, vocab: int, seed: int) -> Tensor:
    """int32 [rows]: ids of all ranks in turn, this one's first, but for the rank whose number the own slot has.

    Rank p's rows come through slot p. The own slot has factor one, so it carries this rank's rows and can play no other.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    owners = [rank for rank in range(ranks) if rank == 0 or rank != own_slot(ranks)]
    turn = torch.tensor([owners[row % len(owners)] for row in range(rows)])
    return (turn * vocab + torch.randint(vocab, (rows,), generator=generator)).to(torch.int32)
