"""Which drafts are accepted: by the target (standard), or by given rates (synthetic, for timing; always labelled).

Rows of logits: row i of a request scores its draft i, row N what follows the last. Judged by every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import InputError
from ..likeliest import likeliest as likeliest
from .counter import ACCEPT, RESIDUAL, SAMPLE, gumbel, uniforms
from .reference import Drafts

PLACEHOLDER = -1
"""A draft that only fills up: always rejected."""


@dataclass(frozen=True)
class Verified:
    """What a verify step puts out."""

    tokens: Tensor
    """int64 [B, N + 1]: accepted drafts, then one token of the target's; what lies behind means nothing."""
    counts: Tensor
    """int64 [B]: 1 to N + 1 tokens count; as many rows of the step do."""

    def lists(self) -> list[list[int]]:
        """The tokens that count, request by request."""
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)]


def _out(drafts: Tensor, accepted: Tensor, others: Tensor) -> Verified:
    """Drafts up to the first that is not accepted; there, or behind the last, the token of ``others`` [B, N + 1]."""
    kept = accepted.long().cumprod(dim=1)
    count = kept.sum(1)
    place = torch.arange(others.shape[1], device=drafts.device)
    filled = torch.cat([drafts, drafts.new_zeros(drafts.shape[0], 1)], dim=1)
    return Verified(torch.where(place < count[:, None], filled, others), count + 1)


