"""How tokens choose experts where one GPU plays one rank: routing profiles, and the table of the other ranks' words.

A rank computes only its own logits; which experts a step reads depends on all of them. The others' come from a table,
drawn so that every row's choice follows a profile, and the number of distinct experts is checked where it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from ..errors import InputError
from ..transports import loopback_factors

if TYPE_CHECKING:
    from torch import Tensor

PROFILES = ("uniform", "zipf", "hot")
"""By name; a captured profile is a sequence of frequencies, one an expert."""
HOT_SHARE, HOT_EXPERTS = 0.5, 20
"""``hot``: half of the probability lies on one expert in twenty. ``zipf``: the i-th expert's is proportional to 1 / i."""
SAMPLES = 20_000
OFF = 0.02
"""Largest relative difference of a measurement's distinct experts from its profile's."""
CANDIDATES = 24
"""Tables drawn for a step; the one nearest to the profile is taken."""
SHARPER = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2)
"""Exponents of the shares that candidates are drawn with in turn."""
ATTEMPTS = 8
"""At the levels of the rows of one table that come too near to a tie."""
LEAST_GAP = 4e-6
"""Between biased scores next to each other among the chosen and the first that is not: many times what FP32 sums of logits
differ by from engine to engine."""
CHOSEN, STEP, IGNORED = 2.5, 0.1, -4.0
"""Logits of the table: the chosen are STEP apart from CHOSEN up, the others lie around IGNORED."""


def frequencies(profile: str | Sequence[float], experts: int) -> Tensor:
    """How often each expert is chosen, relatively: FP64 [experts], sum 1.

    Raises:
        InputError: no such profile, or not one positive frequency an expert.
    """
    import torch

    if not isinstance(profile, str):
        found = torch.tensor(list(profile), dtype=torch.float64)
        if found.shape != (experts,) or not bool((found > 0).all()) or not bool(found.isfinite().all()):
            raise InputError(f"a captured profile has one positive frequency for each of {experts} experts")
        return found / found.sum()
    if profile not in PROFILES:
        raise InputError(f"unknown routing profile {profile!r}; there are {', '.join(PROFILES)}")
    found = torch.ones(experts, dtype=torch.float64)
    if profile == "zipf":
        found = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    if profile == "hot":
        hot = max(1, experts // HOT_EXPERTS)
        found[:hot] = HOT_SHARE / hot
        found[hot:] = (1 - HOT_SHARE) / (experts - hot)
    # popular experts lie anywhere, on all ranks
    places = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
    return (found / found.sum())[places]


def draw(share: Tensor, rows: int, top_k: int, seed: int) -> Tensor:
    """``top_k`` distinct experts a row, without replacement by their shares: int64 [rows, top_k]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((rows, len(share)), generator=generator, dtype=torch.float64)
    return (share.log() - (-uniform.log()).log()).topk(top_k, dim=-1).indices


def distinct_of(share: Tensor, rows: int, top_k: int) -> float:
    """Experts that so many rows hit together, in the mean."""
    import torch

    if bool((share == share[0]).all()):
        return len(share) * (1 - (1 - top_k / len(share)) ** rows)
    chosen = draw(share, SAMPLES, top_k, 1)
    hit = torch.bincount(chosen.flatten(), minlength=len(share)) / SAMPLES
    return float((1 - (1 - hit) ** rows).sum())


@cache
def expected_distinct(profile: str, experts: int, rows: int, top_k: int) -> float:
    """See :func:`distinct_of`, of a named profile."""
    return distinct_of(frequencies(profile, experts), rows, top_k)


def distinct_fault(found: float, expected: float) -> str | None:
    """Why a measurement with so many distinct experts in the mean does not stand for its profile, or None."""
    if abs(found - expected) <= OFF * expected:
        return None
    return f"{found:.1f} distinct experts in the mean, {expected:.1f} in the profile: more than {100 * OFF:.0f} % off"


def own_slot(ranks: int) -> int:
    """The slot that a rank alone fills with its own words over the loopback transport: the one with factor one."""
    return loopback_factors(ranks).index(1.0)


def peer_logits(
    own: Tensor, bias: Tensor, ranks: int, top_k: int, share: Tensor, seed: int
) -> Tensor:  # fmt: skip
    """Logits of all ranks, FP32 [ranks, rows, E / ranks], this rank's own among them.

    Args:
        own: this rank's, FP32 [rows, E / ranks] on the CPU.
        bias: FP32 [E] on the CPU.
        ranks: of the group.
        top_k: experts a row.
        share: see :func:`frequencies`.
        seed: of the table.
    """
    import torch

    rows, width = own.shape
    slot, wanted = own_slot(ranks), distinct_of(share, rows, top_k)
    best, distance = own, float("inf")
    for number in range(CANDIDATES):
        turn = seed * CANDIDATES + number
        generator = torch.Generator().manual_seed(turn)
        table = torch.randn((rows, ranks * width), generator=generator) * 0.25 + IGNORED
        levels = torch.rand((rows, top_k), generator=generator).argsort(-1) * STEP + CHOSEN
        # this rank's experts are chosen as its own logits have it, so the others make up for that
        tilted = share ** SHARPER[number % len(SHARPER)]
        chosen = draw(tilted / tilted.sum(), rows, top_k, turn)
        near = torch.ones(rows, dtype=torch.bool)
        for _ in range(ATTEMPTS):
            levels = torch.rand((rows, top_k), generator=generator).argsort(-1) * STEP + CHOSEN
            table[near] = table[near].scatter(1, chosen[near], levels.float()[near])
            table[:, slot * width : (slot + 1) * width] = own
            top = (torch.sigmoid(table.double()) + bias.double()).topk(min(top_k + 1, ranks * width), dim=-1)
            near = (top.values[:, :-1] - top.values[:, 1:]).min(-1).values < LEAST_GAP
            if not bool(near.any()):
                break
        away = abs(len(top.indices[:, :top_k].unique()) - wanted)
        if not bool(near.any()) and away < distance:
            best, distance = table, away
        if distance <= OFF / 8 * wanted:
            break
    if distance == float("inf"):
        raise InputError(f"none of {CANDIDATES} tables for seed {seed} keeps the choice clear of ties")
    return best.view(rows, ranks, width).transpose(0, 1).contiguous()


def words_of(logits: Tensor, latents: Tensor) -> Tensor:
    """Logits FP32 [ranks, rows, a] and latents BF16 [ranks, rows, b] as words: int32 [ranks, rows, a + b / 2]."""
    import torch

    return torch.cat([logits.view(torch.int32), latents.contiguous().view(torch.int32)], dim=-1)


def from_words(words: Tensor, logits: int) -> tuple[Tensor, Tensor]:
    """The reverse: FP32 [rows, ranks a] and BF16 [rows, ranks b], ranks side by side."""
    import torch

    rows = words.shape[1]
    first = words[..., :logits].contiguous().view(torch.float32)
    second = words[..., logits:].contiguous().view(torch.bfloat16)
    return first.transpose(0, 1).reshape(rows, -1), second.transpose(0, 1).reshape(rows, -1)
