"""The result of looking at a trace, as an object and as JSON-able data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .analysis import ENOUGH_STEPS, DeviceLayers, Layer
from .budget import Budget
from .collector import undisturbed
from .explain import Finding, median_increments
from .families import UNNAMED, Names
from .family_check import ClassFamilies
from .layers import RECURRENCE, LayerClass
from .macro import macro_period
from .model import Trace
from .steps import TOGETHER
from .timing import quantile_ns
from .verdict import COARSE_NS, NOT_JUDGED, Judgement, class_period

SCHEMA = "k3lab.trace_report/1"
SYNTHETIC = "synthetic: made by a generator, not recorded on a GPU"
_REJECTED_SHOWN = 10


@dataclass(frozen=True)
class DeviceReport:
    """One device of the trace: layers, their judgements by position, the classes' by name, and findings."""

    layers: DeviceLayers
    layer_judgements: tuple[Judgement, ...]
    class_judgements: tuple[Judgement, ...]
    findings: tuple[Finding, ...]
    verdict: str
    families: tuple[ClassFamilies, ...] = ()
    """Of each class, in the order of the classes."""
    family_ns: tuple[int, ...] = ()
    """Of each layer, what the family adds that was held against its share; empty where the whole layer was."""


@dataclass(frozen=True)
class Report:
    """What a trace shows; with a budget also the verdict.

    ``verdict`` is ``pass``, ``fail``, ``inconclusive``, or ``not judged`` without a budget. ``reasons`` are
    plain lines, the weightiest first; ``notes`` are facts about the capture.
    """

    trace: Trace
    budget: Budget | None
    devices: tuple[DeviceReport, ...]
    verdict: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    names: Names = UNNAMED
    """What tells the families of its kernels."""
    family: str | None = None
    """The family that was held against its share, where it was not the whole layer."""

    def __repr__(self) -> str:  # the fields hold every kernel of the trace: too much for a notebook's cell
        return f"<Report {self.headline}>"

    @property
    def headline(self) -> str:
        """One line: file, verdict, first reason."""
        made = f" [{SYNTHETIC}]" if self.trace.synthetic else ""
        against = f" against {self.budget.name}" if self.budget else ""
        against += f", family {self.family}" if self.family else ""
        why = f": {self.reasons[0]}" if self.reasons else ""
        return f"{self.trace.path}{made}: {self.verdict}{against}{why}"

    @undisturbed()
    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data; all times in integer ns."""
        trace = self.trace
        return {
            "schema": SCHEMA,
            "file": trace.path,
            "format": trace.format,
            "tool": trace.tool,
            "synthetic": trace.synthetic,
            "graph_mode": trace.graph_mode,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "budget": self.budget.to_json() if self.budget else None,
            "family": self.family,
            "resolution_ns": trace.resolution_ns,
            "kernels": len(trace.kernels),
            "copies": dict(sorted(trace.copies.items())),
            "rejected": {
                "count": len(trace.rejected),
                "rows": [{"name": row.name, "reason": row.reason} for row in trace.rejected[:_REJECTED_SHOWN]],
            },
            "graph_replays": len(trace.graph_replays),
            "devices": [_device_json(device, self.names) for device in self.devices],
            "notes": list(self.notes),
        }


def _judged(judgements: tuple[Judgement, ...], index: int) -> dict[str, Any]:
    found = judgements[index] if index < len(judgements) else Judgement(NOT_JUDGED)
    return {"verdict": found.verdict, "count": found.count, "time": found.time, "reasons": list(found.reasons)}


def _device_json(report: DeviceReport, names: Names) -> dict[str, Any]:
    device = report.layers
    counts = device.counts
    return {
        "device": device.device,
        "gpu": device.gpu,
        "kernels": device.kernels,
        "verdict": report.verdict,
        "steps": {
            "source": counts.source, "found": counts.found, "used": counts.used, "warm_up": counts.warm_up,
            "cut": counts.cut, "uneven": counts.uneven, "prefill": counts.prefill,
            "kernels_outside": counts.outside, "requests": counts.requests, "rows": counts.rows,
            "strays": counts.strays, "median_ns": device.step_ns,
        },
        "split": {
            "method": device.method, "prefix": device.prefix, "suffix": device.suffix, "between": device.between,
            "macro_period": _macro_json(device),
            "abstained": device.abstained.reason if device.abstained else None,
            "candidates": [list(pair) for pair in device.abstained.candidates] if device.abstained else [],
        },
        "classes": [
            _class_json(group, device, names)
            | _families_json(report.families[index] if report.families else None)
            | _judged(report.class_judgements, index)
            for index, group in enumerate(device.classes)
        ],
        "layers": [
            _layer_json(layer, device.class_of[index])
            | {"family_ns": report.family_ns[index] if report.family_ns else None}
            | _judged(report.layer_judgements, index)
            for index, layer in enumerate(device.layers)
        ],
        "findings": [
            {"kind": item.kind, "layer": item.layer, "cost_ns": item.cost_ns, "cause": item.cause, "text": item.text}
            for item in report.findings
        ],
    }  # fmt: skip


def _macro_json(device: DeviceLayers) -> dict[str, Any] | None:
    found = macro_period([group.name for group in device.class_of], [len(group.sequence) for group in device.class_of])
    if found is None:
        return None
    return {"layers": len(found.classes), "classes": list(found.classes), "first": found.first, "times": found.times,
            "kernels": found.kernels}  # fmt: skip


def _families_json(found: ClassFamilies | None) -> dict[str, Any]:
    if found is None:
        return {"families": [], "unknown": {"kernels": 0, "time_ns": 0, "names": []}}
    rows = [
        {
            "family": row.family,
            "kernels": row.part.kernels,
            "time_ns": row.part.time_ns,
            "share_kernels": row.limit.kernels if row.limit else None,
            "share_ns": row.limit.period_ns if row.limit else None,
            "verdict": row.judgement.verdict,
            "count": row.judgement.count,
            "time": row.judgement.time,
            "reasons": list(row.judgement.reasons),
        }
        for row in found.rows
    ]
    names = [{"kernel": name, "times": times} for name, times in Counter(found.unknown.names).items()]
    return {
        "families": rows,
        "unknown": {"kernels": found.unknown.kernels, "time_ns": found.unknown.time_ns, "names": names},
    }


def _class_json(group: LayerClass, device: DeviceLayers, names: Names) -> dict[str, Any]:
    increments = median_increments(group, device)
    families = names.families(group.sequence)
    return {
        "class": group.name,
        "kind": group.kind,
        "layers": [device.layers[index].number for index in group.members],
        "kernels": len(group.sequence),
        "completion_period_ns": class_period(group, device),
        "sequence": [
            {"kernel": name, "family": families[position], "increment_ns": increments[position]}
            for position, name in enumerate(group.sequence)
        ],
    }


def _layer_json(layer: Layer, group: LayerClass) -> dict[str, Any]:
    periods = [times.completion_period for times in layer.times]
    typical = layer.typical
    return {
        "number": layer.number,
        "name": layer.name,
        "class": group.name,
        "kind": group.kind,
        "kernels": len(layer.kernels),
        "completion_period_ns": layer.period,
        "p10_ns": quantile_ns(periods, 10),
        "p90_ns": quantile_ns(periods, 90),
        "typical_step": {
            "completion_period_ns": typical.completion_period, "start_period_ns": typical.start_period,
            "wall_ns": typical.wall, "busy_ns": typical.busy, "sum_ns": typical.total,
            "overlap_same_stream_ns": typical.overlap_same_stream,
            "overlap_cross_stream_ns": typical.overlap_cross_stream, "gap_ns": typical.gap,
            "idle_ns": sum(typical.bubbles),
        },
    }  # fmt: skip


def capture_notes(trace: Trace, devices: tuple[DeviceReport, ...], told_layers: bool) -> list[str]:
    """Facts about the capture that a reader must know."""
    notes = [SYNTHETIC] if trace.synthetic else []
    notes.extend(trace.notes)
    notes.extend(trace.incomplete)
    for row in trace.rejected[:_REJECTED_SHOWN]:
        notes.append(f"rejected kernel row {row.name!r:.60}: {row.reason}")
    if len(trace.rejected) > _REJECTED_SHOWN:
        notes.append(f"... {len(trace.rejected)} rejected in all")
    if trace.copies:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(trace.copies.items()))
        notes.append(f"copies are not counted as kernels: {listed}")
    judged = sum(report.layers.kernels for report in devices)
    if devices and judged < len(trace.kernels):
        notes.append(f"{len(trace.kernels) - judged} kernels on devices with a trifle of them were left out")
    if 100 <= trace.resolution_ns < COARSE_NS:
        notes.append(f"the file counts time in steps of {trace.resolution_ns} ns")
    for report in devices:
        device, counts = report.layers, report.layers.counts
        where = f"device {device.device}: " if len(devices) > 1 else ""
        if device.layers and counts.used < ENOUGH_STEPS:
            notes.append(f"{where}medians of {_steps(counts.used)}; {ENOUGH_STEPS} after warm-up are advised")
        if device.method == RECURRENCE and not told_layers:
            alone = "; in a step alone a lost layer would not show" if counts.used == 1 else ""
            notes.append(f"{where}layers were told apart by what recurs; --layers N makes sure of their number{alone}")
        if counts.source == TOGETHER and device.layers:
            notes.append(
                f"{where}all graph launches were taken for one step; where each is a layer alone, --layers 1 says so"
            )
        if counts.cut:
            notes.append(f"{where}{counts.cut} steps cut off by the capture were dropped")
        notes.extend(f"{where}{line}" for line in device.missing)
        if device.cut_marks:
            notes.append(f"{where}{device.cut_marks} step marks have no kernels: cut off by the capture")
        if counts.prefill:
            notes.append(f"{where}{_steps(counts.prefill)} with prefill")
        if counts.outside:
            notes.append(f"{where}{counts.outside} kernels are in no step")
        if device.between:
            notes.append(f"{where}{device.between} kernels between layer marks are counted in the layer that follows")
    return notes


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
