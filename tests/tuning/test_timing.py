"""The parts of timing that need no GPU: copies, statistics, floors."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels import Launch, health
from k3lab.tuning import timing
from k3lab.tuning.clocks import read_clocks, throttle_names, throttled
from k3lab.tuning.policy import FULL, TimingPolicy
from k3lab.tuning.timing import Series, copies_for


def series(samples: list[int]) -> Series:
    return Series(samples, calls=40, copies=10, clocks_before={}, clocks_after={})


@pytest.mark.parametrize("weights", [4_128_768, 46_104_576, 90_144_768, 500_000_000])
def test_enough_copies_lie_between_two_uses_of_one(weights):
    copies = copies_for(weights, FULL, free_bytes=100 << 30)
    assert (copies - 1) * weights >= FULL.rotate_bytes
    assert (copies - 2) * weights < FULL.rotate_bytes


def test_copies_stay_within_half_the_free_memory():
    assert copies_for(50_000_000, FULL, free_bytes=200_000_000) == 2
    assert copies_for(0, FULL, free_bytes=1) == 1
    assert copies_for(50_000_000, FULL, free_bytes=1) == 1


def test_median_and_spread():
    found = series([10_000] * 9 + [10_200, 30_000])
    assert found.median_us == 10.0
    assert found.spread == pytest.approx(0.02)
    assert series([10_000, 9_000, 11_000]).spread == pytest.approx(0.2)


def test_policy_is_part_of_the_record():
    assert TimingPolicy(samples=5).to_json()["samples"] == 5
    assert FULL.to_json()["version"] == FULL.version


def test_throttle_reasons_have_names():
    assert throttle_names(0x4 | 0x40) == ["sw_power_cap", "hw_thermal_slowdown"]
    assert throttled({"throttle": ["gpu_idle", "sw_power_cap"]}) == ["sw_power_cap"]
    assert throttled({}) == []


def test_clocks_without_a_driver_say_so(monkeypatch):
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "pynvml":
            raise ImportError("no pynvml here")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert read_clocks() == {"unavailable": "no pynvml here"}


class FakeEvent:
    """Reads a clock that replays move on."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch):
    """A device on which each call takes 10 us, and restoring takes 500 us."""
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")
            FakeEvent.now += 0.4

    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream=None: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(timing.clocks, "read_clocks", dict)

    def restore() -> None:
        done.append("restore")
        FakeEvent.now += 0.5

    return done, restore


def test_restoring_comes_before_each_replay_and_is_not_timed(device):
    done, restore = device
    found = timing.time_calls([lambda: None] * 4, TimingPolicy(samples=5, warm_ms=1), restore)
    assert found.calls == 40
    assert found.samples_ns == [10_000] * 5
    assert done == ["restore", "replay"] * (len(done) // 2)
    assert len(done) >= 18


@pytest.mark.parametrize(("rest_ms", "rested"), [(10.0, True), (0.0, False)])
def test_a_series_under_a_power_cap_is_taken_again_with_rests(device, monkeypatch, rest_ms, rested):
    """Back to back the capped GPU takes 10 us a call; rested, the cap is gone and the clock says so."""
    done, restore = device
    capped = [{}, {"throttle": ["sw_power_cap"]}]  # before and after the first series
    monkeypatch.setattr(timing.clocks, "read_clocks", lambda: capped.pop(0) if capped else {"throttle": []})
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: done.append(f"rest {seconds}"))
    policy = TimingPolicy(samples=3, warm_ms=0, rest_ms=rest_ms)
    found = timing.time_calls([lambda: None], policy, restore)
    first = ["restore", "replay"] * 3
    assert done == first + ["rest 0.01", "restore", "replay", "restore", "replay"] * (3 if rested else 0)
    assert found.rest_ms == (10.0 if rested else 0.0)
    assert found.samples_ns == [10_000] * 3  # neither rest nor the replay behind it is timed
    assert bool(throttled(found.clocks_after)) is not rested


def test_what_is_updated_in_place_is_put_back_in_every_copy():
    family = SimpleNamespace(mutated=("state",))
    copies = [{"state": torch.arange(3.0)}, {"state": torch.arange(3.0)}]
    restore = timing.restorer(family, copies)
    for tensors in copies:
        tensors["state"].mul_(7)
    restore()
    assert all(torch.equal(tensors["state"], torch.arange(3.0)) for tensors in copies)
    assert timing.restorer(SimpleNamespace(mutated=()), copies) is None


