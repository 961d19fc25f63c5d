"""The choice: a difference inside the noise is no difference, and the default is always among the finalists."""

from __future__ import annotations

import random
from typing import Any

import pytest
from k3lab.kernels import Config, Constraint, Param, Space, config_digest
from k3lab.tuning.choose import LEAST_BAND, MODEL_ERROR, distance, finalists, pick
from k3lab.tuning.outcome import Outcome, Status, failure
from k3lab.tuning.study import TrialRecord

SPACE = Space(
    (Param("tile", (16, 32, 64, 128), "tile"), Param("mode", ("x", "y", "z"), "mode")),
    (Constraint(lambda c: True, ""),),
    {"tile": 32, "mode": "x"},
)
DEFAULT = SPACE.default


def trial(
    number: int, config: Config, value: float | None, *, spread: float = 0.01, error: float | None = None, **kernel: int
) -> TrialRecord:
    if value is None:
        outcome = failure(Status.WRONG, "differs")
    else:
        prediction = None if error is None else {"relative_error": error}
        outcome = Outcome(
            Status.OK,
            value=value,
            timing={"spread": spread},
            prediction=prediction,
            resources=(kernel,) if kernel else (),
        )
    return TrialRecord(number, config, config_digest(config), outcome, True)


def config(tile: int, mode: str) -> Config:
    return {"tile": tile, "mode": mode}


def test_a_clear_winner_wins_and_says_by_how_much() -> None:
    trials = [trial(0, DEFAULT, 12.0), trial(1, config(64, "y"), 10.0), trial(2, config(16, "z"), 11.0)]
    choice = pick(trials, SPACE, "measured")
    assert choice is not None
    assert (choice.trial, choice.value_us, choice.evidence) == (1, 10.0, "measured")
    assert choice.reason == "trial 1 is the fastest, 10.0% ahead of trial 2, outside the band of 1.0% (measured spread)"
    assert choice.default_us == 12.0
    assert choice.margin_over_default == pytest.approx(1 / 6, abs=1e-4)
    assert choice.runner_up is not None
    assert (choice.runner_up["trial"], choice.runner_up["margin"]) == (2, 0.1)


def test_inside_the_band_the_config_nearest_the_default_wins() -> None:
    trials = [
        trial(0, DEFAULT, 20.0),
        trial(1, config(128, "z"), 10.0),
        trial(2, config(64, "x"), 10.05),
        trial(3, config(16, "y"), 10.2),
    ]
    choice = pick(trials, SPACE, "measured")
    assert choice is not None
    assert (choice.trial, choice.tied) == (2, (1, 2))
    assert "0.5% behind the fastest (trial 1), a tie within 1.0% (measured spread) of 2 configs" in choice.reason
    noisy = [trial(one.number, one.config, one.value, spread=0.03) for one in trials]
    assert pick(noisy, SPACE, "measured").tied == (1, 2, 3)  # type: ignore[union-attr]


def test_the_default_wins_a_tie() -> None:
    trials = [trial(0, DEFAULT, 10.05), trial(1, config(64, "x"), 10.0)]
    choice = pick(trials, SPACE, "measured")
    assert choice is not None
    assert choice.config == DEFAULT
    assert choice.margin_over_default == 0.0
    assert choice.reason.startswith("the default config is 0.5% behind")


def test_equally_near_configs_are_told_apart_by_resources() -> None:
    near = (config(64, "x"), config(16, "x"))
    for light in (0, 1):
        sizes = [
            {"dynamic_shared_bytes": 1000 + 500 * (index != light), "registers": 32, "threads": 128} for index in (0, 1)
        ]
        trials = [
            trial(0, DEFAULT, 20.0),
            *(trial(i + 1, c, 10.0, **s) for i, (c, s) in enumerate(zip(near, sizes, strict=True))),
        ]
        assert pick(trials, SPACE, "measured").trial == light + 1  # type: ignore[union-attr]


def test_a_prediction_is_no_finer_than_its_models_error() -> None:
    def made(error: float | None) -> int:
        trials = [trial(0, DEFAULT, 11.0, error=error), trial(1, config(128, "z"), 10.0, error=error)]
        choice = pick(trials, SPACE, "predicted")
        assert choice is not None
        assert choice.tie_band == (MODEL_ERROR if error is None else error)
        assert choice.tie_band_source == "the cost model's stated error"
        return choice.trial

    assert made(0.05) == 1
    assert made(0.15) == 0
    assert made(None) == 0


def test_the_default_is_a_finalist_however_slow() -> None:
    trials = [trial(0, DEFAULT, 99.0), *(trial(n + 1, c, 10.0 + n) for n, c in enumerate(SPACE.legal) if c != DEFAULT)]
    assert [one.number for one in finalists(trials, SPACE)][-1] == 0
    choice = pick(trials, SPACE, "measured")
    assert choice is not None
    assert [one.is_default for one in choice.finalists] == [False] * 5 + [True]


