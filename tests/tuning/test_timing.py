"""The parts of timing that need no GPU: copies, statistics, floors."""

import pytest
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
