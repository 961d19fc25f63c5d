"""torch.compile beside the plain operators, on the CPU: one compilation for all copies, a limit, reasons."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import torch
from k3lab.kernels import SMALL_K3, family
from k3lab.tuning import alternatives
from k3lab.tuning.alternatives import COMPILED, PYTORCH, Late, compiled_calls, time_alternatives, within
from k3lab.tuning.policy import QUICK
from k3lab.tuning.timing import Series

FAMILY = family("attention_projection")
PROBLEM = FAMILY.problem(SMALL_K3, tp=1, rows=4)


def copies(count: int) -> list[dict[str, torch.Tensor]]:
    first = FAMILY.inputs(PROBLEM, 0)
    out = torch.zeros(4, PROBLEM.outputs, dtype=torch.bfloat16)
    return [{**first, "w": first["w"].clone(), "out": out} for _ in range(count)]


def test_the_operators_are_the_twin_s_work():
    tensors = copies(1)[0]
    found = FAMILY.operators(PROBLEM)(tensors)["out"].float()
    wanted = FAMILY.twin(PROBLEM, tensors)["out"]
    assert float((found - wanted).norm() / wanted.norm()) < FAMILY.tolerance(PROBLEM, "out").relative


def test_one_compilation_serves_more_copies_than_dynamo_would_recompile_for():
    calls = compiled_calls(FAMILY, PROBLEM, copies(12), 60, backend="eager")
    assert not isinstance(calls, str), calls
    assert len(calls) == 12
    calls[-1]()


def test_copies_that_are_not_alike_are_told_not_run_by_plain_operators():
    unlike = copies(2)
    unlike[1]["w"] = unlike[1]["w"][:-16].clone()
    assert "ecompil" in str(compiled_calls(FAMILY, PROBLEM, unlike, 60, backend="eager"))


def test_why_there_is_none(monkeypatch):
    assert compiled_calls(FAMILY, PROBLEM, copies(1), 0) == "left out: no time was given to it"
    assert "no such backend" in str(compiled_calls(FAMILY, PROBLEM, copies(1), 60, backend=refuse))
    monkeypatch.setattr(type(FAMILY), "operators", lambda self, problem: None)
    assert compiled_calls(FAMILY, PROBLEM, copies(1), 60) == "family attention_projection has no function for it"


def refuse(graph, inputs):
    raise OSError("no such backend\nhere")


def slow(graph, inputs):
    while True:
        try:
            time.sleep(60)
        except Exception:  # a compiler that survives its own errors is stopped all the same
            continue


def test_a_compilation_has_a_limit():
    started = time.monotonic()
    assert compiled_calls(FAMILY, PROBLEM, copies(1), 0.3, backend=slow) == "not done after 0 s"
    assert time.monotonic() - started < 20
    with pytest.raises(Late), within(0.05):
        time.sleep(20)
    time.sleep(0.1)  # no alarm is left


def test_a_limit_that_a_finaliser_swallows_comes_again():
    def swallow():
        with contextlib.suppress(Late):
            time.sleep(20)
        time.sleep(20)

    started = time.monotonic()
    with pytest.raises(Late), within(0.05):
        swallow()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("left", [0.2, 0.01])
def test_a_caller_s_own_alarm_goes_on_after_it(left):
    """pytest-timeout's, for one: a test that hangs after its compilation would have no limit else."""
    rung = []
    timer, handler = signal.setitimer(signal.ITIMER_REAL, 0), signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, left)
        with within(5):
            time.sleep(0.05)
        assert not rung
        time.sleep(0.3)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_both_are_timed_and_a_missing_one_keeps_its_reason(monkeypatch):
    seen = []

    def steady(calls, policy, restore=None):
        seen.append(len(calls))
        return Series([2000 * len(seen)], 1, 1, {}, {}), True

    monkeypatch.setattr(alternatives, "steady", steady)
    found, missing = time_alternatives(FAMILY, PROBLEM, copies(3), QUICK, compile_s=0.0)
    assert found == {PYTORCH: 2.0}
    assert list(missing) == [COMPILED]
    monkeypatch.setattr(alternatives, "compiled_calls", lambda *_: [lambda: None] * 3)
    found, missing = time_alternatives(FAMILY, PROBLEM, copies(3), QUICK, compile_s=1.0)
    assert (found, missing) == ({PYTORCH: 4.0, COMPILED: 6.0}, {})
    assert seen == [3, 3, 3]
