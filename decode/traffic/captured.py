"""Turns that decode from captured steps, as batches do: without them a GPU waits for the host's launches.

Without a GPU the same bodies run directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..dispatch import Dispatcher
from ..dspark.acceptance import Acceptance
from ..dspark.captured import SpeculationGraphs
from ..dspark.decoder import Request
from ..dspark.drafter import Drafter
from ..graphs import sizes_of
from ..greedy import GreedyGraph
from ..operators import Operators
from .steps import DraftedSteps, PlainSteps


@dataclass(frozen=True)
class Served:
    """What decodes a step, by its rows, and who counts steps."""

    rows: int
    """Turns at a time."""
    operators: Callable[[int], Operators]
    """Requests of a step to the operators that serve it."""
    note: Callable[[int], None]
    """Told of every step with how many requests it had."""


class CapturedPlainSteps(PlainSteps):
    """As :class:`~k3lab.decode.traffic.steps.PlainSteps`."""

    def __init__(self, dispatcher: Dispatcher, served: Served) -> None:
        """Capture a step for every number of turns; the dispatcher's cache has a padding slot."""
        super().__init__(dispatcher)
        self._served = served
        # the largest first, as everywhere
        self._graphs = {
            size: GreedyGraph(
                dispatcher.weights, dispatcher.cache, size, served.operators(size), dispatcher.comm
            )
            for size in reversed(sizes_of(1, served.rows))
        }  # fmt: skip
        self._held: list[tuple[int, int]] = []
        """Slots and last tokens that the graph of the last step is at."""

    def step(self, most: Mapping[int, int]) -> dict[int, list[int]]:
        """See :class:`~k3lab.decode.traffic.steps.Steps`."""
        slots = list(self._last)
        graph = self._graphs[min(size for size in self._graphs if size >= len(slots))]
        if self._held != [*self._last.items()]:
            graph.begin(slots, torch.tensor([*self._last.values()]))
        out = dict(zip(slots, graph.step(), strict=True))
        graph.operators.check()
        self._served.note(len(slots))
        self._last.update({slot: token for slot, (token,) in out.items()})
        self._held = [*self._last.items()]
        self.accepted += [1] * len(slots)
        return out


class CapturedDraftedSteps(DraftedSteps):
    """As :class:`~k3lab.decode.traffic.steps.DraftedSteps`; drafts are made anew where turns come or go."""

    def __init__(
        self, dispatcher: Dispatcher, drafter: Drafter, acceptance: Acceptance, served: Served, *, drafts: int,
        temperature: float = 0.0,
    ) -> None:  # fmt: skip
        """Capture a step for every number of turns; the dispatcher's cache has a padding slot."""
        super().__init__(dispatcher, drafter, acceptance, drafts=drafts, temperature=temperature)
        self._served, width = served, drafts + 1
        self._graphs = SpeculationGraphs(
            dispatcher.weights, dispatcher.cache, dispatcher.comm, lambda rows: served.operators(rows // width), drafter, acceptance,
            drafts=drafts, sizes=sizes_of(width, served.rows * width), draft_temperature=temperature,
        )  # fmt: skip
        self._held: list[Request] = []
        """Those that the last step was of: another turn of an equal slot has drafts of its own."""

    def step(self, most: Mapping[int, int]) -> dict[int, list[int]]:
        """See :class:`~k3lab.decode.traffic.steps.Steps`."""
        own, cache = self._decoder.requests, self._decoder.dispatcher.cache
        slots = [one.slot for one in own]
        if [*map(id, own)] != [*map(id, self._held)]:
            self._graphs.begin(slots, [one.last for one in own], [one.seed for one in own])
            self._held = [*own]
        made, stepped = {}, self._graphs.step()
        self._served.operators(len(own)).check()
        for one, out in zip(own, stepped, strict=True):
            kept = out[: most[one.slot]]
            if len(kept) < len(out):  # its turn ends here: what lies beyond never happened
                cache.cut(one.slot, len(out) - len(kept))
            made[one.slot] = kept
            one.last = kept[-1]
            self.accepted.append(len(kept))
        self._served.note(len(slots))
        return made
