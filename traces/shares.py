"""Shares of a time in whole nanoseconds: they add up exactly."""

from __future__ import annotations

from collections.abc import Mapping

NS = 10**9


def shared_out(total_ns: int, weights: Mapping[str, int]) -> dict[str, int]:
    """A time shared out by weights, in ns; what rounding leaves goes to those it took most from, in their order.

    Args:
        total_ns: the time, ns.
        weights: what each share stands for (bytes), not negative and not all 0.
    """
    whole = sum(weights.values())
    shares = {name: total_ns * weight // whole for name, weight in weights.items()}
    left = total_ns - sum(shares.values())
    ranked = sorted(weights, key=lambda name: -(total_ns * weights[name] % whole))
    for name in ranked[:left]:
        shares[name] += 1
    return shares


def floor_ns(moved: int, bytes_per_second: float) -> int:
    """The least time to move bytes, ns, rounded to the nearest."""
    speed = round(bytes_per_second)
    return (moved * NS + speed // 2) // speed
