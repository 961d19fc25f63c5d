"""What may be said of paired scores and of long outputs, on made-up ones whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from k3lab.decode.evaluation.drift import Outputs, drift, edges, repeated
from k3lab.decode.evaluation.outputs import Output
from k3lab.decode.evaluation.paired import interval, paired


def scores(count: int, chance: float, seed: int, repeats: int = 1) -> dict[str, list[float]]:
    drawn = np.random.default_rng(seed)
    return {str(n): [float(x) for x in drawn.random(repeats) < chance] for n in range(count)}


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        one = paired(scores(60, 0.7, seed), scores(60, 0.7, 1000 + seed), margin=0.02, seed=seed)
        held += one.low <= 0 <= one.high
    assert 180 <= held <= 199  # 190 are meant; never all, or the interval would be too wide to be of use


def test_a_loss_is_found_where_there_are_enough_problems() -> None:
    assert paired(scores(300, 0.8, 1), scores(300, 0.6, 2), margin=0.02).verdict == "worse"
    assert paired(scores(300, 0.6, 1), scores(300, 0.8, 2), margin=0.02).verdict == "better"
    few = paired({str(n): [1.0] for n in range(9)}, {str(n): [0.0] for n in range(9)}, margin=0.02)
    assert few.verdict == "inconclusive" and few.difference == -1


def test_alike_on_few_problems_is_not_alike() -> None:
    def same(count: int) -> str:
        return paired(scores(count, 0.5, 1), scores(count, 0.5, 1), margin=0.02).verdict

    assert same(30) == "inconclusive"  # 12 % of all problems could differ unseen
    assert same(200) == "no loss"


def test_where_nothing_succeeds_nothing_is_concluded() -> None:
    assert paired(scores(400, 0.0, 1), scores(400, 0.0, 2), margin=0.02).verdict == "inconclusive"


def test_repeats_of_a_problem_are_no_problems() -> None:
    """Ten problems, five of which the second always fails: 100 repeats make it no surer than one."""
    first = {str(n): [1.0] * 100 for n in range(10)}
    second = {str(n): [float(n % 2)] * 100 for n in range(10)}
    once = paired({n: own[:1] for n, own in first.items()}, {n: own[:1] for n, own in second.items()}, margin=0.02)
    often = paired(first, second, margin=0.02)
    assert (once.low, once.high) == (often.low, often.high) and often.problems == 10 and often.differing == 5


def test_problems_that_only_one_has_do_not_count() -> None:
    one = paired({"a": [1.0], "b": [1.0]}, {"b": [1.0], "c": [0.0]}, margin=0.02)
    assert one.problems == 1 and one.difference == 0
    assert paired({}, {}, margin=0.1).verdict == "inconclusive"
    assert interval([]) == (float("-inf"), float("inf"))


def test_windows_double() -> None:
    assert edges(63) == [0] and edges(64) == [0, 64] and edges(300) == [0, 64, 128, 256]


def test_a_run_that_was_there_before_is_a_repeat() -> None:
    assert not any(repeated(range(50)))
    looped = repeated([*range(8)] * 3)
    assert looped == [False] * 15 + [True] * 9
    assert repeated([1, 2]) == [False, False]


def texts(count: int, length: int, seed: int, late: float = 0.0, loops: bool = False) -> Outputs:
    """Random outputs; from token 256 on less likely by ``late`` nats, or going round in a loop."""
    drawn = np.random.default_rng(seed)
    made = {}
    for n in range(count):
        tokens, nats = drawn.integers(0, 1000, length), -drawn.gamma(1.0, 1.0, length)
        nats[256:] -= late
        if loops:
            tokens[256:] = np.resize(tokens[:16], max(0, length - 256))
        made[str(n)] = [Output([int(t) for t in tokens], [float(x) for x in nats])]
    return made


def test_outputs_that_stay_alike_do_not_drift() -> None:
    verdicts = [drift(texts(24, 600, seed), texts(24, 600, 100 + seed)).verdict for seed in range(30)]
    assert verdicts.count("none found") >= 28 and "inconclusive" not in verdicts
    found = drift(texts(24, 600, 1), texts(24, 600, 2))
    assert found.last == 512
    assert [(one.begin, one.end) for one in found.windows] == [(0, 64), (64, 128), (128, 256), (256, 512)]
    assert all(one.alike == 0 for one in found.windows)
    same = drift(texts(24, 600, 1), texts(24, 600, 1))
    assert same.verdict == "none found" and all(one.alike == 1 for one in same.windows)


@pytest.mark.parametrize("fault", [{"late": 0.4}, {"loops": True}])
def test_an_output_that_goes_astray_late_is_found(fault: dict[str, float]) -> None:
    found = drift(texts(24, 600, 1), texts(24, 600, 2, **fault))  # type: ignore[arg-type]
    assert found.verdict == "drifts"
    assert drift(texts(24, 250, 1), texts(24, 250, 2, **fault)).verdict == "none found"  # type: ignore[arg-type]


def test_both_alike_astray_are_no_drift_of_one() -> None:
    assert drift(texts(24, 600, 1, loops=True), texts(24, 600, 2, loops=True)).verdict == "none found"


def test_few_long_outputs_conclude_nothing() -> None:
    assert drift(texts(9, 600, 1), texts(9, 600, 2, late=1.0)).verdict == "inconclusive"
    assert drift({}, {}).verdict == "inconclusive"
