"""Makes a recorded torch.profiler trace small and anonymous: python trim.py FULL.json.gz SMALL.json.gz.

Kept: kernels, copies, graph launches and user annotations, with the arguments a trace reader uses. Dropped: operators,
Python calls, flows, other API calls, metadata, and whatever tells of the host (paths, process numbers, uptime, ids).
"""

from __future__ import annotations

import gzip
import json
import sys
from decimal import Decimal
from itertools import islice
from typing import Any

DEVICE_ROWS = ("kernel", "gpu_memcpy", "gpu_memset")
ARGUMENTS = ("device", "stream", "correlation", "grid", "block", "graph node id")
STEPS = 4
"""Graph replays kept, from the first."""
HEAD = ("schemaVersion", "cuda_driver_version", "cuda_runtime_version", "cupti_version", "displayTimeUnit")


def kept(event: dict[str, Any]) -> bool:
    """Whether the event is one of those a trace check needs."""
    category = event.get("cat")
    launch = category == "cuda_runtime" and "GraphLaunch" in event["name"]
    return event.get("ph") == "X" and (category in (*DEVICE_ROWS, "user_annotation") or launch)


def small(event: dict[str, Any], origin: Decimal) -> str:
    """One event as JSON; its times are moved by a constant and keep their nanoseconds."""
    args = event.get("args", {})
    host = event["cat"] not in DEVICE_ROWS
    row = {
        "ph": "X",
        "cat": event["cat"],
        "name": event["name"],
        "pid": 1 if host else args["device"],
        "tid": 1 if host else args["stream"],
        "args": {key: args[key] for key in ARGUMENTS if key in args},
    }
    text = json.dumps(row, separators=(",", ":"))
    return f'{text[:-1]},"ts":{event["ts"] - origin + 1000},"dur":{event["dur"]}}}'


def main(source: str, target: str) -> None:
    """Write the small trace; the same input gives the same bytes."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        data = json.load(file, parse_float=Decimal)
    events = sorted((event for event in data["traceEvents"] if kept(event)), key=lambda event: event["ts"])
    fifth = next(islice((event for event in events if event["cat"] == "cuda_runtime"), STEPS, None))
    # replays run long after their launches, so device rows are cut by correlation and host rows by time
    events = [
        event
        for event in events
        if (event["ts"] + event["dur"] < fifth["ts"] if event["cat"] == "user_annotation" else True)
        and event["args"].get("correlation", 0) < fifth["args"]["correlation"]
    ]
    origin = Decimal(events[0]["ts"])
    events.sort(
        key=lambda event: (event["cat"], event["name"], str(event["args"].get("grid")), event["ts"])
    )  # packs best
    head = {key: data[key] for key in HEAD if key in data}
    head["deviceProperties"] = [{"id": item["id"], "name": item["name"]} for item in data["deviceProperties"]]
    rows = ",\n".join(small(event, origin) for event in events)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "traceEvents": [\n{rows}\n]}}\n'
    with open(target, "wb") as out:
        out.write(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
