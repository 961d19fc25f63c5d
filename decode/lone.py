"""What the other ranks would have said to a rank that runs alone: a table in place of their router shards.

Without it a rank alone sees its own logits repeated for every rank, and its rows choose the same few experts: its
experts' traffic would mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import ModelCard
from ..kernels.accounting import expected_distinct_experts

CANDIDATES = 24
"""Tables drawn; the one whose rows hit as many distinct experts as uniform routing does is taken."""
OWN = 8
"""Random shards of this rank that a candidate is judged with: every layer has another."""


@dataclass(frozen=True)
class LonePeers:
    """Logits and latents of all ranks but the first place, which is this rank's own."""

    tp: int
    logits: Tensor
    """FP32 [rows, E]."""
    latents: Tensor
    """BF16 [rows, L]."""

    def logits_around(self, own: Tensor) -> Tensor:
        """[n, E]: own logits [n, E/T], then the table's."""
        return torch.cat([own, self.logits[: own.shape[0], own.shape[1] :].to(own.dtype)], dim=-1)

    def latents_around(self, own: Tensor) -> Tensor:
        """[n, L]: own latents [n, L/T], then the table's."""
        return torch.cat([own, self.latents[: own.shape[0], own.shape[1] :].to(own.dtype)], dim=-1)

    def words(self, rows: int) -> Tensor:
        """As the router's kernels read them: int32 [ranks, rows, E/T + L/T/2]; rows beyond the table's repeat it."""
        from ..kernels.router.profiles import words_of

        which = torch.arange(rows, device=self.logits.device) % self.logits.shape[0]
        logits, latents = (
            table[which].unflatten(-1, (self.tp, -1)).transpose(0, 1).contiguous()
            for table in (self.logits, self.latents.to(torch.bfloat16))
        )
        return words_of(logits, latents)


def lone_peers(card: ModelCard, *, tp: int, rows: int, device: str | torch.device, seed: int = 0) -> LonePeers:
    """A table with which routing is uniform, for steps of ``rows`` rows and fewer.

    Args:
        card: the model.
        tp: ranks of the group that is not there.
        rows: most token rows of a step.
        device: where the table goes.
        seed: of the table.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, top, width = card.num_experts, card.num_experts_per_token, card.num_experts // tp
    wanted = expected_distinct_experts(card, rows)
    best, distance = torch.zeros(rows, experts), float("inf")
    for _ in range(CANDIDATES):
        table = torch.randn(rows, experts, generator=generator)
        hit = []
        for _ in range(OWN):
            table[:, :width] = torch.randn(rows, width, generator=generator)
            hit.append(len(table.topk(top, dim=-1).indices.unique()))
        away = abs(sum(hit) / OWN - wanted)
        if away < distance:
            best, distance = table.clone(), away
    latents = torch.randn(rows, card.routed_expert_hidden_size, generator=generator).to(torch.bfloat16)
    return LonePeers(tp, best.to(device), latents.to(device))
