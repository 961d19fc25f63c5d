"""One record of what all ranks found: times over the ranks, their spread, and who wins at how many rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels.errors import InputError
from ...kernels.gpu_cards import GPU_CARDS
from .beside_names import ALL_REDUCES, NCCL_CHAIN
from .request import RanksError, RanksRequest

KIND = "k3lab-ranks"
NOT_TIMED = "ranks shared GPUs and were time-sliced: outputs were checked, no times were kept"
TIMED = ("real", "loopback")
SHARED = ("family", "engine", "exchange", "rows", "problem", "config", "narrow", "source_digest")


def over_ranks(series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One series of all ranks' of the same replays.

    Returns:
        ``us``: median over the replays of the slowest rank's time of a call; ``over_ranks_us``: largest minus smallest of
        the ranks' medians; ``stable``: on every rank; ``ranks``: each one's median, spread, samples and clocks.
    """
    slowest = [max(samples) for samples in zip(*(one["samples_ns"] for one in series), strict=True)]
    medians = [float(one["median_us"]) for one in series]
    return {
        "us": round(statistics.median(slowest) / 1000, 3),
        "over_ranks_us": round(max(medians) - min(medians), 3),
        "stable": all(one["stable"] for one in series),
        "calls": series[0]["calls"],
        "copies": series[0]["copies"],
        "ranks": [
            {name: one[name] for name in ("median_us", "spread", "samples_ns", "clocks")} for one in series
        ],
    }  # fmt: skip


def merge(request: RanksRequest, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record.

    Raises:
        RanksError: a case was wrong on a rank; one line that names both, and how many more there are.
    """
    faults = [
        f"rank {one['rank']}: {case['family']}/{case['engine']} {case['exchange']} at {case['rows']} rows: {fault}"
        for place in range(len(found[0]["cases"]))
        for one in found
        for case in [one["cases"][place]]
        for fault in case["check"]["faults"]
    ]
    if faults:
        raise RanksError(faults[0] + (f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""))
    entries = []
    for place, first in enumerate(found[0]["cases"]):
        same = [one["cases"][place] for one in found]
        entry = {name: first[name] for name in SHARED}
        worst = {name: max(one["check"]["errors"][name] for one in same) for name in first["check"]["errors"]}
        entry["check"] = {"steps": first["check"]["steps"], "digest": first["check"]["digest"], "errors": worst}
        for name in TIMED:
            if name in first:
                entry[name] = over_ranks([one[name] for one in same])
        entries.append(entry)
    beside = []
    for place, first in enumerate(found[0]["beside"]):
        what = {name: first[name] for name in ("what", "family", "rows", "relative_error") if name in first}
        beside.append({**what, **over_ranks([one["beside"][place] for one in found])})
    gpus = [one["gpu"] for one in found]
    return {
        "kind": KIND,
        "evidence": "measured",
        "ranks": request.size,
        "time_sliced": request.time_sliced,
        **({"note": NOT_TIMED} if request.time_sliced else {}),
        "gpu_count": len({gpu["index"] for gpu in gpus if gpu}),
        "steps": request.steps,
        "seed": request.seed,
        "policy": request.policy.to_json(),
        "environment": {**found[0]["environment"], "gpu": gpus[0], "links": found[0]["links"]},
        "cases": entries,
        "beside": beside,
        "missing": list(found[0]["missing"]),
    }


def table(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line a family and rows: best one-shot, two-shot and gathering engine, the chain over NCCL (us, where timed),
    ``wins``, and ``narrow``, the hidden size where it is less than K3's.
    """
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for case in data["cases"]:
        head = {name: case[name] for name in ("family", "rows", "narrow")}
        line = lines.setdefault((case["family"], case["rows"]), head)
        if "real" in case:
            us, name = case["real"]["us"], case["exchange"]
            line[name] = min(us, line.get(name, us))
    for one in data["beside"]:
        if one["what"] == NCCL_CHAIN:
            head = {"family": one["family"], "rows": one["rows"], "narrow": None}
            lines.setdefault((one["family"], one["rows"]), head)[NCCL_CHAIN] = one["us"]
    for line in lines.values():
        timed = {name: us for name, us in line.items() if name not in ("family", "rows", "narrow")}
        line["wins"] = min(timed, key=lambda name: timed[name]) if timed else None
    return list(lines.values())


def cross_overs(lines: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Family to the fewest rows from which on two shots beat one at all rows timed; None where they never do."""
    found: dict[str, int | None] = {}
    for name in dict.fromkeys(str(line["family"]) for line in lines):
        both = [line for line in lines if line["family"] == name and "one_shot" in line and "two_shot" in line]
        ahead: int | None = None
        for line in sorted(both, key=lambda line: int(line["rows"]), reverse=True):
            if line["two_shot"] >= line["one_shot"]:
                break
            ahead = int(line["rows"])
        if both:
            found[name] = ahead
    return found


def reduces(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line a row count: us of each plain all-reduce of BF16 [rows, hidden]."""
    lines: dict[int, dict[str, Any]] = {}
    for one in data["beside"]:
        if one["what"] in ALL_REDUCES:
            lines.setdefault(one["rows"], {"rows": one["rows"]})[one["what"]] = one["us"]
    return list(lines.values())


def load(path: Path) -> dict[str, Any]:
    """A record with times.

    Raises:
        InputError: none, or of time-sliced ranks, or of a GPU without a card.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no JSON'}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"{path} is no record of `k3lab ranks`")
    if data.get("time_sliced"):
        raise InputError(f"{path} holds no times: {NOT_TIMED}")
    name = ((data.get("environment") or {}).get("gpu") or {}).get("card")
    if name not in GPU_CARDS:
        raise InputError(f"{path} names no GPU with a card; GPUs with a card: {', '.join(GPU_CARDS)}")
    return data
