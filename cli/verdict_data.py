"""A trace's budget verdict as plain data, for the report and the notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def budget_us(name: str, kind: str, gpu: str, tp: int) -> float | None:
    """Microseconds a layer of the kind may take; None where the budget is for another GPU, TP or kind."""
    from ..traces.budget import load_budget

    budget = load_budget(name)
    limit = budget.limit(kind)
    if not budget.fits_gpu(gpu) or budget.tp != tp or limit is None or limit.period_ns is None:
        return None
    return limit.period_ns / 1000


def verdict_data(trace: Path, budget: str) -> dict[str, Any]:
    """Verdict, the line that says why, notes, and each layer class kernel by kernel.

    Raises:
        TraceError: no usable trace, or no such budget.
    """
    from ..traces import check_trace

    report = check_trace(trace, budget)
    classes = [
        {
            "name": group["class"],
            "kind": group["kind"],
            "verdict": group["verdict"],
            "layers": len(group["layers"]),
            "us": group["completion_period_ns"] / 1000,
            "kernels": [
                {"name": item["kernel"], "family": item["family"], "us": (item["increment_ns"] or 0) / 1000}
                for item in group["sequence"]
            ],
        }
        for device in report.to_json()["devices"]
        for group in device["classes"]
    ]
    return {
        "status": report.verdict,
        "budget": budget,
        "line": report.headline,
        "synthetic": report.trace.synthetic,
        "reasons": list(report.reasons),
        "notes": list(report.notes),
        "classes": classes,
    }
