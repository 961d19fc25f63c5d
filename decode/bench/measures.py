"""A bench's figures as measures that can be compared, and what is not there, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..traffic.seen import USERS, Measured, Wanted, measured

NO_GPU = "needs a GPU: without one nothing is captured, and there is no byte floor"
BY_LAYER = ("time a layer by kind", "launches a layer", "share of the byte floor")
SEEN: Wanted = {
    "decode throughput without prefill": ("decode_tokens_a_s", None, 1.0, "tok/s"),
    "output throughput": ("output_tokens_a_s", None, 1.0, "tok/s"),
    "prefill rate": ("prefill_tokens_a_s", None, 1.0, "tok/s"),
    **USERS,
    "step time, median": ("step_s", "p50", 1e3, "ms"),
    "step time, P90": ("step_s", "p90", 1e3, "ms"),
    "drafter time": ("drafting_s", "p50", 1e3, "ms"),
}
"""Of :func:`~k3lab.decode.bench.batches.seen`, as :func:`~k3lab.decode.traffic.seen.measured` takes them."""


def measures(seen: Mapping[str, Any], layers: Mapping[str, Any] | None) -> Measured:
    """By name; what there is no figure of is left out."""
    made = measured(seen, SEEN)
    if layers is None:
        return made
    found: list[tuple[str, float | None, str]] = []
    for kind, one in layers["layers"].items():
        found += [
            (f"{kind} MoE layer", one["us"], "us"), (f"{kind} MoE layer, launches", one["launches"], "launches"),
            (f"{kind} MoE layer, share of the byte floor", one["share_of_floor"], "share"),
        ]  # fmt: skip
    found += [
        ("step alone", layers["step_us"], "us"), ("step alone, launches", layers["step_launches"], "launches"),
        ("step alone, share of the byte floor", layers["step_floor_us"] / layers["step_us"], "share"),
    ]  # fmt: skip
    return made | {name: {"value": value, "unit": unit} for name, value, unit in found if value is not None}


def absent(seen: Mapping[str, Any], layers: Mapping[str, Any] | None, *, drafts: int) -> dict[str, str]:
    """What is not measured, and why."""
    told = dict.fromkeys(BY_LAYER, NO_GPU) if layers is None else dict(layers["absent"])
    if not drafts:
        told["drafter time"] = "no drafts"
    elif not seen["drafting_s"]["samples"]:
        told["drafter time"] = "no request came to a step"
    if seen["decode_tokens_a_s"] is None:
        told["decode throughput, user rate, step time"] = (
            "one token a request comes out of its prompt: no step was decoded"
        )
    return told
