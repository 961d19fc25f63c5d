"""A generator of decode traces for demonstrations and tests. What it writes is marked synthetic, and read as such.

The trace has the shape of a graph-replayed K3 decode step with programmatic dependent launch: one graph launch a
step under a step mark, KDA, KDA, KDA, MLA layers of 13 and 15 kernels, starts that run ahead of the work, and the
shared expert on a side stream. The times are drawn from a seeded generator around fixed figures; they are not
measurements of anything.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from .errors import TraceError
from .synthetic_step import Faults, layer_parts, write_step

__all__ = ["Faults", "layer_parts", "synthesize"]

_EPOCH_NS = 1_760_000_000_000_000_000


def synthesize(
    path: str | Path,
    *,
    seed: int = 0,
    gpu: str | None = "NVIDIA GB300",
    tp: int = 16,
    steps: int = 25,
    layers: int = 12,
    scale: float = 1.0,
    faults: Faults | None = None,
) -> Path:
    """Write a synthetic decode trace as torch.profiler JSON (gzip where the name ends in ``.gz``).

    Args:
        path: where to write; replaced as a whole.
        seed: of the jitter (about one percent a kernel).
        gpu: device name to write; None leaves it out.
        tp: world size to write.
        steps: decode steps.
        layers: layers of a step; every fourth is MLA.
        scale: factor on all kernel times: 1.0 keeps the GB300 TP16 budget (KDA about 61 us), 1.2 does not.
        faults: what to make wrong.

    Returns:
        The path.

    Raises:
        TraceError: sizes that make no trace, or a path that cannot be written.
    """
    faults = faults or Faults()
    if steps < 1 or layers < 1 or scale <= 0 or not 1 <= faults.graphs <= layers:
        raise TraceError("a synthetic trace needs at least 1 step, 1 layer, a scale above 0 and a layer for each graph")
    path = Path(path)
    rng = random.Random(seed)
    events: list[dict[str, Any]] = []
    clock = 5_000_000_000
    for step in range(steps):
        keep = layers - 1 if faults.cut_last and step == steps - 1 else layers
        clock = write_step(events, rng, clock, step, layers, keep, scale, faults) + faults.pause_ns
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "k3lab_synthetic": True,
        "k3lab_note": "made by k3lab.traces.synthesize: not recorded on any GPU",
        "k3lab_seed": seed,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _EPOCH_NS,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": tp},
    }
    if gpu is not None:
        head["deviceProperties"] = [{"id": 0, "name": gpu}]
    _write(path, _dump(head, events))
    return path


def _dump(head: dict[str, Any], events: list[dict[str, Any]]) -> bytes:
    """JSON in which the integer ns of ``ts`` and ``dur`` stand as microseconds with three decimals, exactly."""
    lines = []
    for event in events:
        times = {key: f"{event[key] // 1000}.{event[key] % 1000:03d}" for key in ("ts", "dur")}
        rest = json.dumps({key: value for key, value in event.items() if key not in times})
        lines.append(f'{rest[:-1]}, "ts": {times["ts"]}, "dur": {times["dur"]}}}')
    body = ",\n".join(lines)
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{body}\n]}}\n'.encode()


def _write(path: Path, data: bytes) -> None:
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from None
