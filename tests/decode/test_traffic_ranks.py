"""Sessions on all ranks of a group: one time decides who runs, and a wait that was given up ends the replay."""

from __future__ import annotations

from typing import Any

import pytest
from k3lab.decode.caches import DecodeCache
from k3lab.decode.dispatch import Dispatcher
from k3lab.decode.operators import ReferenceOperators
from k3lab.decode.packing import pack
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.traffic.captured import CapturedPlainSteps, Served
from k3lab.decode.traffic.clock import WallClock
from k3lab.decode.traffic.replay import Replay
from k3lab.decode.traffic.sessions import Session, Traffic, Turn, traffic_of
from k3lab.decode.weights import RankWeights
from k3lab.kernels import ModelCard
from k3lab.kernels.collectives import Collectives, SingleRank, run_virtual_ranks

from .evaluation_case import dispatcher, weights_of

TALK = traffic_of(
    [
        Session("a", 0.0, "s", 7, (Turn(0.0, 5, 6), Turn(9.0, 2, 3))),
        Session("b", 45.0, "s", 7, (Turn(0.0, 3, 4),)),
        Session("c", 70.0, None, 0, (Turn(0.0, 4, 2),)),
    ]
)


class Uneven(WallClock):
    """Goes on by ten whenever it is asked, and on every rank at another speed."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__(host=comm if comm.size > 1 else None)
        self.at, self._speed = 0.0, 1 + 3 * comm.rank

    def now(self) -> float:
        self.at += 10 * self._speed
        return self.at

    def pass_until(self, moment: float) -> None:
        self.at = max(self.at, moment)


def replayed(
    comm: Collectives, weights: RankWeights, traffic: Traffic
) -> tuple[list[tuple[Any, ...]], list[list[int]]]:
    """Turns in the order they ended, and the requests of every step."""
    steps: list[list[int]] = []
    runs = dispatcher(weights, ReferenceOperators(weights.card), traffic.context, 2, comm)
    inner: Any = Dispatcher.run

    class Noted(Dispatcher):
        def run(self, work: Any, *more: Any, **other: Any) -> Any:
            steps.append([*work.prompts, *(100 + slot for slot in work.tokens)])
            return inner(self, work, *more, **other)

    runs.__class__ = Noted
    replay = Replay(runs, traffic, rows=2, clock=Uneven(comm))
    return [(one.session, one.turn, one.reused, one.prefilled, one.output) for one in replay.run()], steps


def test_ranks_of_a_group_do_the_same_in_the_same_order(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    alone = replayed(SingleRank(), weights_of(tiny_tensors, tiny), TALK)

    def rank(comm: Collectives) -> Any:
        return replayed(comm, pack(shard(tiny_tensors, tiny, tp=2, rank=comm.rank), tiny, tp=2, rank=comm.rank), TALK)

    first, second = run_virtual_ranks(2, rank)
    assert first == second == alone
    assert len(alone[0]) == 4 and any(len(step) == 2 for step in alone[1])


def test_a_wait_that_was_given_up_ends_a_replay(tiny: ModelCard, tiny_tensors: ModelTensors) -> None:
    weights, asked = weights_of(tiny_tensors, tiny), list[int]()

    class Late(ReferenceOperators):
        def check(self) -> None:
            asked.append(1)
            if len(asked) == 3:
                raise RuntimeError("rank 3 did not come")

    cache = DecodeCache(tiny, max_requests=2, max_context=TALK.context, dtype=weights.dtype, padding=True)
    runs = Dispatcher(weights, cache, SingleRank(), auto=ReferenceOperators(tiny))
    late = Served(2, lambda _requests: Late(tiny), lambda _requests: None)
    replay = Replay(runs, TALK, rows=2, clock=Uneven(SingleRank()), steps=lambda own: CapturedPlainSteps(own, late))
    with pytest.raises(RuntimeError, match="rank 3 did not come"):
        list(replay.run())
    assert replay.steps == 2
