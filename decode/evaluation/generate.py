"""Outputs of a backend: requests join as others end, and each output depends on its prompt and seed alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ...kernels import InputError
from ..dispatch import Dispatcher, StepWork
from ..dspark.acceptance import Standard
from .outputs import Asked, Output


def generate(
    dispatcher: Dispatcher, asked: Sequence[Asked], *, rows: int, most: int, temperature: float = 0.0,
    stops: Collection[int] = (),
) -> Iterator[tuple[int, Output]]:  # fmt: skip
    """Answer all, up to ``rows`` at a time; gives number and output in the order they end.

    Args:
        dispatcher: runs the steps; its cache must be empty and hold ``rows`` requests.
        asked: prompts and seeds.
        rows: requests in a step at most.
        most: tokens of an output.
        temperature: 0 takes the likeliest token.
        stops: tokens that end an output.

    Raises:
        InputError: rows or most below 1, an empty prompt, or one that the cache has no room for.
    """
    if rows < 1 or most < 1:
        raise InputError(f"rows {rows}, tokens {most}: both are 1 or more")
    cache, device = dispatcher.cache, dispatcher.weights.device
    for number, one in enumerate(asked):
        if not one.ids or len(one.ids) + most > cache.max_context:
            raise InputError(
                f"prompt {number} has {len(one.ids)} tokens; with {most} put out, 1 to {cache.max_context - most} fit"
            )
    sampler, waiting = Standard(temperature), list(enumerate(asked))[::-1]
    live: dict[int, int] = {}
    outputs = {number: Output() for number in range(len(asked))}

    def step(work: StepWork) -> dict[int, torch.Tensor]:
        """Run it; a kernel that gave a wait up has put out no answer."""
        logits = dispatcher.run(work)
        dispatcher.operators_of(work.shape).check()
        return logits

    def put_out(logits: dict[int, torch.Tensor]) -> None:
        """Sample a token for every slot, at the place behind its context."""
        slots = list(logits)
        rows_of = torch.cat([logits[slot] for slot in slots])
        seeds = torch.tensor([asked[live[slot]].seed for slot in slots], device=device)
        places = torch.tensor([cache.length(slot) for slot in slots], device=device)
        chosen = sampler.first(rows_of, seeds, places)
        own = rows_of.double().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
        for slot, token, logprob in zip(slots, chosen.tolist(), own, strict=True):
            output = outputs[live[slot]]
            output.tokens.append(token)
            output.logprobs.append(logprob)
            output.stopped = token in stops

    def ended() -> Iterator[tuple[int, Output]]:
        for slot in [slot for slot, n in live.items() if outputs[n].stopped or len(outputs[n].tokens) == most]:
            cache.release(slot)
            number = live.pop(slot)
            yield number, outputs[number]

    while waiting or live:
        # prompts go in a step of their own: a mixed one would be left to auto whole
        while waiting and len(live) < rows:
            number, one = waiting.pop()
            slot = cache.add()
            live[slot] = number
            put_out(step(StepWork(prompts={slot: one.ids})))
        yield from ended()
        if live:
            logits = step(StepWork(tokens={slot: [outputs[n].tokens[-1]] for slot, n in live.items()}))
            cache.accept(list(live), [1] * len(live))
            put_out(logits)
            yield from ended()
