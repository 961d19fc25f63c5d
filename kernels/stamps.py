"""The tables that a build with stamps writes to, one a launch: 16 bytes a (stage, block, warp), nanoseconds and clock ticks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAGES = ("begin", "woken", "asked", "sent", "listening", "heard", "product", "told", "finished")
"""A warp's: its first instruction; after the dependency wait; what it loads ahead is asked for; what others need of it first is
published; it waits for what others publish; that has come; its product is summed over the block; its results are published, or
told to other warps; the end. A role of a kernel has those that it has."""
BLOCKS, WARPS, BYTES = 1024, 32, 16
TABLE_BYTES = len(STAGES) * BLOCKS * WARPS * BYTES


def build_of(config: Mapping[str, Any], place: int = 0) -> int:
    """Which build of a kernel a config asks for, as its ``JITTER``.

    ``jitter``: seed of random delays in every hand-over; ``stamps``: device address of :data:`TABLE_BYTES` zeroed bytes for each
    launch of the engine, of which this is number ``place``. Neither is in any space.
    """
    stamps = int(config.get("stamps", 0))
    return -(stamps + place * TABLE_BYTES) if stamps else int(config.get("jitter", 0))
