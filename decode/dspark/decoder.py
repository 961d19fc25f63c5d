"""Speculative decoding of a batch: draft, verify, accept, on either backend; all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels import InputError
from ..dispatch import Dispatcher, StepWork
from ..step import MAX_VERIFY
from .acceptance import Acceptance
from .drafter import Drafter


@dataclass
class Request:
    """One of the batch."""

    slot: int
    seed: int
    last: int
    """Its last token, which the target has not seen."""
    tokens: list[int]
    """All that was put out, the one after the prompt first."""
    accepted: list[int] = field(default_factory=list)
    """Drafts accepted, step by step."""


class SpeculativeDecoder:
    """Requests that decode together, every one with as many drafts."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        drafter: Drafter,
        acceptance: Acceptance,
        *,
        drafts: int,
        draft_temperature: float = 0.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Set up.

        Args:
            dispatcher: runs the target's steps; with it goes the backend.
            drafter: of the same cache.
            acceptance: whose label is told to ``say`` at once and stands in every report.
            drafts: a request and step.
            draft_temperature: 0 drafts the likeliest tokens.
            say: is given lines for the user.

        Raises:
            InputError: more drafts than the drafter or a verify step takes, or parts that do not belong together.
        """
        drafter.weights.card.check_drafts(drafts)
        if drafts + 1 > min(MAX_VERIFY, dispatcher.cache.max_verify):
            raise InputError(
                f"{drafts} drafts make steps of {drafts + 1} tokens a request; this cache keeps snapshots for"
                f" {dispatcher.cache.max_verify}, a step takes {MAX_VERIFY}"
            )
        if drafter.cache is not dispatcher.cache:
            raise InputError("the drafter must lie beside the cache that the target's steps use")
        self.dispatcher, self.drafter, self.acceptance = dispatcher, drafter, acceptance
        self.drafts, self.draft_temperature = drafts, draft_temperature
        self.requests: list[Request] = []
        self.prompts: list[list[int]] = []
        if say:
            say(acceptance.label)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.drafter.target.device)

    def _run(self, work: StepWork, *, tokens: bool = False) -> tuple[dict[int, Tensor], dict[int, list[Tensor]]]:
        """Logits or likeliest tokens, and for each tapped layer all rows of the request, by slot."""
        wanted = self.drafter.taps
        seen: dict[int, dict[int, list[Tensor]]] = {slot: {} for slot in (*work.prompts, *work.tokens)}

        def tap(slot: int) -> Callable[[int, Tensor], None]:
            def note(layer: int, residual: Tensor) -> None:
                if layer in wanted:
                    seen[slot].setdefault(layer, []).append(residual.clone())

            return note

        out = self.dispatcher.run(work, tap, tokens=tokens)
        return out, {slot: [torch.cat(own[layer]) for layer in wanted] for slot, own in seen.items()}

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        prepare: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Prefill prompts, each in a slot of its own, and put out the token after each.

        ``prepare`` brings the empty slots to a context that the prompts follow.

        Raises:
            InputError: other than one seed a prompt, or what the cache and prefill refuse.
        """
        if len(prompts) != len(seeds):
            raise InputError(f"{len(prompts)} prompts and {len(seeds)} seeds; one seed a prompt")
        cache = self.dispatcher.cache
        self.prompts += [list(prompt) for prompt in prompts]
        slots = [cache.add() for _ in prompts]
        if prepare:
            prepare(slots)
        self.join(self.prefill(dict(zip(slots, prompts, strict=True))), seeds)

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append prompts to requests of the cache, for target and drafter; slot to logits [1, V] of what follows."""
        starts = {slot: self.dispatcher.cache.length(slot) for slot in prompts}
        logits, residuals = self._run(StepWork(prompts=prompts))
        for slot, start in starts.items():
            self.drafter.inject(slot, start, residuals[slot])
        return logits

    def join(self, logits: Mapping[int, Tensor], seeds: Sequence[int]) -> list[int]:
        """Requests whose context is there decode from now on; the token that each puts out first.

        Args:
            logits: slot to [1, V], of what follows its context.
            seeds: one a slot.
        """
        slots = list(logits)
        after = self._tensor([self.dispatcher.cache.length(slot) for slot in slots])
        first = self.acceptance.first(torch.cat([logits[slot] for slot in slots]), self._tensor(seeds), after).tolist()
        self.requests += [
            Request(slot, seed, token, [token]) for slot, seed, token in zip(slots, seeds, first, strict=True)
        ]
        return first

    def step(self, most: Sequence[int] | None = None) -> list[list[int]]:
        """One step of all requests; what each of them puts out, 1 to drafts + 1 tokens.

        ``most``: tokens at most, request by request, 1 or more; what lies beyond never happened.
        """
        cache, own = self.dispatcher.cache, self.requests
        slots, seeds = [one.slot for one in own], self._tensor([one.seed for one in own])
        drafts = self.drafter.draft(
            slots, self._tensor([one.last for one in own]), self.drafts,
            temperature=self.draft_temperature, seeds=seeds,
        )  # fmt: skip
        starts = [cache.length(slot) for slot in slots]
        work = StepWork({one.slot: [one.last, *row] for one, row in zip(own, drafts.tokens.tolist(), strict=True)})
        greedy = self.acceptance.greedy
        seen, residuals = self._run(work, tokens=greedy)
        # the row of position P predicts the token at P + 1
        positions = self._tensor(starts)[:, None] + torch.arange(1, self.drafts + 2, device=seeds.device)
        verify = self.acceptance.verify_tokens if greedy else self.acceptance.verify
        verified = verify(drafts, torch.stack([seen[slot] for slot in slots]), seeds, positions)
        limits = most or [self.drafts + 1] * len(own)
        tokens = [out[:limit] for out, limit in zip(verified.lists(), limits, strict=True)]
        counts = [len(out) for out in tokens]
        cache.accept(slots, counts)
        for one, start, out, count in zip(own, starts, tokens, counts, strict=True):
            # rejected rows leave nothing: the next step's rows take their place
            self.drafter.inject(one.slot, start, [rows[:count] for rows in residuals[one.slot]])
            one.last = out[-1]
            one.tokens += out
            one.accepted.append(count - 1)
        return tokens

    def to_json(self) -> dict[str, Any]:
        """What was put out, and how many drafts were accepted; the label says by whom."""
        steps = [count for one in self.requests for count in one.accepted]
        return {
            "acceptance": self.acceptance.label, "drafts": self.drafts,
            "tokens": [one.tokens for one in self.requests], "accepted": [one.accepted for one in self.requests],
            "mean_tokens_a_step": 1 + sum(steps) / len(steps) if steps else None,
        }  # fmt: skip
