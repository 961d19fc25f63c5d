"""A trace's budget verdict as plain data, for the report and the notebook."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


SHOWN = 16
"""Kernels of a layer listed in full; of a longer layer those that add most to it."""

FINDINGS = 12
"""Findings of a trace that are shown, from the costliest on; ``trace check --json`` has all."""


def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    name = kernel.replace("(anonymous namespace)", "anonymous")
    while (bare := re.sub(r"<[^<>]*>", "", name)) != name:  # innermost template arguments first
        name = bare
    return name.split("(", 1)[0].strip().rpartition(" ")[2] or kernel


def listed(sequence: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The kernels of a layer to show, in launch order, and what the others add together."""
    kernels = [
        {"place": place, "name": short_name(item["kernel"]), "family": item["family"], "us": (item["increment_ns"] or 0) / 1000}
        for place, item in enumerate(sequence, 1)
    ]  # fmt: skip
    most = sorted(kernels, key=lambda kernel: -kernel["us"])
    shown = kernels if len(kernels) <= SHOWN else sorted(most[:SHOWN], key=lambda kernel: kernel["place"])
    rest = [kernel for kernel in kernels if kernel not in shown]
    return {
        "count": len(kernels),
        "all": kernels,
        "kernels": shown,
        "others": len(rest),
        "others_us": sum(kernel["us"] for kernel in rest),
    }


def shown_verdict(verdict: str, synthetic: bool) -> dict[str, str]:
    """Words and style class of a verdict: of a trace that a generator wrote it does not look like one of a real run."""
    if synthetic and verdict != "not judged":
        return {"word": f"{verdict} (synthetic)", "style": "synthetic"}
    return {"word": verdict, "style": verdict.split()[0]}


def verdict_data(trace: Path, budget: str) -> dict[str, Any]:
    """Verdict, the line that says why, GPUs, findings, notes, and each layer class kernel by kernel.

    Raises:
        TraceError: no usable trace, or no such budget.
    """
    from ..traces import check_trace

    report = check_trace(trace, budget)
    devices = report.to_json()["devices"]
    classes = [
        {
            "name": group["class"],
            "kind": group["kind"],
            "verdict": group["verdict"],
            **shown_verdict(group["verdict"], report.trace.synthetic),
            "layers": len(group["layers"]),
            "us": group["completion_period_ns"] / 1000,
            **listed(group["sequence"]),
        }
        for device in devices
        for group in device["classes"]
    ]
    return {
        "status": report.verdict,
        **shown_verdict(report.verdict, report.trace.synthetic),
        "gpus": list(dict.fromkeys(device["gpu"] for device in devices if device["gpu"])),
        "budget": budget,
        "line": report.headline,
        "synthetic": report.trace.synthetic,
        "reasons": list(report.reasons),
        "findings": [item["text"] for device in devices for item in device["findings"]][:FINDINGS],
        "notes": list(report.notes),
        "classes": classes,
    }
