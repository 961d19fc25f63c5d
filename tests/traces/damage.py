"""Damaged files: copies with some bytes changed, and what becomes of one that is read or judged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from k3lab.traces import TraceError, check_trace, inspect_trace


def outcome(path: Path, read: Callable[[Path], Any] | None = None) -> str:
    """The verdict, or ``read`` where only that is asked; ``refused`` if in one line; anything else fails the test."""
    try:
        if read is not None:
            read(path)
            return "read"
        report = check_trace(path, "gb300-tp16")
        json.dumps(report.to_json())
        inspect_trace(path)
    except TraceError as error:
        return "refused" if "\n" not in str(error) else "several lines"
    return report.verdict


def flipped(data: bytes, seed: int, times: int) -> Iterator[bytes]:
    """Copies of the data with one, three or twenty bytes changed."""
    rng = random.Random(seed)
    for _ in range(times):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        yield bytes(broken)
