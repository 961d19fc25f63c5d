"""How the turns of a replay decode: one token a step, or drafts that the target verifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..dispatch import Dispatcher, StepWork
from ..dspark.acceptance import Acceptance
from ..dspark.decoder import SpeculativeDecoder
from ..dspark.drafter import Drafter
from ..greedy import next_tokens
from ..saved import restore, save
from .kept import Context


class Steps(Protocol):
    """What a replay asks of them; a slot is one of the dispatcher's cache."""

    accepted: list[int]
    """Tokens that every request put out in every step."""

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Append tokens; logits [1, V] of what follows."""
        ...

    def join(self, slot: int, logits: Tensor, seed: int) -> int:
        """Decode from here on; the first token."""
        ...

    def step(self, most: Mapping[int, int]) -> dict[int, list[int]]:
        """A step of all that decode, and what each puts out: 1 token or more, as many as ``most`` says at most."""
        ...

    def leave(self, slot: int) -> None:
        """Decode no further."""
        ...

    def save(self, slot: int) -> Context:
        """A copy of a request that decodes no further."""
        ...

    def restore(self, slot: int, context: Context) -> None:
        """Put it back into an empty request."""
        ...


class PlainSteps:
    """The likeliest token, one a step."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._last = dispatcher, dict[int, int]()
        self.accepted: list[int] = []

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor:
        """See :class:`Steps`."""
        return self._dispatcher.run(StepWork(prompts={slot: ids}))[slot]

    def join(self, slot: int, logits: Tensor, seed: int) -> int:
        """See :class:`Steps`."""
        self._last[slot] = int(self._chosen(logits)[0])
        return self._last[slot]

    def step(self, most: Mapping[int, int]) -> dict[int, list[int]]:
        """See :class:`Steps`."""
        slots = list(self._last)
        logits = self._dispatcher.run(StepWork(tokens={slot: [self._last[slot]] for slot in slots}))
        self._dispatcher.cache.accept(slots, [1] * len(slots))
        chosen = self._chosen(torch.cat([logits[slot] for slot in slots])).tolist()
        self._last.update(zip(slots, chosen, strict=True))
        self.accepted += [1] * len(slots)
        return {slot: [token] for slot, token in self._last.items()}

    def _chosen(self, logits: Tensor) -> Tensor:
        return next_tokens(logits, self._dispatcher.weights, self._dispatcher.comm)

    def leave(self, slot: int) -> None:
        """See :class:`Steps`."""
        del self._last[slot]

    def save(self, slot: int) -> Context:
        """See :class:`Steps`."""
        return Context(save(self._dispatcher.cache, slot))

    def restore(self, slot: int, context: Context) -> None:
        """See :class:`Steps`."""
        restore(self._dispatcher.cache, slot, context.saved)


class DraftedSteps:
    """Drafts, verified by the target; the drafter's rows come and go with the target's."""

    def __init__(
        self, dispatcher: Dispatcher, drafter: Drafter, acceptance: Acceptance, *, drafts: int, temperature: float = 0.0
    ) -> None:
        """As :class:`~k3lab.decode.dspark.decoder.SpeculativeDecoder`."""
        self._decoder = SpeculativeDecoder(
            dispatcher, drafter, acceptance, drafts=drafts, draft_temperature=temperature
        )
        self.accepted: list[int] = []

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor:
        """See :class:`Steps`."""
        return self._decoder.prefill({slot: ids})[slot]

    def join(self, slot: int, logits: Tensor, seed: int) -> int:
        """See :class:`Steps`."""
        return self._decoder.join({slot: logits}, [seed])[0]

    def step(self, most: Mapping[int, int]) -> dict[int, list[int]]:
        """See :class:`Steps`."""
        slots = [one.slot for one in self._decoder.requests]
        out = self._decoder.step([min(most[slot], self._decoder.drafts + 1) for slot in slots])
        self.accepted += map(len, out)
        return dict(zip(slots, out, strict=True))

    def leave(self, slot: int) -> None:
        """See :class:`Steps`."""
        self._decoder.requests = [one for one in self._decoder.requests if one.slot != slot]

    def save(self, slot: int) -> Context:
        """See :class:`Steps`."""
        return Context(save(self._decoder.dispatcher.cache, slot), tuple(self._decoder.drafter.save(slot)))

    def restore(self, slot: int, context: Context) -> None:
        """See :class:`Steps`."""
        restore(self._decoder.dispatcher.cache, slot, context.saved)
        self._decoder.drafter.restore(slot, context.drafter)
