"""What the cost model's predictions were worth where they could be compared with measurements."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ..kernels.gpu_cards import GpuCard

DATA = Path(__file__).parent / "data" / "model_error.json"
TARGET_TERMS = ("launch", "hand_over", "memory latency", "L2 bandwidth", "scalar rate")


@cache
def validations() -> dict[str, Any]:
    """``family/engine/GPU`` to the figures of its validation; empty before the first."""
    return json.loads(DATA.read_text()) if DATA.is_file() else {}


ASSUMED_ERROR = 0.25
"""Tie band where nothing was ever compared: an assumption, and called one."""


def relative_error(family: str, engine: str, gpu: GpuCard) -> float:
    """Median absolute relative error to take as the tie band; :data:`ASSUMED_ERROR` where nothing was ever compared."""
    best = _nearest(family, engine, gpu)
    return float(best["median_error"]) if best else ASSUMED_ERROR


def band_source(family: str, engine: str, gpu: GpuCard) -> str:
    """Where :func:`relative_error` comes from, in words."""
    best = _nearest(family, engine, gpu)
    return (
        f"the cost model's median error on {best['gpu']}" if best else "assumed: the cost model was never compared here"
    )


def _nearest(family: str, engine: str, gpu: GpuCard) -> dict[str, Any] | None:
    """The validation on this GPU, else on any."""
    table = validations()
    exact = table.get(f"{family}/{engine}/{gpu.name}")
    others = [entry for key, entry in sorted(table.items()) if key.startswith(f"{family}/{engine}/")]
    return exact or (others[0] if others else None)


def stated_error(family: str, engine: str, gpu: GpuCard) -> tuple[str, list[str]]:
    """(error in words, terms never calibrated on this GPU)."""
    entry = _nearest(family, engine, gpu)
    if entry is None:
        return "never compared with a measurement", list(TARGET_TERMS)
    text = (
        f"on {entry['gpu']}, {', '.join(entry['problems'])}, {entry['configs']} measured configs: median error "
        f"{entry['median_error']:.0%}, rank correlation {entry['spearman']:.2f}, its pick {entry['regret']:.0%} slower than the best"
    )
    if entry["gpu"] == gpu.name:
        return text, []
    return f"{text}; not compared on {gpu.name}", list(TARGET_TERMS)
