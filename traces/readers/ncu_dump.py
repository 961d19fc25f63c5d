"""Prints the wanted metrics of a .ncu-rep as JSON; a program of its own, since a damaged report can take it down.

``python ncu_dump.py REPORT METRIC...`` needs the package ncu-report alone, and exits with 3 where that is not there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MISSING = 3
_GPU = "device__attribute_display_name"


def _value(action: Any, name: str) -> list[str] | None:
    metric = action.metric_by_name(name)
    if metric is None or not metric.has_value():
        return None
    value = metric.value()
    return (
        None if value is None else [str(metric.unit() or ""), repr(value) if isinstance(value, float) else str(value)]
    )


def _dims(action: Any, prefix: str) -> str:
    found = [_value(action, f"launch__{prefix}_dim_{axis}") for axis in "xyz"]
    return f"({', '.join(str(int(float(item[1]))) for item in found if item)})" if all(found) else ""


def dump(path: str, wanted: list[str]) -> dict[str, Any]:
    """The launches of all ranges of a report, each with the wanted metrics as (unit, value)."""
    import ncu_report

    context = ncu_report.load_report(path)
    launches, gpus = [], set()
    for index in range(context.num_ranges()):
        part = context.range_by_idx(index)
        for number in range(part.num_actions()):
            action = part.action_by_idx(number)
            have = set(action.metric_names())
            metrics = {name: value for name in wanted if name in have and (value := _value(action, name)) is not None}
            if _GPU in have and (gpu := _value(action, _GPU)) is not None:
                gpus.add(gpu[1])
            name = action.name(action.NameBase_DEMANGLED) or action.name()
            launches.append({"name": str(name), "grid": _dims(action, "grid"), "block": _dims(action, "block"),
                             "metrics": metrics})  # fmt: skip
    return {"launches": launches, "gpus": sorted(gpus)}


if __name__ == "__main__":
    try:
        found = dump(sys.argv[1], sys.argv[2:])
    except ImportError:
        sys.exit(MISSING)
    json.dump(found, sys.stdout)
