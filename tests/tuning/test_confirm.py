"""Confirmed in a chain: the rule at its edges, who is timed there, and the timing of the chains with fake graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_family
import pytest
import torch
from k3lab.kernels import Launch, health
from k3lab.tuning import chain_contest
from k3lab.tuning.chain_contest import Link, time_chains
from k3lab.tuning.confirm import MOST, Standing, better_in_chain, dropped_because, told, within_reach
from k3lab.tuning.policy import CHAIN
from k3lab.tuning.timing import BrokenMeasurement, Series

PROBLEM = fake_family.FakeProblem(1, 8)


def standing(name: str, us: float, chain_us: float | None, band: float = 0.0, chain_band: float = 0.0) -> Standing:
    figures = {"chain_us": chain_us, "plain_us": us, "hidden_us": 0.0, "band_us": chain_band, "programmatic": True}
    return Standing(name, us, band, None if chain_us is None else figures)


WINNER = standing("a", 10.0, 9.0, band=0.1, chain_band=0.2)


@pytest.mark.parametrize(
    ("other", "takes"),
    [
        (standing("b", 10.5, 8.0), True),  # 1.0 us against 0.5 + 0.1 + 0.2
        (standing("b", 10.5, 8.25), False),  # 0.75 us against 0.8
        (standing("b", 10.5, 8.15), True),  # 0.85 us
        (standing("b", 10.5, 8.0, band=0.35), False),  # the larger isolated band: 0.5 + 0.35 + 0.2
        (standing("b", 10.5, 8.0, chain_band=0.45), False),  # the larger chain band: 0.5 + 0.1 + 0.45
        (standing("b", 9.95, 8.75), False),  # ahead alone, in a tie: no gain, but the bands hold
        (standing("b", 9.95, 8.65), True),
        (standing("b", 11.0, 9.5), False),
        (standing("b", 10.5, None), False),
    ],
)
def test_the_winner_is_kept_within_gain_and_bands(other: Standing, takes: bool) -> None:
    assert better_in_chain(WINNER, [other]) == (other if takes else None)


def test_of_several_the_least_sum_takes_the_place() -> None:
    least = standing("c", 10.8, 6.0)
    found = better_in_chain(
        WINNER, [standing("b", 10.1, 7.0), least, standing("d", 12.0, 5.5), standing("e", 1.0, 9.1)]
    )
    assert found == least
    assert better_in_chain(standing("a", 10.0, None), [least]) is None
    assert dropped_because(WINNER, least) == (
        "a is dropped in the chain: it takes 10.00 us alone and adds 9.00 us to a predecessor, c takes 10.80 us and adds 6.00 us"
    )


def test_a_choice_says_what_it_hides() -> None:
    figures = {"chain_us": 7.0, "hidden_us": 3.0, "programmatic": True}
    assert told(figures) == "it adds 7.00 us to a predecessor, 3.00 us of it hidden"
    assert "no programmatic launch and adds 7.00 us" in told({**figures, "programmatic": False})
    assert told(None) == "not timed in a chain"


def test_choices_and_the_fastest_are_within_reach() -> None:
    us = [9.0, 5.0, 6.0, 7.0, None, 20.0, 5.5, 8.0]
    # choices, fastest first, then those of the three fastest that are none
    assert within_reach(us, [5, 2, 4]) == [2, 5, 1, 6]
    assert within_reach(us, range(8)) == [1, 6, 2, 3, 7, 0]
    assert len(within_reach([float(one) for one in range(20)], range(10, 20))) == MOST
    assert within_reach([None], [0]) == []


class Graph:
    """Replays take what it is told, one series after the other."""

    def __init__(self, name: str, seen: list[str], *middles: float) -> None:
        self.name, self.seen, self.middles = name, seen, list(middles)

    def replayed(self, policy: Any, restore: Any = None) -> Series:
        self.seen.append(self.name)
        middle = (self.middles[0] if len(self.middles) == 1 else self.middles.pop(0)) * 1000
        return Series([round(middle)] * 3, 40, 3, {}, {})


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times links of fake graphs; the predecessor takes 9 us."""

    def run(links: list[Link], seen: list[str]) -> dict[str, Any]:
        monkeypatch.setattr(chain_contest, "input_copies", lambda *_: [{}, {}])
        monkeypatch.setattr(chain_contest, "restorer", lambda *_: None)
        monkeypatch.setattr(chain_contest, "predecessor_of", lambda *_, **__: None)
        monkeypatch.setattr(chain_contest, "capture_calls", lambda calls, policy: Graph("before", seen, 9.0))
        monkeypatch.setattr(chain_contest, "_link", lambda link, *_: link)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return time_chains(fake_family.FAMILY, PROBLEM, links, CHAIN, 0, lambda: None)  # type: ignore[arg-type]

    return run


