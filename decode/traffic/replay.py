"""Replaying sessions on a backend: turns queue for rows, prompts are prefilled, rows decode together, contexts come back.

A turn that is due takes a free row, in order of being due. What its session had before is put back where it was kept
(KV rows and KDA state), else computed again and counted. Its prompt is then prefilled whole, while the others wait; a
step decodes all rows. A turn that ends leaves its row, and its context is kept in host memory until the next one.
Every turn decodes as many tokens as the file says, whatever they are; with drafts its last step is cut to them. Of a group every
rank replays; they do the same in the same order, since one time decides (:meth:`~k3lab.decode.traffic.clock.Clock.shared`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...kernels import InputError
from ...kernels.collectives import StandIn
from ..dispatch import Dispatcher
from .clock import Clock
from .kept import Kept
from .sessions import Session, Traffic
from .steps import PlainSteps, Steps


@dataclass(frozen=True)
class Served:
    """One turn, times in seconds of the replay's clock."""

    session: str
    turn: int
    reused: int
    """Tokens of the context that were put back."""
    prefilled: int
    """Tokens that were computed before the first one came out."""
    output: int
    due: float
    begun: float
    first: float
    """When the first token was out."""
    ended: float
    prefill_s: float

    @property
    def context(self) -> int:
        """Tokens at the end."""
        return self.reused + self.prefilled + self.output

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


@dataclass
class _Live:
    session: Session
    turn: int
    due: float
    begun: float
    reused: int
    prefilled: int
    prefill_s: float
    first: float
    tokens: list[int]


def _own(session: Session) -> str:
    return f"session {session.name}"


def _system(session: Session) -> str:
    return f"system {session.system}"


