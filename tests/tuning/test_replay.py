"""Samplers on recorded spaces: the bar, the yardstick, and a choice that never saw the family it is made for."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli import main
from k3lab.kernels import InputError, config_digest
from k3lab.tuning import replay as module
from k3lab.tuning.guided import Guided, corrected, place
from k3lab.tuning.outcome import Status
from k3lab.tuning.propose import Tpe, for_search
from k3lab.tuning.record import read, write
from k3lab.tuning.replay import SAMPLERS, Recorded, chosen_without, replay, run, verdicts
from k3lab.tuning.study import TrialRecord

SPACES = sorted((Path(__file__).parents[2] / "results/h200").glob("attention_projection_triton_*rows8.json.gz"))


def synthetic(name: str, family: str, seed: int, off: float = 0.05, failing: float = 0.05) -> Recorded:
    """A made-up recording of 240 configs whose times a model knows but for an error that reaches over neighbours."""
    rng = random.Random(seed)
    values = {"a": list(range(8)), "b": list(range(6)), "c": ["x", "y", "z", "w", "v"]}
    best = (rng.randrange(8), rng.randrange(6), rng.choice(values["c"]))
    tilt = rng.uniform(-1, 1)
    configs, predicted = [], {}
    for a in values["a"]:
        for b in values["b"]:
            for c in values["c"]:
                config = {"a": a, "b": b, "c": c}
                shape = 1 + 0.06 * (a - best[0]) ** 2 + 0.1 * (b - best[1]) ** 2 + (0.0 if c == best[2] else 0.35)
                us = 10 * shape * rng.gauss(1, 0.005)
                failed = rng.random() < failing and (a, b, c) != best
                configs.append(
                    {"config": config, "status": "wrong" if failed else "ok", "value": None if failed else us}
                )
                predicted[config_digest(config)] = 10 * shape * math.exp(off * tilt * a / 2) * rng.gauss(1, off)
    data = {
        "identity": {"family": family, "objective": "measured"}, "evidence": "measured", "configs": configs,
        "space": {"params": [{"name": key, "values": own, "help": key} for key, own in values.items()], "default": configs[0]["config"]},
    }  # fmt: skip
    made = Recorded(name, family, data)
    made.__dict__["predicted"] = predicted
    return made


def test_the_default_keeps_the_bar_and_beats_random_on_the_recorded_spaces() -> None:
    rows = replay([Recorded.load(path) for path in SPACES], ["random", "guided"])
    said = json.loads((SPACES[0].parents[1] / "replay.json").read_text())["rows"]
    assert [row for row in said if row["sampler"] != "tpe"] == rows  # what the page shows
    found = verdicts(rows)
    assert len(found) == len(SPACES) >= 2
    for one in found:
        assert one["sampler"] == "guided" and one["within_bar"] and one["random_beaten"], one


def test_on_whole_spaces_of_several_families_too() -> None:
    spaces = [
        synthetic(f"s{seed}", family, seed) for seed, family in zip((0, 1, 3), ("one", "two", "three"), strict=True)
    ]
    rows = replay(spaces, ["random", "guided"], seeds=9)
    for one in verdicts(rows):
        assert one["whole_space"] and one["within_bar"] and one["random_beaten"]
        assert one["family"] not in one["chosen_on"] and len(one["chosen_on"]) == 2


def test_where_the_default_is_as_good_as_the_best_nobody_beats_anybody() -> None:
    (one,) = verdicts(replay([synthetic("s", "one", 2)], ["random", "guided"], seeds=2))
    assert one["within_bar"] and one["random_beaten"] is None


def test_the_choice_for_a_family_is_made_without_it() -> None:
    def row(family: str, sampler: str, share: float) -> dict[str, Any]:
        return {"space": family, "family": family, "sampler": sampler, "share": share, "evaluations": 1, "configs": 300}

    rows = [row("a", "tpe", 0.01), row("a", "guided", 0.9), row("b", "tpe", 0.5), row("b", "guided", 0.1), row("b", "random", 0.4)]  # fmt: skip
    assert chosen_without(rows, "a") == ("guided", ("b",))  # whatever did well on it itself
    assert chosen_without(rows, "b") == ("tpe", ("a",))
    assert chosen_without(rows[:2], "a") == ("guided", ())  # one family alone: the default, on none
    by_family = [row("c", "tpe", 0.2), row("c", "guided", 0.1), *([row("d", "tpe", 0.1), row("d", "guided", 0.19)] * 9)]
    assert chosen_without(by_family, "x")[0] == "guided"  # each family alike, however many spaces it has


def test_a_wrong_model_does_not_hide_the_best() -> None:
    """Predictions turned upside down: what is measured corrects them, and the sampler's own draws go on."""
    space = synthetic("upside", "one", 5)
    space.__dict__["predicted"] = {digest: 1000 / us for digest, us in space.predicted.items()}
    found = [run(space, "guided", seed).evaluations for seed in range(3)]
    assert max(found) < len(space.outcomes) / 2


