"""Rounds of requests that come at once, timed: prompts one after the other, then steps of all until each has its tokens.

Only prompts and steps count: capturing graphs, making up contexts and drafting anew as a request leaves lie outside. A
request's time is the sum of what ran between its coming, which is the round's beginning, and its end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..traffic.seen import spread

if TYPE_CHECKING:
    from .loops import Loop


@dataclass(frozen=True)
class Finished:
    """One request; seconds from the beginning of its round."""

    round: int
    request: int
    prompt: int
    output: int
    first_s: float
    """When its first token was out."""
    latency_s: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


@dataclass
class Timing:
    """What a bench took, beside its requests."""

    prefill_s: list[float] = field(default_factory=list)
    prefilled: int = 0
    """Tokens of prompts."""
    step_s: list[float] = field(default_factory=list)
    decoded: int = 0
    """Tokens that steps put out and requests had asked for."""
    accepted: list[int] = field(default_factory=list)
    """Tokens of every request and step."""
    drafting_s: list[float] = field(default_factory=list)
    tokens: Any = field(default_factory=hashlib.sha256)
    """Of all that was put out: the same digest, the same tokens."""


@dataclass
class _Live:
    request: int
    slot: int
    seed: int
    last: int
    out: int
    first_s: float
    steps: int = 0


def rounds(
    loop: Loop, prompts: Callable[[int], Sequence[Sequence[int]]], tokens: int, count: int, *, timing: Timing, seed: int = 0,
    check: Callable[[], None] = lambda: None, served: Callable[[int], None] = lambda _requests: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Finished]:  # fmt: skip
    """Run ``count`` rounds, after one request that is not counted; gives requests as they end.

    Args:
        loop: decodes.
        prompts: of a round.
        tokens: of every request.
        count: of rounds.
        timing: is filled.
        seed: of the first request; the next ones follow.
        check: is called after every step, outside its time.
        served: is told of every step with how many requests it had.
        clock: seconds.
    """
    _warm(loop, prompts(0)[0], tokens, seed)
    for number in range(count):
        yield from _round(loop, number, prompts(number), tokens, timing, seed, check, served, clock)


def _warm(loop: Loop, prompt: Sequence[int], tokens: int, seed: int) -> None:
    slot = loop.open()
    last = loop.first(slot, prompt, seed)
    if tokens > 1:
        loop.begin([slot], [last], [seed])
        loop.step()
    loop.cache.release(slot)


def _round(
    loop: Loop, number: int, prompts: Sequence[Sequence[int]], tokens: int, timing: Timing, seed: int,
    check: Callable[[], None], served: Callable[[int], None], clock: Callable[[], float],
) -> Iterator[Finished]:  # fmt: skip
    elapsed, live = 0.0, list[_Live]()
    slots = [loop.open() for _ in prompts]
    for request, (slot, ids) in enumerate(zip(slots, prompts, strict=True)):
        own, begun = seed + number * len(prompts) + request, clock()
        token = loop.first(slot, ids, own)
        took = clock() - begun
        elapsed += took
        timing.prefill_s.append(took)
        timing.prefilled += len(ids)
        timing.tokens.update(f"{number} {request} {token}\n".encode())
        live.append(_Live(request, slot, own, token, 1, elapsed))
    changed = True
    while True:
        for one in [one for one in live if one.out >= tokens]:
            live.remove(one)
            loop.cache.release(one.slot)
            changed = True
            yield Finished(number, one.request, len(prompts[one.request]), one.out, one.first_s, elapsed, one.steps)
        if not live:
            return
        if changed:
            loop.begin([one.slot for one in live], [one.last for one in live], [one.seed for one in live])
            if len(live) == len(prompts):
                timing.drafting_s += loop.drafting_s()
            changed = False
        begun = clock()
        out = loop.step()
        took = clock() - begun
        check()
        served(len(live))
        elapsed += took
        timing.step_s.append(took)
        for one, put_out in zip(live, out, strict=True):
            kept = put_out[: tokens - one.out]
            timing.accepted.append(len(put_out))
            timing.decoded += len(kept)
            timing.tokens.update(f"{number} {one.request} {' '.join(map(str, kept))}\n".encode())
            one.last, one.out, one.steps = put_out[-1], one.out + len(kept), one.steps + 1


def seen(requests: Sequence[Finished], timing: Timing) -> dict[str, Any]:
    """What they took, apart: decode throughput has no prefill in it, output throughput has; nothing is a zero for none.

    A user's rate is of one request's tokens after the first.
    """
    rates = [(one.output - 1) / (one.latency_s - one.first_s) for one in requests if one.latency_s > one.first_s]
    prefill_s, step_s = sum(timing.prefill_s), sum(timing.step_s)
    output = sum(one.output for one in requests)
    return {
        "requests": len(requests),
        "output_tokens": output,
        "decode_tokens_a_s": timing.decoded / step_s if step_s else None,
        "user_tokens_a_s": spread(rates),
        "time_to_first_token_s": spread([one.first_s for one in requests]),
        "prefill_tokens_a_s": timing.prefilled / prefill_s if prefill_s else None,
        "output_tokens_a_s": output / (prefill_s + step_s) if prefill_s + step_s else None,
        "request_latency_s": spread([one.latency_s for one in requests]),
        "step_s": spread(timing.step_s),
        "steps": len(timing.step_s),
        "mean_tokens_a_step": sum(timing.accepted) / len(timing.accepted) if timing.accepted else None,
        "drafting_s": spread(timing.drafting_s),
        "tokens_digest": timing.tokens.hexdigest()[:16],
    }
