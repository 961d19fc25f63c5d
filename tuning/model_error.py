"""What the cost model's predictions were worth where they could be compared with measurements."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ..kernels.gpu_cards import GpuCard
from .cost_model import POOLED, stand_in

DATA = Path(__file__).parent / "data" / "model_error.json"
TARGET_TERMS = (
    "launch", "hand_over", "cluster", "memory", "l2", "scalar", "tile_loop", "issue", "rounds", "shared", "warps", "code",
)  # fmt: skip
"""Terms whose constants are times or rates of the GPU they were fitted on."""


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
    """The validation on this GPU, else on any; of an engine that runs on no GPU here, its sibling's."""
    table = validations()
    for name in (engine, stand_in(family, engine)):
        exact = table.get(f"{family}/{name}/{gpu.name}")
        others = [entry for key, entry in sorted(table.items()) if key.startswith(f"{family}/{name}/")]
        if exact or others:
            return exact or others[0]
    return None


def in_words(entry: dict[str, Any]) -> str:
    """Figures of a validation as a line."""
    how = ", each predicted by a fit to other shapes" if entry.get("way") else " left out of the fit"
    order = "" if entry["spearman"] is None else f", rank correlation {entry['spearman']:.2f}"
    picked = (
        f", its pick {entry['regret']:.1%} slower than the best (median; {entry['worst_regret']:.0%} at worst)"
        if entry["regret"] is not None
        else ""
    )
    return (
        f"on {entry['gpu']}, {entry['configs']} measured configs of {entry['shapes']} shapes{how}: median error "
        f"{entry['median_error']:.1%}{order}{picked}"
    )


def stated_error(family: str, engine: str, gpu: GpuCard) -> tuple[str, list[str]]:
    """(error in words, terms never calibrated on this GPU)."""
    entry = _nearest(family, engine, gpu)
    if entry is None:
        blind = validations().get(POOLED)
        text = "never compared with a measurement"
        if blind:
            text += f"; engines predicted by the others' constants were {blind['median_error']:.0%} off (median)"
        return text, list(TARGET_TERMS)
    text = in_words(entry)
    if stand_in(family, engine) != engine:
        text = f"of {stand_in(family, engine)}, whose constants it takes, {text}"
    if entry["gpu"] == gpu.name:
        return text, []
    return f"{text}; not compared on {gpu.name}", list(TARGET_TERMS)
