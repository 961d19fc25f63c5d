"""Between engines: every contestant in every round, and a decision that respects the noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import fake_family
import pytest
import torch
from k3lab.kernels import InputError, health
from k3lab.tuning import between, ceiling, contest
from k3lab.tuning.between import decide, decide_predicted, same_contest
from k3lab.tuning.contest import Lane, time_contest, turns
from k3lab.tuning.policy import CONTEST
from k3lab.tuning.timing import Series

PROBLEM = fake_family.FakeProblem(1, 8)
ORDER = ["triton", "cute_skinny", "cute_mma"]


def test_every_round_has_all_and_begins_with_another() -> None:
    found = turns(5, 3)
    assert [sorted(order) for order in found] == [list(range(5))] * 3
    assert [order[0] for order in found] == [0, 1, 2]


class FakeGraph:
    """Replays take what it is told, in microseconds, one series after the other."""

    def __init__(self, name: str, seen: list[str], *middles: float, spread: float = 0.0) -> None:
        self.name, self.seen, self.middles, self.spread = name, seen, list(middles), spread
        self.buffers: dict[str, torch.Tensor] = {}

    def replayed(self, policy: Any, restore: Any) -> Series:
        warming = policy.warm_ms == contest.WARM_MS
        self.seen.append(f"warm {self.name}" if warming else self.name)
        middle = (self.middles[0] if len(self.middles) == 1 or warming else self.middles.pop(0)) * 1000
        samples = [round(middle * (1 + self.spread * part)) for part in (-0.5, 0, 0.5)]
        return Series(samples, 40, 3, {}, {"throttle": ["sw_power_cap"]})


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Holds a contest of fake graphs beside an alternative of 33 us; the floor is 2 us."""

    def hold(graphs: list[FakeGraph | str], seen: list[str]) -> dict[str, Any]:
        monkeypatch.setattr(ceiling, "read_ceiling", lambda: 550e6)
        monkeypatch.setattr(contest, "input_copies", lambda *_: [{}, {}])
        monkeypatch.setattr(contest, "restorer", lambda *_: None)
        monkeypatch.setattr(contest, "_lane", lambda graph, *_: Lane(graph, buffers=graph.buffers))
        monkeypatch.setattr(contest, "capture_calls", lambda calls, policy: FakeGraph("mm", seen, 33.0))
        monkeypatch.setattr(fake_family.FakeFamily, "alternative", lambda *_: lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return time_contest(fake_family.FAMILY, PROBLEM, graphs, CONTEST, 0, lambda: seen.append("."))  # type: ignore[arg-type]

    return hold


def test_a_contest_says_that_it_rested(held: Any) -> None:
    graph = FakeGraph("a", [], 10.0)
    rested = graph.replayed
    graph.replayed = lambda *ask: dataclasses.replace(rested(*ask), rest_ms=10.0)  # type: ignore[method-assign]
    assert held([graph], [])["notes"][0] == (
        "a cap held the clocks down: timed again with 10 ms of rest before each replay"
    )


def test_all_are_timed_in_turn_beside_the_alternative(held: Any) -> None:
    seen: list[str] = []
    found = held([FakeGraph("a", seen, 10.0, 10.2, 10.1), "does not load", FakeGraph("c", seen, 12.0)], seen)
    assert [one for one in seen if one != "."] == ["warm a", "a", "c", "mm", "c", "mm", "a", "c", "mm", "a"]
    assert seen[seen.index("warm a") + 1] == "."  # a sign of life before each
    assert [one["values_us"] for one in found["results"]] == [[10.0, 10.2, 10.1], [], [12.0] * 3]
    assert [one["failed"] for one in found["results"]] == ["", "does not load", ""]
    assert (found["alternatives"], found["floor_us"]) == ({"PyTorch": 33.0}, 2.0)
    assert found["notes"] == ["clocks held down: sw_power_cap"]
    assert found["policy"]["samples"] == CONTEST.samples


def test_what_cannot_be_true_or_steady_is_out(held: Any) -> None:
    seen: list[str] = []
    found = held([FakeGraph("wild", seen, 9.0, spread=0.2), FakeGraph("hot", seen, 1.9)], seen)
    assert [one["values_us"] for one in found["results"]] == [[], []]
    assert "unstable: spread" in found["results"][0]["failed"]
    assert "1.90 us lies below the byte floor of 2.00 us" in found["results"][1]["failed"]
    assert seen.count("wild") == CONTEST.attempts


def test_who_gave_up_waiting_is_out(held: Any) -> None:
    seen: list[str] = []
    gave_up = FakeGraph("quick", seen, 5.0)
    gave_up.buffers = {health.NAME: torch.tensor([1, 1, 3] + [0] * (health.WORDS - 3), dtype=torch.int32)}
    found = held([gave_up, FakeGraph("a", seen, 9.0)], seen)
    assert [one["values_us"] for one in found["results"]] == [[], [9.0] * 3]
    assert "rank 3 did not publish" in found["results"][0]["failed"]


def test_who_does_not_stand_for_the_problem_is_out_and_the_alternative_is_not_asked(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told right after each round: the next contestant writes to the same outputs."""
    seen: list[str] = []
    odd = FakeGraph("odd", seen, 5.0)
    odd.buffers = {"odd": torch.zeros(1)}

    def fault(_: Any, problem: Any, tensors: Any) -> str | None:
        seen.append("asked")
        return "117.0 distinct experts" if "odd" in tensors else None

    monkeypatch.setattr(fake_family.FakeFamily, "measurement_fault", fault)
    found = held([odd, FakeGraph("a", seen, 9.0)], seen)
    assert [one["failed"] for one in found["results"]] == ["117.0 distinct experts", ""]
    timed = [one for one in seen if one != "."]
    assert timed == ["warm odd", "odd", "asked", "a", "asked", "mm", "a", "asked", "mm", "mm", "a", "asked"]
    assert between.decide(
        {"entries": [{"engine": name, "digest": name, **result} for name, result in zip(("odd", "a"), found["results"], strict=True)], "rounds": 3},
        {"odd": "odd", "a": "a"}, ["odd", "a"],
    ).engine == "a"  # fmt: skip


def noted(**engines: list[float]) -> dict[str, Any]:
    entries = [
        {
            "engine": name,
            "digest": name,
            "values_us": values,
            "spreads": [0.004] * 3,
            "failed": "" if values else "crashed",
        }
        for name, values in engines.items()
    ]
    return {"entries": entries, "rounds": 3}


def decided(**engines: list[float]) -> between.Decision:
    return decide(noted(**engines), {name: name for name in engines}, ORDER)


def test_the_fastest_engine_wins_outside_the_noise() -> None:
    found = decided(triton=[12.0, 12.0, 12.1], cute_mma=[11.0, 11.02, 11.0], cute_skinny=[11.5, 11.5, 11.5])
    assert found.engine == "cute_mma"
    assert list(found.times_us) == ["cute_mma", "cute_skinny", "triton"]
    assert (
        found.reason
        == "cute_mma is 4.5% ahead of cute_skinny (11.50 us), 3 rounds in turn in one process; not timed in a chain"
    )
    assert found.chain is None


def test_a_tie_goes_to_the_first_of_the_list_and_says_so() -> None:
    found = decided(triton=[12.0, 12.0, 12.0], cute_mma=[11.0, 11.0, 11.0], cute_skinny=[11.03, 11.03, 11.04])
    assert found.engine == "cute_skinny"
    assert "cute_mma 11.00 us, cute_skinny 11.03 us are a tie" in found.reason
    wide = decided(triton=[12.0, 11.0, 12.5], cute_mma=[11.5, 11.5, 11.5])  # its rounds differ by more than the two
    assert wide.engine == "triton"


def test_engines_without_a_time_do_not_win() -> None:
    assert decided(triton=[12.0] * 3, cute_mma=[]).engine == "triton"
    with pytest.raises(InputError, match="no engine"):
        decided(triton=[])


def test_an_engine_that_wins_alone_but_not_in_the_chain_is_dropped() -> None:
    note = noted(triton=[11.3] * 3, cute_mma=[11.0] * 3)
    note["entries"][0]["chain"] = {"chain_us": 7.0, "plain_us": 11.3, "hidden_us": 4.3, "band_us": 0.1, "programmatic": True}  # fmt: skip
    note["entries"][1]["chain"] = {"chain_us": 10.9, "plain_us": 11.0, "hidden_us": 0.1, "band_us": 0.1, "programmatic": True}  # fmt: skip
    found = decide(note, {"triton": "triton", "cute_mma": "cute_mma"}, ORDER)
    assert found.engine == "triton"
    assert found.chain == note["entries"][0]["chain"]
    assert list(found.times_us) == ["cute_mma", "triton"]  # isolated, as they are
    assert found.reason.startswith("cute_mma is dropped in the chain: it takes 11.00 us alone and adds 10.90 us")
    assert found.reason.endswith("it adds 7.00 us to a predecessor, 4.30 us of it hidden")
    note["entries"][1]["chain"]["chain_us"] = 7.4  # 0.4 us: no more than its 0.3 us alone and the bands
    kept = decide(note, {"triton": "triton", "cute_mma": "cute_mma"}, ORDER)
    assert kept.engine == "cute_mma"
    assert "ahead of triton" in kept.reason


def test_predictions_are_compared_as_such() -> None:
    found = decide_predicted({"cute_mma": 10.0, "triton": 10.0, "cute_skinny": 11.0}, ORDER)
    assert (found.engine, found.times_us["cute_skinny"]) == ("triton", 11.0)
    assert found.reason == "triton is predicted 0.0% ahead of cute_mma (10.00 us)"


def test_a_contest_is_one_that_all_were_in() -> None:
    assert same_contest([{"id": "a"}, {"id": "a"}]) == {"id": "a"}
    for notes in ([{"id": "a"}, {"id": "b"}], [{"id": "a"}, None], [None], []):
        assert same_contest(notes) is None