@pytest.fixture
def timed(device, monkeypatch):
    """time_compiled with a launcher that notes how it was bound, and alternatives and a chain of given figures."""
    import k3lab.kernels.launch as launch
    from k3lab.tuning import alternatives, ceiling, chain

    bound = []

    class Runner:
        def __init__(self, compiled) -> None:
            self.buffers = compiled.held

        def bind(self, tensors, *, pdl=None):
            bound.append(pdl)
            return lambda: None

    monkeypatch.setattr(launch, "Runner", Runner)
    monkeypatch.setattr(ceiling, "read_ceiling", lambda: 4e12)
    weights = {"w": torch.empty(70_000_000, dtype=torch.bfloat16, device="meta")}
    monkeypatch.setattr(timing, "input_copies", lambda *_: [weights] * 4)
    monkeypatch.setattr(
        alternatives, "time_alternatives", lambda *_, **how: ({"PyTorch": 17.5, "torch.compile": 16.25}, {})
    )
    made = chain.ChainTiming(8.0, 9.5, 18.0, 20.0, 3, 3, 75, 0.001, True)
    monkeypatch.setattr(chain, "time_chain", lambda *_, **how: made)

    def run(*, pdl: bool, floor_bytes: int = 20_000_000, held=None, **asked):
        family = SimpleNamespace(
            rotated=("w",), mutated=(), traffic=lambda problem: SimpleNamespace(bytes=floor_bytes),
            measurement_fault=lambda problem, tensors: "too few" if "w" in tensors and "odd" in tensors else None,
        )  # fmt: skip
        launches = (Launch("k3_a_b_main", b"", (1, 1, 1), (32, 1, 1), 0, (), pdl=pdl),)
        compiled = SimpleNamespace(problem=None, launches=launches, held=held or {})
        return timing.time_compiled(family, compiled, TimingPolicy(samples=5, warm_ms=1), **asked), bound

    return run


def test_isolated_timing_drops_the_programmatic_edge(timed):
    found, bound = timed(pdl=True)
    assert bound == [False] * 4
    assert (found.cold_us, found.floor_us, found.percent_of_ceiling) == (10.0, 5.0, 50.0)
    assert (found.alternative_us, found.chain) == (None, None)


def test_too_few_copies_of_the_weights_are_told(timed, monkeypatch):
    assert timed(pdl=False)[0].notes == []
    few = {"w": torch.empty(50_000_000, dtype=torch.bfloat16, device="meta")}
    monkeypatch.setattr(timing, "input_copies", lambda *_: [few] * 4)
    (note,) = timed(pdl=False)[0].notes
    assert note.startswith("4 copies of the weights fit, 300 MB between two uses of one in place of 400")
    monkeypatch.setattr(timing, "input_copies", lambda *_: [few])
    assert "1 copies of the weights fit, 0 MB" in timed(pdl=False)[0].notes[0]


def test_alternatives_and_the_chain_stand_beside_the_isolated_figure(timed):
    data = timed(pdl=True, alternative=True, chain=True)[0].to_json()
    assert data["cold_us"] == 10.0
    assert data["alternatives"] == {"PyTorch": 17.5, "torch.compile": 16.25}
    assert data["alternative_us"] == 16.25
    assert (data["chain"]["chain_us"], data["chain"]["hidden_us"]) == (8.5, 2.0)
    json.dumps(data)


def test_a_launch_without_pdl_has_no_chain_figure(timed):
    assert timed(pdl=False, chain=True)[0].chain is None


def test_below_the_floor_is_a_broken_measurement(timed):
    with pytest.raises(timing.BrokenMeasurement, match=r"10.00 us lies below the byte floor of 10.50 us"):
        timed(pdl=False, floor_bytes=42_000_000)
    assert timed(pdl=False, floor_bytes=41_000_000)[0].cold_us == 10.0  # within 3 %


def test_a_family_may_refuse_a_timing_by_what_the_calls_left(timed):
    with pytest.raises(timing.BrokenMeasurement, match=r"^too few$"):
        timed(pdl=False, held={"odd": torch.zeros(1)})


def test_a_kernel_that_gave_up_waiting_was_not_timed(timed):
    words = torch.zeros(health.WORDS, dtype=torch.int32)
    timed(pdl=False, held={health.NAME: words})
    words[[health.EPOCH, health.PHASE, health.SLOT]] = torch.tensor([1, 1, 5], dtype=torch.int32)
    with pytest.raises(timing.BrokenMeasurement, match="gave up while it was timed: rank 5 did not publish"):
        timed(pdl=False, held={health.NAME: words})
