"""Inputs that tempt a router to be wrong; and the one way in which two engines may choose differently: at near ties, counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from k3lab.kernels.router.exact import choose, rank_by, sigmoid
from k3lab.kernels.router.profiles import own_slot, words_of

from .router_case import whole_numbers

INF, NAN = math.inf, math.nan
LOGITS_APART = 2e-5
"""Most that FP32 sums of K3's 7168 products differ by between two orders, of logits of magnitude one."""
SCORES_APART = LOGITS_APART / 2 + 2**-22
"""Most that two scores of a differing choice may lie apart: a sigmoid's slope is a quarter at most, either score moves, and
each is rounded: an engine's sigmoid is three units in the last place off at most."""


def adversarial() -> torch.Tensor:
    """Rows of logits that tempt a choice to be wrong."""
    logits = torch.zeros(8, 896)
    logits[0, :400], logits[1, 500], logits[2, 100:] = -1.0, 1.0, 0.5
    logits[3], logits[4], logits[5] = NAN, -INF, INF
    logits[3, 7] = 1.0
    logits[6, ::2] = NAN
    logits[7] = torch.arange(896) * 0.01 - 4
    return logits


def near_ties_at_every_place(top_k: int = 16, experts: int = 896) -> torch.Tensor:
    """[2 top_k, E]: of the p-th and the next expert the scores are neighbours, or equal, in row p; of all others, far apart.

    The lower id is ahead in the first ``top_k`` rows and behind in the others.
    """
    logits = torch.full((2 * top_k, experts), -6.0)
    generator = torch.Generator().manual_seed(11)
    for row in range(2 * top_k):
        place = row % top_k
        order = torch.randperm(experts, generator=generator)[: top_k + 4]
        levels = 3.1 - 0.25 * torch.arange(len(order))  # none is zero, whose neighbours have its score
        near = order[place : place + 2].sort(descending=row >= top_k).values
        order[place : place + 2] = near
        levels[place + 1] = levels[place]
        if row % 3:  # in every third row they stay equal
            score = sigmoid(levels[place : place + 1])
            while torch.equal(sigmoid(levels[place + 1 : place + 2]), score):
                levels[place + 1] = torch.nextafter(levels[place + 1], torch.tensor(-INF))
        logits[row, order] = levels
    return logits


def odd_biases() -> torch.Tensor:
    """Biases of all logits zero, scores 0.5: infinities, NaN, sums that are zero, and neighbours of each other."""
    bias = torch.linspace(-0.4, -0.3, 896)
    bias[[3, 700]], bias[[4, 701]], bias[[5, 702]] = INF, -INF, NAN
    bias[6], bias[703], bias[[8, 9]] = -0.5, -0.0, 0.25
    bias[10] = 0.25 + 2**-24  # one unit of a sum of 0.75
    return bias


def hard_step(one: Any, seed: int = 3) -> dict[str, torch.Tensor]:
    """Inputs of a whole step of eight rows: all equal twice, near ties on both sides of every rank's first expert, NaN, both
    infinities, every other NaN, a ramp. This rank's own logits come out of x and its weights, the others' of the table.
    """
    assert one.rows == 8
    inputs = whole_numbers(one, seed)
    ranks, width, slot = one.tp, one.experts, own_slot(one.tp)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(8, one.all_experts)
    logits[1] = 1.0
    logits[2] = -5.0
    reach = 1 + one.top_k // ranks
    edges = [rank * width + off for rank in range(1, ranks) for off in range(-reach, reach)]
    level = torch.tensor(2.0)
    for place in torch.randperm(len(edges), generator=generator).tolist():
        logits[2, edges[place]] = level
        level = torch.nextafter(level, torch.tensor(0.0))
    logits[3], logits[4], logits[5] = NAN, -INF, INF
    logits[3, -2] = 1.0
    logits[6, ::2] = NAN
    logits[7] = torch.arange(one.all_experts) * 0.01 - 4
    first = slot * width
    # a column of the weights a row; the last is one throughout: an x of NaN or infinity there makes all logits so
    inputs["w_router"].zero_()
    inputs["w_router"][:, :8] = logits[:, first : first + width].nan_to_num(0.0, 0.0, 0.0).T.to(torch.bfloat16)
    inputs["w_router"][:, 8] = 1.0
    inputs["w_down"][:, 8] = 1.0
    inputs["x"].zero_()
    inputs["x"][:, :8] = torch.eye(8)
    inputs["x"][3, 8], inputs["x"][4, 8], inputs["x"][5, 8] = NAN, -INF, INF
    inputs["bias"].zero_()
    latents = torch.randn((ranks, 8, one.latent), generator=generator).to(torch.bfloat16)
    return {**inputs, "peers": words_of(logits.view(8, ranks, width).transpose(0, 1).contiguous(), latents)}


@dataclass(frozen=True)
class NearTies:
    """Choices of two engines beside each other."""

    rows: int
    differing: int
    """Rows whose chosen experts are not the same set."""
    apart: float
    """The largest difference of two scores, FP64, of which one engine prefers this and the other that."""


def near_ties(one: torch.Tensor, two: torch.Tensor, bias: torch.Tensor, top_k: int) -> NearTies:
    """Count the rows in which two engines' logits, FP32 [n, E] each, choose different experts.

    ``apart`` compares each expert that only the first chooses with each that only the second does, by the first's scores.
    """
    chosen = [choose(logits, bias, top_k, 1.0)[0] for logits in (one, two)]
    scores = rank_by(torch.sigmoid(one.double()), bias)
    differing, apart = 0, 0.0
    for row, (first, second) in enumerate(zip(*(ids.tolist() for ids in chosen), strict=True)):
        mine, theirs = sorted(set(first) - set(second)), sorted(set(second) - set(first))
        if mine:
            differing += 1
            apart = max(apart, float((scores[row, mine][:, None] - scores[row, theirs][None]).abs().max()))
    return NearTies(len(one), differing, apart)