def test_a_failed_default_is_told() -> None:
    choice = pick([trial(0, DEFAULT, None), trial(1, config(64, "y"), 10.0)], SPACE, "measured")
    assert choice is not None
    assert (choice.trial, choice.default_us, choice.default_status, choice.margin_over_default) == (
        1,
        None,
        "wrong",
        None,
    )
    assert choice.reason == "trial 1 is the only config that ended ok"
    assert choice.runner_up is None
    assert pick([trial(0, DEFAULT, None)], SPACE, "measured") is None


def test_the_finals_overrule_the_search() -> None:
    lucky, steady, broken = config(128, "z"), config(64, "y"), config(16, "z")
    trials = [trial(0, DEFAULT, 12.0), trial(1, lucky, 9.0), trial(2, steady, 10.0), trial(3, broken, 8.0)]
    final: dict[str, Any] = {
        config_digest(DEFAULT): {"values_us": [12.0, 12.1, 12.0], "spreads": [0.01] * 3, "failed": ""},
        config_digest(lucky): {"values_us": [11.0, 11.1, 11.2], "spreads": [0.01] * 3, "failed": ""},
        config_digest(steady): {"values_us": [10.0, 10.1, 10.0], "spreads": [0.01] * 3, "failed": ""},
        config_digest(broken): {"values_us": [8.0], "spreads": [0.01], "failed": "crashed: gone"},
    }
    choice = pick(trials, SPACE, "measured", final)
    assert choice is not None
    assert (choice.trial, choice.value_us) == (2, 10.0)
    assert 3 not in [one.trial for one in choice.finalists]
    final[config_digest(DEFAULT)]["failed"] = "timeout: checking"
    assert pick(trials, SPACE, "measured", final).default_status == "failed in the finals"  # type: ignore[union-attr]


def test_the_same_trials_in_any_order_give_the_same_choice() -> None:
    rng = random.Random(0)
    trials = [trial(n, c, 10.0 + 0.02 * (n % 4)) for n, c in enumerate(SPACE.legal)]
    choices = set()
    for _ in range(20):
        rng.shuffle(trials)
        choice = pick(trials, SPACE, "measured")
        assert choice is not None
        choices.add(choice.digest)
    assert choices == {config_digest(DEFAULT)}


def test_a_band_is_never_nothing() -> None:
    choice = pick([trial(0, DEFAULT, 10.0, spread=0.0), trial(1, config(64, "x"), 9.99, spread=0.0)], SPACE, "measured")
    assert choice is not None
    assert (choice.trial, choice.tie_band) == (0, LEAST_BAND)


def test_distance_counts_parameters_then_steps() -> None:
    assert distance(DEFAULT, SPACE) == (0, 0)
    assert distance(config(128, "x"), SPACE) == (1, 2)
    assert distance(config(16, "y"), SPACE) == (2, 2)


def test_a_config_that_is_none_of_the_space_is_never_chosen() -> None:
    strays = [trial(2, config(17, "x"), 1.0), trial(3, {"tile": 32}, 1.0), trial(4, {**DEFAULT, "more": 1}, 1.0)]
    choice = pick([trial(1, config(64, "y"), 9.0), *strays], SPACE, "predicted")
    assert choice
    assert [one.trial for one in choice.finalists] == [1]


def finals_of(rounds: dict[int, tuple[float, ...]], trials: list[TrialRecord]) -> dict[str, Any]:
    return {
        trials[number].digest: {"values_us": list(values), "spreads": [0.001] * len(values), "failed": ""}
        for number, values in rounds.items()
    }


def test_the_flip_rate_says_how_often_noise_would_choose_another() -> None:
    trials = [trial(0, DEFAULT, 12.0), trial(1, config(128, "z"), 10.0), trial(2, config(16, "y"), 14.0)]

    def rate(default: float, winner: tuple[float, float, float]) -> float | None:
        finals = finals_of({0: (default,) * 3, 1: winner, 2: (14, 14, 14)}, trials)
        found = pick(trials, SPACE, "measured", finals)
        assert found is not None and found.to_json()["flip_rate"] == found.flip_rate
        assert found.flip_rate == pick(trials, SPACE, "measured", finals).flip_rate  # type: ignore[union-attr]
        return found.flip_rate

    assert rate(12.0, (9.9, 10.0, 10.1)) == 0.0  # nothing of its spread reaches the default
    assert rate(10.3, (9.9, 10.0, 10.4)) == 0.0  # well inside the band: it is the default in any repetition
    assert 0.1 < (rate(10.45, (9.9, 10.0, 10.4)) or 0.0) < 0.5  # at the band's edge
    once = pick(trials, SPACE, "measured", finals_of({0: (12,), 1: (10,), 2: (14,)}, trials))
    assert once is not None and once.flip_rate is None
    guesses = [trial(0, DEFAULT, 12.0, error=0.1), trial(1, config(64, "y"), 9.0, error=0.1)]
    assert pick(guesses, SPACE, "predicted").flip_rate is None  # type: ignore[union-attr]
