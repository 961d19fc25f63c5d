"""How far the cost model is off: its predictions against recorded measurements it was not fitted to.

``python -m k3lab.tuning.validate RECORDING...`` prints the table that :mod:`k3lab.tuning.model_error`
reads from ``data/model_error.json``; ``--write`` replaces that file. A test holds the file against the
recordings under results/.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels import InputError, family
from ..kernels.gpu_cards import gpu_card
from ..kernels.whole_file import write_whole
from .cubin import KernelResources
from .model_error import DATA
from .predict import FITTED_ON, predict
from .record import read


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, the mean rank for ties."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            found[order[position]] = (start + end) / 2
        start = end + 1
    return found


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation; 0 where one side is constant."""
    try:
        return statistics.correlation(ranks(one), ranks(two))
    except statistics.StatisticsError:
        return 0.0


def regret(both: Sequence[tuple[float, float]]) -> float:
    """What taking the predicted winner costs, relative to the truly best; of configs predicted alike, the worst."""
    lowest = min(guess for guess, _ in both)
    return max(truth for guess, truth in both if guess == lowest) / min(truth for _, truth in both) - 1


def pairs(recording: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(predicted, measured) microseconds of every config that was measured, predicted from its recorded resources."""
    identity = recording["identity"]
    if identity["objective"] != "measured":
        raise InputError(
            f"a recording of {identity['objective']} values cannot judge the cost model; it takes measured ones"
        )
    owner = family(identity["family"])
    engine, problem = owner.engine(identity["engine"]), owner.problem_from_json(identity["problem"])
    gpu = gpu_card(identity["gpu"])
    found = []
    for trial in recording["configs"]:
        if trial["status"] != "ok":
            continue
        resources = [KernelResources(**kernel) for kernel in trial["resources"]]
        guess = predict(owner, engine, problem, trial["config"], gpu, None, found=resources, alone=True)
        found.append((guess.microseconds, trial["value"]))
    return found


def validate(recordings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """``family/engine/GPU`` to its figures, over recordings of problems the model was not fitted to.

    ``median_error`` is the median of ``|predicted - measured| / measured``, ``spearman`` the mean rank
    correlation of the recordings, ``regret`` the largest loss from taking the predicted winner.
    """
    groups: dict[str, dict[str, Any]] = {}
    for recording in recordings:
        identity = recording["identity"]
        owner = family(identity["family"])
        label = owner.problem_from_json(identity["problem"]).label
        if identity["family"] == "attention_projection" and label in FITTED_ON:
            continue
        key = f"{identity['family']}/{identity['engine']}/{gpu_card(identity['gpu']).name}"
        group = groups.setdefault(
            key, {"gpu": gpu_card(identity["gpu"]).name, "errors": [], "rank": [], "regret": [], "on": []}
        )
        both = pairs(recording)
        if len(both) < 5:
            continue
        group["errors"] += [abs(guess - truth) / truth for guess, truth in both]
        group["rank"].append(spearman([guess for guess, _ in both], [truth for _, truth in both]))
        group["regret"].append(regret(both))
        group["on"].append(label)
    return {
        key: {
            "gpu": group["gpu"],
            "configs": len(group["errors"]),
            "problems": sorted(group["on"]),
            "median_error": round(statistics.median(group["errors"]), 4),
            "spearman": round(statistics.mean(group["rank"]), 4),
            "regret": round(max(group["regret"]), 4),
        }
        for key, group in sorted(groups.items())
        if group["errors"]
    }


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    paths = [Path(arg) for arg in argv if arg != "--write"]
    try:
        text = json.dumps(validate(read(path) for path in paths), indent=1, sort_keys=True) + "\n"
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    if "--write" in argv:
        DATA.parent.mkdir(exist_ok=True)
        write_whole(DATA, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
