"""What plays ranks without a GPU: the twin's arithmetic in BF16 over the group, a clock that counts, and faults on demand.

``FAKE_RANKS`` names a fault of rank 1: ``dies``, ``late``, ``wrong`` (an output), ``changes`` (a later step).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from k3lab.kernels import SMALL_K3, family
from k3lab.tuning.ranks.cases import Case, twin

LATE_S = 5.0


class FakePlayed:
    """The twin's outputs, rounded; in the ``split`` case the same."""

    def __init__(self, case: Case, inputs: list[dict], group: Any, fault: str) -> None:
        self.case, self.inputs, self.group, self.fault, self.launches = case, inputs, group, fault, 0
        specs = family(case.family).output_specs(case.problem)
        self.outputs = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in specs.items()}

    def launch(self, which: int) -> None:
        self.launches += 1
        if self.launches == 5 and self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.launches == 5 and self.fault == "late":
            time.sleep(LATE_S)
        for name, value in twin(self.case, self.inputs[which], self.group.host).items():
            self.outputs[name].copy_(value)
        wrong = self.fault == "wrong" or (self.fault == "changes" and self.launches == 5)
        if wrong:
            next(iter(self.outputs.values()))[0, 0] += 1

    def settle(self) -> None:
        """Nothing is under way."""


class FakeClock:
    """Rank r takes 10 + r us a call; a replay makes one of its calls, and is counted."""

    index = None

    def __init__(self, group: Any) -> None:
        self.group, self.replays = group, 0

    def capture(self, calls: Any, total: int) -> Any:
        for call in calls:
            call()

        def replay() -> int:
            calls[self.replays % len(calls)]()
            self.replays += 1
            return total

        return replay

    def samples_ns(self, replay: Any, count: int) -> list[float]:
        return [1000.0 * (10 + self.group.rank) * replay() for _ in range(count)]


class FakePlayer:
    """See :class:`k3lab.tuning.ranks.gpu.GpuPlayer`."""

    real, device = False, "cpu"

    def __init__(self, request: Any, group: Any, fault: str | None = None) -> None:
        self.request, self.group, self.clock = request, group, FakeClock(group)
        fault = os.environ.get("FAKE_RANKS", "") if fault is None else fault
        self.fault = fault if group.rank == 1 else ""

    def describe(self) -> dict[str, Any]:
        gpu = {"index": self.group.rank, "name": "NVIDIA H200", "card": "H200"}
        return {"gpu": gpu, "links": {"nvlinks": [18, 18]}}

    def cases(self) -> tuple[list[Case], list[dict]]:
        found = [
            Case(name, "fake", exchange, family(name).problem(SMALL_K3, tp=self.group.size, rows=rows), {})
            for name in self.request.families
            for rows in self.request.rows
            for exchange in ("one_shot", "two_shot")
        ]
        return found, [{"family": "router", "engine": "other", "rows": 64, "why": "too many"}]

    def prepare(self, found: list[Case]) -> None:
        self.group.meet(patient=True)

    def unfit(self, case: Case) -> str | None:
        return "too large" if case.problem.rows == 64 else None

    def play(self, case: Case, inputs: list[dict]) -> FakePlayed:
        return FakePlayed(case, inputs, self.group, self.fault)

    def calls(self, case: Case, played: FakePlayed, inputs: dict) -> Any:
        yield "real", [lambda: played.launch(0)]
        yield "loopback", [lambda: None]

    def beside(self, found: list[Case]) -> Any:
        for rows in self.request.rows:
            yield {"what": "symm_mem_two_shot", "rows": rows, "why": "not here"}, []
            yield {"what": "nccl", "rows": rows}, [self.group.meet]
            for name in self.request.families:
                yield {"what": "nccl_chain", "family": name, "rows": rows}, [self.group.meet]
