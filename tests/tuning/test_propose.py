"""Who proposes the next config: lists, fair draws, the sampler, and what is known beforehand."""

from __future__ import annotations

import random
from collections import Counter

import fake_evaluator
import fake_family
import pytest
from k3lab.kernels import Config, config_digest
from k3lab.tuning import propose
from k3lab.tuning.outcome import Outcome, Status
from k3lab.tuning.study import TrialRecord

PROBLEM = fake_family.FakeProblem(tp=1, rows=8)


def test_tpe_ends_when_the_space_is_exhausted() -> None:
    space = fake_family.SMALL.space(PROBLEM, None)
    proposer = propose.Tpe(space, seed=1)
    trials: list[TrialRecord] = []
    while (config := proposer.propose(trials)) is not None:
        assert space.illegal(config) is None
        value = fake_evaluator.latency_us("small", dict(config))
        trials.append(TrialRecord(len(trials), config, config_digest(config), Outcome(Status.OK, value=value), True))
    assert len({trial.digest for trial in trials}) == len(trials) == len(space.legal)


def test_a_space_too_large_to_list_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "ENUMERABLE", 10)
    space = fake_family.LARGE.space(PROBLEM, None)
    assert isinstance(propose.for_search(space, 10**6, 0), propose.Tpe)
    drawn = propose.sample(space, 50, seed=0)
    assert drawn.total in (50, 51)  # the default may be among them
    small = fake_family.SMALL.space(PROBLEM, None)
    trials: list[TrialRecord] = []
    proposer: propose.Proposer = propose.Tpe(small, 0)
    while (config := proposer.propose(trials)) is not None:
        trials.append(TrialRecord(len(trials), config, config_digest(config), Outcome(Status.OK, value=1.0), True))
    assert len(trials) == len(small.legal)


def ended(configs: list[Config], engine: str = "large") -> list[TrialRecord]:
    values = [fake_evaluator.latency_us(engine, dict(config)) for config in configs]
    return [
        TrialRecord(number, config, config_digest(config), Outcome(Status.OK, value=value), True)
        for number, (config, value) in enumerate(zip(configs, values, strict=True))
    ]


def test_what_is_ahead_is_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far a search looks ahead, and whatever the next trials give: the same configs."""
    space = fake_family.LARGE.space(PROBLEM, None)
    starts = [{"p": 3, "q": 5, "r": 1, "s": 1}, {"p": 1, "q": 1, "r": 7, "s": 7}]
    for known in (starts, []):
        one_by_one: list[Config] = []
        proposer = propose.Tpe(space, 3, known)
        for _ in range(40):
            (config,) = proposer.ahead(ended(one_by_one), 1)
            one_by_one.append(config)
        for number in (0, 1, 7, 8, 15, 16, 23, 30):
            far = propose.Tpe(space, 3, known).ahead(ended(one_by_one[:number]), 10)
            # a batch is known when the one before it begins, and never later
            assert len(far) == 10 if number % 8 <= 6 else len(far) >= 9
            assert far == one_by_one[number : number + len(far)]


def test_a_search_begins_with_what_is_known_and_goes_on_beside_it() -> None:
    space = fake_family.LARGE.space(PROBLEM, None)
    good: Config = {"p": 3, "q": 5, "r": 3, "s": 3}
    illegal: Config = {"p": 3, "q": 4, "r": 0, "s": 0}
    proposer = propose.Tpe(space, 0, [good, illegal, good, space.default])
    configs: list[Config] = []
    while len(configs) < 24:
        configs += proposer.ahead(ended(configs), 1)
    assert configs[:2] == [space.default, good]
    assert illegal not in configs
    near = propose.neighbours(space, good)
    assert len(near) == 4  # p and q alone cannot move by one
    assert all(config in configs[2:6] for config in near)
    best = min(ended(configs[:8]), key=lambda trial: (trial.value, trial.digest)).config
    left = [config for config in propose.neighbours(space, best) if config not in configs[:16]]
    assert left
    assert all(config in configs[16:24] for config in left)
    assert proposer.name == "TPE from known winners"


def test_neighbours_differ_in_one_parameter_by_one_step() -> None:
    space = fake_family.SMALL.space(PROBLEM, None)
    found = propose.neighbours(space, {"tile": 4, "deep": True, "mode": "b"})
    assert found == [
        {"tile": 2, "deep": True, "mode": "b"},  # tile 8 is too large to be deep
        {"tile": 4, "deep": False, "mode": "b"},
        {"tile": 4, "deep": True, "mode": "a"},
    ]


def test_a_winner_of_another_space_is_taken_as_near_as_it_can_be() -> None:
    space = fake_family.SMALL.space(PROBLEM, None)
    assert propose.adapted(space, {"tile": 5, "deep": False, "mode": "b"}) == {"tile": 4, "deep": False, "mode": "b"}
    assert propose.adapted(space, {"tile": 100, "deep": False}) == {"tile": 8, "deep": False, "mode": "a"}
    assert propose.adapted(space, {"tile": 100, "deep": True, "mode": "a"}) is None
    assert propose.adapted(space, {"tile": 4, "deep": True, "mode": "z"}) is None


def test_a_fair_draw_is_fair_and_never_repeats() -> None:
    small = fake_family.SMALL.space(PROBLEM, None)
    seen = {config_digest(config) for config in small.legal[:8]}
    tpe = propose.Tpe(small, 0)
    rng = random.Random(1)
    drawn = Counter(config_digest(tpe._random(rng, seen) or {}) for _ in range(3000))
    assert set(drawn) == {config_digest(config) for config in small.legal[8:]}
    assert all(400 < count < 600 for count in drawn.values())  # 500 each
    assert tpe._random(rng, {config_digest(config) for config in small.legal}) is None


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    space = fake_family.LARGE.space(PROBLEM, None)

    def configs(seed: int) -> list[Config]:
        trials: list[TrialRecord] = []
        proposer = propose.sample(space, 20, seed)
        while (config := proposer.propose(trials)) is not None:
            trials.append(TrialRecord(len(trials), config, config_digest(config), None, True))
        return [trial.config for trial in trials]

    assert configs(1) == configs(1)
    assert configs(1) != configs(2)
    assert configs(1)[0] == space.default