def runner(**buffers: torch.Tensor) -> list[Any]:
    return [SimpleNamespace(buffers=buffers, carveout=40)]


def test_all_are_timed_in_turn_behind_one_predecessor(timed: Any) -> None:
    seen: list[str] = []
    both = Link(Graph("a plain", seen, 21.0), Graph("a", seen, 18.0, 18.4), runner(), carveout=75)
    plain = Link(Graph("b plain", seen, 20.0, 20.1), None, runner())
    found = timed([both, "does not load", plain], seen)
    assert seen == ["before", "a", "a plain", "b plain", "before", "b plain", "a"]
    first, second, third = found["results"]
    assert first == {
        "chain_us": 9.2, "plain_us": 12.0, "hidden_us": 2.8, "band_us": 0.4, "programmatic": True, "carveout": 75, "failed": "",
    }  # fmt: skip
    assert second == {"failed": "does not load"}
    assert (third["chain_us"], third["plain_us"], third["hidden_us"]) == (11.05, 11.05, 0.0)
    assert third["programmatic"] is False
    assert third["band_us"] == pytest.approx(20.05 * 0.005, abs=1e-3)  # the least that anybody should act on
    assert (found["predecessor_us"], found["spin_us"]) == (9.0, 8.0)


def test_who_gives_up_waiting_in_the_chain_has_no_figures(timed: Any) -> None:
    record = torch.tensor([1, 1, 3] + [0] * (health.WORDS - 3), dtype=torch.int32)
    seen: list[str] = []
    link = Link(Graph("a plain", seen, 21.0), Graph("a", seen, 18.0), runner(**{health.NAME: record}))
    (found,) = timed([link], seen)["results"]
    assert set(found) == {"failed"}
    assert "rank 3 did not publish" in found["failed"]


def test_a_chain_that_does_not_stand_for_its_problem_has_no_figures(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(_: Any, problem: Any, tensors: Any) -> str | None:
        return "117.0 distinct experts" if "odd" in tensors else None

    monkeypatch.setattr(fake_family.FakeFamily, "measurement_fault", fault)
    odd = Link(Graph("a plain", [], 21.0), Graph("a", [], 18.0), runner(odd=torch.zeros(1)))
    right = Link(Graph("b plain", [], 21.0), Graph("b", [], 18.0), runner())
    first, second = timed([odd, right], [])["results"]
    assert first == {"failed": "117.0 distinct experts"}
    assert second["failed"] == "" and second["chain_us"] == 9.0


@pytest.mark.parametrize("pdl", [True, False])
def test_without_programmatic_launches_the_plain_pairs_are_the_chain(
    monkeypatch: pytest.MonkeyPatch, pdl: bool
) -> None:
    from k3lab.kernels import launch as launching

    made: list[str] = []
    monkeypatch.setattr(launching, "Runner", lambda compiled: runner()[0])
    monkeypatch.setattr(chain_contest, "pairs", lambda before, runner, copies, pdl=None: [f"pdl={pdl}"])
    monkeypatch.setattr(chain_contest, "capture_calls", lambda calls, policy: made.append(calls[0]) or calls[0])
    checked: list[Any] = []
    left: list[int] = []
    monkeypatch.setattr(chain_contest, "require_edges", lambda calls, compiled: checked.append(calls))
    compiled = SimpleNamespace(launches=(Launch("k3_a_b_main", b"", (1, 1, 1), (32, 1, 1), 0, (), pdl=pdl),))
    link = chain_contest._link(compiled, left.append, [{}], CHAIN)  # type: ignore[arg-type]
    assert (link.plain, link.chained) == ("pdl=False", "pdl=None" if pdl else None)
    assert checked == ([["pdl=None"]] if pdl else [])
    assert left == [link.carveout] == [40]  # its predecessor leaves what it takes

    def lost(*_: Any) -> None:
        raise BrokenMeasurement("0 programmatic edges in the graph of 2 pairs, not 2")

    monkeypatch.setattr(chain_contest, "require_edges", lost)
    found = chain_contest._link(compiled, left.append, [{}], CHAIN)  # type: ignore[arg-type]
    assert ("programmatic edges" in found.failed) == pdl