def seed_of(name: str) -> int:
    """Of a name's random numbers, on every backend and in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def made_up(name: str, count: int, known: range) -> list[int]:
    """Random ids of a name, among those ``known``: the same for every backend and run."""
    generator = torch.Generator().manual_seed(seed_of(name))
    return torch.randint(known.start, known.stop, (count,), generator=generator).tolist()  # type: ignore[no-any-return]


class Replay:
    """Sessions on their way through a backend; :meth:`run` once.

    Attributes:
        decode_s: seconds in decode steps.
        decode_tokens: tokens that they put out.
        steps: how many there were.
        rates: tokens a second of each.
        how: turns decode.
    """

    def __init__(
        self, dispatcher: Dispatcher, traffic: Traffic, *, rows: int, clock: Clock, keep_bytes: int = 2**34,
        reuse: bool = True, done: Callable[[int, int], None] | None = None,
        steps: Callable[[Dispatcher], Steps] = PlainSteps,
    ) -> None:  # fmt: skip
        """Set up.

        Args:
            dispatcher: runs the steps; its cache is empty and holds ``rows`` requests.
            traffic: the sessions.
            rows: turns at a time.
            clock: the replay's time.
            keep_bytes: host memory for contexts between turns.
            reuse: whether contexts are kept at all; else all is computed again in every turn.
            done: told (turns served, turns).
            steps: how turns decode.

        Raises:
            InputError: a session that is longer than the cache.
        """
        room = dispatcher.cache.max_context
        for one in traffic.sessions:
            if one.context > room:
                raise InputError(f"session {one.name!r} grows to {one.context} tokens; the cache has room for {room}")
        if rows < 1:
            raise InputError(f"rows is {rows}; a replay has 1 or more")
        self._dispatcher, self._traffic, self._rows, self._clock = dispatcher, traffic, rows, clock
        self.how = steps(dispatcher)
        comm, weights = dispatcher.comm, dispatcher.weights
        part = weights.embed.shape[0]
        lone = isinstance(comm, StandIn)  # a rank alone embeds no other ids than those of its part
        self._known = range(comm.rank * part, (comm.rank + 1) * part) if lone else range(weights.card.vocab_size)
        self.kept = Kept(keep_bytes if reuse else 0)
        self._done = done
        self._history: dict[str, list[int]] = {}
        self._live: dict[int, _Live] = {}
        self._waiting: list[tuple[float, int, int]] = []
        """Heap of (due, session, turn)."""
        self.decode_s, self.decode_tokens, self.steps = 0.0, 0, 0
        self.rates: list[float] = []

    def run(self) -> Iterator[Served]:
        """Serve all turns, in the order they end."""
        for index, one in enumerate(self._traffic.sessions):
            heapq.heappush(self._waiting, (one.start_s + one.turns[0].pause_s, index, 0))
        total, served = sum(len(one.turns) for one in self._traffic.sessions), 0
        while self._waiting or self._live:
            if not self._live:
                self._clock.pass_until(self._waiting[0][0])
            self._begin_due()
            for slot in [*self._ended()]:
                served += 1
                yield self._leave(slot)
                if self._done:
                    self._done(served, total)
            if self._live:
                self._step()

    def _begin_due(self) -> None:
        while self._waiting and len(self._live) < self._rows and self._waiting[0][0] <= self._clock.shared():
            due, index, turn = heapq.heappop(self._waiting)
            self._begin(self._traffic.sessions[index], turn, due)

    def _begin(self, session: Session, turn: int, due: float) -> None:
        cache, known = self._dispatcher.cache, self._known
        begun, slot = self._clock.now(), cache.add()
        if turn == 0:
            self._history[session.name] = made_up(_system(session), session.system_tokens, known)
        history = self._history[session.name]
        history += made_up(f"{session.name} {turn}", session.turns[turn].prompt, known)
        saved = self.kept.get(_own(session) if turn else _system(session))
        if saved is not None:
            self.how.restore(slot, saved.to(cache.context.device))
        reused = cache.length(slot)
        share = session.system is not None and turn == 0 and reused == 0 and session.system_tokens
        if share:  # the first of its kind leaves the state behind the system prompt to the others
            self.how.prefill(slot, history[: session.system_tokens])
            self.kept.put(_system(session), self.how.save(slot))
        logits = self.how.prefill(slot, history[cache.length(slot) :])
        token = self.how.join(slot, logits, seed_of(f"sampling {session.name} {turn}"))
        first = self._clock.now()
        self._live[slot] = _Live(
            session, turn, due, begun, reused, len(history) - reused, first - begun, first, [token]
        )

    def _step(self) -> None:
        begun = self._clock.now()
        out = self.how.step(
            {slot: one.session.turns[one.turn].output - len(one.tokens) for slot, one in self._live.items()}
        )
        for slot, tokens in out.items():
            self._live[slot].tokens += tokens
        took, count = self._clock.now() - begun, sum(map(len, out.values()))
        self.decode_s += took
        self.decode_tokens += count
        self.steps += 1
        if took > 0:
            self.rates.append(count / took)

    def _ended(self) -> list[int]:
        return [slot for slot, one in self._live.items() if len(one.tokens) >= one.session.turns[one.turn].output]

    def _leave(self, slot: int) -> Served:
        one, cache = self._live.pop(slot), self._dispatcher.cache
        ended = self._clock.shared()
        self.how.leave(slot)
        # the last token was put out and not yet seen: the next turn's prompt begins with it
        self._history[one.session.name] += one.tokens
        index = self._traffic.sessions.index(one.session)
        if one.turn + 1 < len(one.session.turns):
            self.kept.put(_own(one.session), self.how.save(slot))
            due = ended + one.session.turns[one.turn + 1].pause_s
            heapq.heappush(self._waiting, (due, index, one.turn + 1))
        else:
            self.kept.drop(_own(one.session))
            del self._history[one.session.name]
        cache.release(slot)
        return Served(
            one.session.name, one.turn, one.reused, one.prefilled, len(one.tokens), one.due, one.begun, one.first, ended,
            one.prefill_s,
        )  # fmt: skip
