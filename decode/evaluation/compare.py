"""Whether two reports may share a ratio, and the ratios if they may.

A report is a JSON object with ``conditions`` and ``measures``, as ``decode bench`` writes them. Ratios are given only where everything that
decides a number, but for the backend, was the same in both.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...kernels import InputError


@dataclass(frozen=True)
class Conditions:
    """What must agree."""

    model: str
    weights: str
    """Digest, or which random weights."""
    gpu: str
    """Kind; ``cpu`` without one."""
    gpus: int
    """How many took part."""
    tp: int
    dcp: int
    transport: str
    """What carried the ranks' messages; loopback has no link cost."""
    drafts: int
    """A step; 0: non-speculative."""
    acceptance: str
    """Mode with its parameters; ``none`` without drafts."""
    kv_dtype: str
    ssm_dtype: str
    workload: str
    """Digest of what was asked: lengths, batch, pauses, fill of the context."""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


NO_GPU = "cpu"
WHY = {
    "gpus": "another number of GPUs: a difference is not the backend's alone",
    "gpu": "another kind of GPU",
    "drafts": "speculative and non-speculative results, or other numbers of drafts, share no ratio and no per-user claim",
    "acceptance": "another acceptance mode: synthetic acceptance fixes what standard acceptance measures",
    "workload": "another workload",
}
"""What is said of a field beside its two values."""
UNITS = {
    "tok/s": "higher", "tok/s/user": "higher", "s": "lower", "ms": "lower", "us": "lower", "launches": "lower", "share": "higher",
}  # fmt: skip
"""Unit of a measure to the direction that is better."""


@dataclass(frozen=True)
class Measure:
    """One figure of a report."""

    value: float
    unit: str
    samples: int | None = None
    """Behind a percentile; None of what is none."""
    tail_covered: bool = True
    """False of a percentile that has no sample beyond it."""


@dataclass(frozen=True)
class Report:
    """One file."""

    path: Path
    conditions: Conditions
    backend: str
    measures: dict[str, Measure]


def read_report(path: str | Path) -> Report:
    """Read a file.

    Raises:
        InputError: it cannot be read or is no such report; the field is named.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not JSON") from None
    return report_of(data, path)


def report_of(data: Any, path: Path) -> Report:
    """Of what a file holds, or would hold.

    Raises:
        InputError: it is no such report; the field is named.
    """
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("conditions"), dict)
        or not isinstance(data.get("measures"), dict)
    ):
        raise InputError(f"{path} is no report of decode bench: it lacks conditions or measures")
    # before contexts could lie over ranks no report said so
    given, fields = {"dcp": 1, **data["conditions"]}, Conditions.__dataclass_fields__
    for name, field in fields.items():
        kind = int if field.type == "int" else str
        if type(given.get(name)) is not kind:
            raise InputError(
                f"{path}: condition {name} is {given.get(name)!r}, must be {'a whole number' if kind is int else 'text'}"
            )
    measures = {}
    for name, one in data["measures"].items():
        good = isinstance(one, dict) and one.get("unit") in UNITS
        value: Any = one.get("value") if good else None
        if type(value) not in (int, float) or not -1e300 < value < 1e300:  # no comparison holds for NaN
            raise InputError(
                f"{path}: measure {name} is {str(one)[:60]}, must have a finite value and a unit of {', '.join(UNITS)}"
            )
        samples, covered = one.get("samples"), one.get("tail_covered", True)
        if not (samples is None or (type(samples) is int and samples > 0)) or type(covered) is not bool:
            raise InputError(f"{path}: measure {name} has samples {str(samples)[:60]}, tail_covered {str(covered)[:60]}; must be 1 or more, and true or false")  # fmt: skip
        measures[name] = Measure(float(value), str(one["unit"]), samples, covered)
    return Report(path, Conditions(**{name: given[name] for name in fields}), str(data.get("backend", "")), measures)


def differences(a: Report, b: Report) -> list[tuple[str, Any, Any, str]]:
    """Fields that forbid a ratio: name, both values, and why."""
    one, other = a.conditions.to_json(), b.conditions.to_json()
    found = [(name, one[name], other[name], WHY.get(name, "")) for name in one if one[name] != other[name]]
    if not found and a.conditions.gpu == NO_GPU:
        found.append(
            ("gpu", NO_GPU, NO_GPU, "no GPU: times of twins and of PyTorch on a CPU say nothing of either backend")
        )
    return found


def times_better(a: float, b: float, unit: str) -> float | None:
    """How many times better b is than a, by the unit's direction; None where that is no number."""
    up, down = (b, a) if UNITS[unit] == "higher" else (a, b)
    return up / down if down else None


def compare(a: Report, b: Report) -> dict[str, Any]:
    """B against A.

    Returns:
        ``comparable``; where it is, ``ratios`` by measure (how many times better B is, by the unit's direction, and the
        samples behind both of a percentile), else ``different``. Measures of different units, or that only one has, are ``left_out``.
    """
    different = differences(a, b)
    told: dict[str, Any] = {
        "a": str(a.path), "b": str(b.path), "backends": [a.backend, b.backend], "comparable": not different,
        "different": [{"field": name, "a": x, "b": y, "why": why} for name, x, y, why in different],
        "conditions": None if different else a.conditions.to_json(), "ratios": {}, "left_out": [],
    }  # fmt: skip
    if different:
        return told
    for name in dict.fromkeys((*a.measures, *b.measures)):
        if name not in a.measures or name not in b.measures or a.measures[name].unit != b.measures[name].unit:
            told["left_out"].append(name)
            continue
        x, y = a.measures[name], b.measures[name]
        told["ratios"][name] = {
            "a": x.value, "b": y.value, "unit": x.unit, "times_better": times_better(x.value, y.value, x.unit),
            "samples": [x.samples, y.samples], "tail_covered": [x.tail_covered, y.tail_covered],
        }  # fmt: skip
    return told