class Acceptance(Protocol):
    """A way to accept drafts."""

    @property
    def label(self) -> str:
        """What must stand beside every number that was made with it."""
        ...

    @property
    def greedy(self) -> bool:
        """Whether it asks no more of the target than the likeliest token of each row: then :meth:`verify_tokens` does."""
        ...

    def first(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The token after a prompt: logits [B, V] to int64 [B]; ``positions`` int64 [B] are the tokens'."""
        ...

    def verify(self, drafts: Drafts, logits: Tensor, seeds: Tensor, positions: Tensor) -> Verified:
        """Judge drafts.

        Args:
            drafts: [B, N].
            logits: of the target, [B, N + 1, V].
            seeds: int64 [B].
            positions: int64 [B, N + 1] of the tokens that the rows predict.
        """
        ...

    def verify_tokens(self, drafts: Drafts, best: Tensor, seeds: Tensor, positions: Tensor) -> Verified:
        """The same where :attr:`greedy`, from the target's likeliest tokens: whole numbers [B, N + 1]."""
        ...


@dataclass(frozen=True)
class Standard:
    """By the target: outputs are distributed as without drafts, and equal to them where the temperature is 0."""

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}, must be 0 (the likeliest token) or more")

    @property
    def label(self) -> str:
        """See :class:`Acceptance`."""
        how = f"sampled at temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"standard acceptance, {how}"

    @property
    def greedy(self) -> bool:
        """See :class:`Acceptance`."""
        return not self.temperature

    def first(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See :class:`Acceptance`."""
        return self._sample(logits, seeds, positions, SAMPLE)

    def verify_tokens(self, drafts: Drafts, best: Tensor, seeds: Tensor, positions: Tensor) -> Verified:
        """Accepted while a draft is the likeliest token."""
        real = drafts.tokens != PLACEHOLDER
        return _out(drafts.tokens, (drafts.tokens == best[:, : real.shape[1]]) & real, best)

    def _sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
        if not self.temperature:
            return likeliest(logits)
        scores = logits.to(torch.float64) / self.temperature
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return likeliest(scores + gumbel(seeds, positions, purpose, ids))

    def verify(self, drafts: Drafts, logits: Tensor, seeds: Tensor, positions: Tensor) -> Verified:
        """Greedy: accepted while a draft is the likeliest token. Sampled: with probability min(1, p / q)."""
        if self.greedy:
            return self.verify_tokens(drafts, likeliest(logits), seeds, positions)
        count = drafts.tokens.shape[1]
        real = drafts.tokens != PLACEHOLDER
        target = torch.softmax(logits.to(torch.float64) / self.temperature, dim=-1)
        ids = drafts.tokens.clamp(min=0)[..., None]
        if drafts.logits is None:  # the likeliest token was drafted, with certainty
            drafted = torch.zeros_like(target[:, :count]).scatter_(-1, ids, 1.0)
        else:
            drafted = torch.softmax(drafts.logits.to(torch.float64) / self.temperature, dim=-1)
        drafted = torch.where(real[..., None], drafted, 0.0)
        chance = uniforms(seeds[:, None], positions[:, :count], ACCEPT)
        p, q = target[:, :count].gather(-1, ids).squeeze(-1), drafted.gather(-1, ids).squeeze(-1)
        accepted = (p > chance * q) & real
        rest = (target[:, :count] - drafted).clamp(min=0)
        # nothing left means p equals q everywhere: such a draft is accepted, and this row is not looked at
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target[:, :count])
        noise = gumbel(seeds[:, None].expand(-1, count), positions[:, :count], RESIDUAL, torch.arange(rest.shape[-1], device=rest.device))  # fmt: skip
        after = likeliest(rest.log() + noise)
        bonus = self._sample(logits[:, count], seeds, positions[:, count], SAMPLE)
        return _out(drafts.tokens, accepted, torch.cat([after, bonus[:, None]], dim=1))


def rates_of_length(length: float, drafts: int) -> tuple[float, ...]:
    """Unconditional rates of so many mean tokens a step, the target's own counted: as many sure drafts as fit, then the rest.

    Raises:
        InputError: the length lies outside 1..drafts + 1.
    """
    if not (math.isfinite(length) and 1 <= length <= drafts + 1):
        raise InputError(
            f"a synthetic acceptance length of {length:g} with {drafts} drafts; it lies in 1..{drafts + 1}"
        )
    sure = int(length - 1)
    part = length - 1 - sure
    return tuple(1.0 if at < sure else part if at == sure else 0.0 for at in range(drafts))


@cache
def _on(rates: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept where they are read: nothing can be copied there while a graph is captured."""
    return torch.tensor(rates, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Synthetic:
    """By given rates, whatever the target says: for timing. Accepted positions put out the draft."""

    rates: tuple[float, ...]
    """Probability that draft i and all before it are accepted; none larger than the one before it."""
    base: Standard = Standard()
    """Where the tokens come from that are no drafts."""

    def __post_init__(self) -> None:
        rising = any(later > earlier for earlier, later in zip((1.0, *self.rates), self.rates, strict=False))
        if not self.rates or rising or not all(0 <= rate <= 1 for rate in self.rates):
            raise InputError(f"synthetic acceptance rates {list(self.rates)}: they lie in 0..1 and do not rise")

    @classmethod
    def of_length(cls, length: float, drafts: int) -> Synthetic:
        """Rates with so many mean tokens a step; see :func:`rates_of_length`."""
        return cls(rates_of_length(length, drafts))

    @property
    def length(self) -> float:
        """Mean tokens a step."""
        return 1 + sum(self.rates)

    @property
    def label(self) -> str:
        """See :class:`Acceptance`."""
        return f"SYNTHETIC acceptance of mean length {self.length:g}: what is put out does not follow the target"

    @property
    def conditional(self) -> tuple[float, ...]:
        """Probability that draft i is accepted, if all before it were."""
        before: Sequence[float] = (1.0, *self.rates)
        return tuple(rate / earlier if earlier else 0.0 for earlier, rate in zip(before, self.rates, strict=False))

    @property
    def greedy(self) -> bool:
        """See :class:`Acceptance`: as the base, whose tokens are put out."""
        return self.base.greedy

    def first(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See :class:`Acceptance`."""
        return self.base.first(logits, seeds, positions)

    def verify(self, drafts: Drafts, logits: Tensor, seeds: Tensor, positions: Tensor) -> Verified:
        """See :meth:`verify_tokens`; tokens that are no drafts come from the base.

        Raises:
            InputError: other than one rate a draft.
        """
        shape = positions.shape
        others = self.base.first(
            logits.flatten(0, 1), seeds[:, None].expand(shape).flatten(), positions.flatten()
        ).view(shape)  # fmt: skip
        return self.verify_tokens(drafts, others, seeds, positions)

    def verify_tokens(self, drafts: Drafts, best: Tensor, seeds: Tensor, positions: Tensor) -> Verified:
        """Draft i is accepted where its own random number is below its conditional rate, placeholders never.

        Raises:
            InputError: other than one rate a draft.
        """
        count = drafts.tokens.shape[1]
        if count != len(self.rates):
            raise InputError(f"{count} drafts a request, but {len(self.rates)} synthetic acceptance rates")
        chance = uniforms(seeds[:, None], positions[:, :count], ACCEPT)
        rates = _on(self.conditional, best.device)
        accepted = (chance < rates) & (drafts.tokens != PLACEHOLDER)
        return _out(drafts.tokens, accepted, best)


def acceptance(drafts: int, temperature: float = 0.0, length: float | None = None) -> Acceptance:
    """Standard, or synthetic where a mean length is given.

    Raises:
        InputError: a length or a temperature that cannot be.
    """
    base = Standard(temperature)
    return base if length is None else Synthetic(rates_of_length(length, drafts), base)