def test_what_was_measured_is_carried_over_to_what_is_near() -> None:
    points = [[0.0], [0.1], [1.0]]
    same = corrected(points, [10.0, 10.0, 10.0], [], [])
    assert same == [10.0, 10.0, 10.0]
    near = corrected(points, [10.0, 10.0, 10.0], [[0.0], [1.0]], [math.log(2.0), math.log(1.0)])
    assert near[0] == pytest.approx(near[1], rel=0.05) and near[0] > 1.2 * near[2]


def test_proposals_are_legal_never_twice_and_the_same_for_the_same_trials() -> None:
    one = synthetic("s", "one", 3)
    asked: list[int] = []

    def predict(configs: Any) -> list[float]:
        asked.append(len(configs))
        return [math.inf if config["a"] == 7 else one.predicted[config_digest(config)] for config in configs]

    def walk(count: int) -> list[str]:
        proposer, trials = Guided(one.space, 4, predict, screen=60), list[TrialRecord]()
        for number in range(count):
            config = proposer.propose(trials)
            assert config is not None and one.space.illegal(config) is None
            trials.append(TrialRecord(number, config, config_digest(config), one.outcome(config), True))
        return [trial.digest for trial in trials]

    first = walk(90)
    assert len(set(first)) == 90 and first == walk(90)
    assert first[0] == config_digest(one.space.default)
    assert asked[0] in (60, 61) and sum(asked) <= len(one.outcomes)
    assert len(place(one.space, one.space.default)) == 2 + 5


def test_a_search_is_guided_where_the_model_can_be_asked_and_nothing_is_known() -> None:
    space = synthetic("s", "one", 3).space
    ask = lambda configs: [1.0] * len(configs)  # noqa: E731
    assert isinstance(for_search(space, 20, 0, predict=ask), Guided)
    assert not isinstance(for_search(space, 20, 0), Guided)
    known = for_search(space, 20, 0, [space.legal[5]], predict=ask)
    assert isinstance(known, Tpe) and not isinstance(known, Guided)


def test_a_replay_invents_nothing(tmp_path: Path) -> None:
    one = Recorded.load(SPACES[0])
    missing = next(config for config in one.space.points() if config_digest(config) not in one.outcomes)
    with pytest.raises(InputError, match="invents no outcome"):
        one.outcome(missing)
    assert one.space.illegal(missing) == "not recorded"
    failed = synthetic("f", "one", 1, failing=0.3)
    bad = next(each["config"] for each in failed.data["configs"] if each["status"] == "wrong")
    assert failed.outcome(bad).status is Status.WRONG
    with pytest.raises(InputError, match="unknown sampler 'best'"):
        replay([one], ["best"])
    with pytest.raises(InputError, match="at least one recording"):
        replay([], ["random"])
    for each in failed.data["configs"]:
        each["status"], each["value"] = "wrong", None
    write(tmp_path / "none.json.gz", {"format": "k3lab-space", "schema": 1, **failed.data})
    with pytest.raises(InputError, match="no best to find"):
        Recorded.load(tmp_path / "none.json.gz")


def test_the_command_tells_the_table_and_fails_where_the_bar_is_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["study", "replay", str(SPACES[0]), "--seeds", "8"]
    assert main.run([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["sampler"] for row in data["rows"]} == set(SAMPLERS)
    assert main.run(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "random search is beaten" in said and "no other family is recorded" in said
    monkeypatch.setattr(module, "SHARE", 0.001)
    assert main.run([*words, "--sampler", "guided"]) == 1
    assert "MISSES the bar" in capsys.readouterr().out
    assert main.run([*words, "--sampler", "none"]) == 2


def test_a_space_of_predictions_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.gz"
    data = read(SPACES[1])
    write(path, {**data, "evidence": "predicted", "identity": {**data["identity"], "objective": "predicted"}})
    words = ["study", "replay", str(path), "--seeds", "1", "--sampler", "random", "--sampler", "guided"]
    assert main.run([*words, "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["evidence"] == {"space": "predicted"}
    main.run(words)
    said = " ".join(capsys.readouterr().out.split())
    assert "predicted" in said.split("random")[0] and "by the model that the guided sampler follows" in said
