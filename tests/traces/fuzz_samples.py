"""Sound little traces of every kind, which pass, as rows that a fuzzer can take apart: see fuzz.py."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsys_eras import ERAS, LATEST

STEPS, LAYERS, KERNELS = 5, 4, 13
HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}


@dataclass
class Rows:
    """A trace as rows: dictionaries of cells. ``places`` gives (step, layer) of the rows that are kernels.

    ``written`` makes the file; ``layers`` is what the check is told where no mark tells them.
    """

    kind: str
    suffix: str
    rows: list[dict[str, Any]]
    places: dict[int, tuple[int, int]]
    write: Callable[[Path, list[dict[str, Any]]], Path]
    launches: dict[int, int] = field(default_factory=dict)
    layers: int | None = None

    def copy(self) -> Rows:
        """A copy whose rows may be changed."""
        return Rows(self.kind, self.suffix, copy.deepcopy(self.rows), dict(self.places), self.write,
                    dict(self.launches), self.layers)  # fmt: skip


def _places(rows: list[dict[str, Any]], is_kernel: Callable[[dict[str, Any]], bool]) -> dict[int, tuple[int, int]]:
    """Kernels are written step by step and layer by layer."""
    found = [index for index, row in enumerate(rows) if is_kernel(row)]
    size = len(found) // STEPS
    return {row: (at // size, at % size // KERNELS) for at, row in enumerate(found)}


def _json(make: Any, kind: str, events: list[dict[str, Any]], layers: int | None, suffix: str = ".json") -> Rows:
    def write(path: Path, rows: list[dict[str, Any]]) -> Path:
        return make.torch(path, rows, **HEAD)

    launches = [index for index, row in enumerate(events) if "Launch" in row["name"]]
    per_step = max(1, len(launches) // STEPS)
    return Rows(kind, suffix, events, _places(events, lambda row: row["cat"] == "kernel"), write,
                {row: at // per_step for at, row in enumerate(launches)}, layers)  # fmt: skip


def _graphs(make: Any) -> list[dict[str, Any]]:
    return make.pdl_events(steps=STEPS, layers=LAYERS, slow=None, bubble=None)


def _marked(make: Any) -> list[dict[str, Any]]:
    events = _graphs(make)
    launches = [event for event in events if event["cat"] == "cuda_runtime"]
    return events + [
        make.host("user_annotation", f"step[DECODE bs=8] {index}", event["ts"] - 4, 14.5)
        for index, event in enumerate(launches)
    ]


def _eager(make: Any) -> list[dict[str, Any]]:
    events, correlation = [], 0
    for step in range(STEPS):
        clock = 1000.5 + step * 1000
        events.append(make.host("user_annotation", f"step[DECODE bs=8] {step}", clock, 900))
        for layer in range(LAYERS):
            events.append(make.host("user_annotation", f"model.layers.{layer}", clock + 10 + layer * 100, 90))
            for index in range(KERNELS):
                correlation += 1
                at = clock + 11 + layer * 100 + index * 5
                events.append(make.host("cuda_runtime", "cudaLaunchKernel", at, 3, correlation))
                ran = clock + 5000 + 4.6 * (layer * KERNELS + index)
                events.append(make.kernel(f"k{index}", round(ran, 3), 4.2, correlation=correlation))
    return events


def _nsys(make: Any, kind: str, folder: Path, era: Any) -> Rows:
    file = make.node_mode(folder / "base.sqlite", layers=LAYERS, replays=STEPS)
    file.tables = era.tables
    file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
    kept = set(era.tables)
    rows = [{"table": table, **row} for table, row in file.rows if table in kept]

    def write(path: Path, rows: list[dict[str, Any]]) -> Path:
        file.path = path
        known = [row for row in rows if row.get("table") in era.tables]
        return file.write(rows=[(row["table"], {k: v for k, v in row.items() if k != "table"}) for row in known])

    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    launches = [index for index, row in enumerate(rows) if row["table"] == "CUPTI_ACTIVITY_KIND_RUNTIME"]
    return Rows(kind, ".sqlite", rows, _places(rows, lambda row: row["table"] == kernels), write,
                {row: at for at, row in enumerate(launches)})  # fmt: skip


def _table(make: Any) -> Rows:
    events = [event for event in _graphs(make) if event["cat"] == "kernel"]
    return Rows("gpu_trace", ".csv", events, _places(events, lambda row: True), make.gpu_trace, layers=LAYERS)


def samples(make: Any, folder: Path) -> list[Rows]:
    """One of each kind.

    Args:
        make: the generators of conftest.py.
        folder: where their files are made.
    """
    return [
        _json(make, "graphs", _graphs(make), LAYERS),
        _json(make, "graphs_gz", _graphs(make), LAYERS, ".json.gz"),
        _json(make, "marked_graphs", _marked(make), LAYERS),
        _json(make, "eager", _eager(make), None),
        _nsys(make, "nsys_latest", folder, LATEST),
        _nsys(make, "nsys_2021", folder, ERAS[0]),
        _nsys(make, "nsys_2022", folder, ERAS[1]),
        _table(make),
    ]


def dumps(rows: list[dict[str, Any]]) -> str:
    """Rows as text, to show a mutant that did wrong."""
    return json.dumps(rows, default=repr)[:2000]
