"""Two traces of like layers, class by class and kernel by kernel: what changed, and whether by more than the steps vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis import DeviceLayers
from ..check import report_on
from ..errors import require_positive
from ..families import PlanLike, gather_names
from ..model import Trace
from ..readers.opening import read_trace
from ..report import Report
from ..steps import NONE
from .comparing import DeviceDiff, compare_devices
from .matching import match_classes
from .spread import FEWEST_STEPS
from .words import device_reasons

CHANGED, UNCHANGED, INCONCLUSIVE, REFUSED = (
    "changed", "no change beyond the spread", "inconclusive", "refused"
)  # fmt: skip
_LIKE_LAYERS = 0.5


@dataclass(frozen=True)
class TraceDiff:
    """What changed from a to b. ``refused`` names the fields in which the traces are no like things, with both values.

    ``verdict``: changed, no change beyond the spread, inconclusive, refused.
    """

    a: Trace
    b: Trace
    verdict: str
    refused: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]
    devices: tuple[DeviceDiff, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:  # the fields hold every kernel of both traces
        why = f": {self.reasons[0]}" if self.reasons else ""
        return f"<TraceDiff {self.a.path} (a), {self.b.path} (b): {self.verdict}{why}>"

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-able data; all times in integer ns."""
        from .words import diff_json

        return diff_json(self)


def diff_traces(
    a: str | Path,
    b: str | Path,
    *,
    layers: int | None = None,
    plan: PlanLike | None = None,
    names: Sequence[str | Path] | None = None,
    force: bool = False,
) -> TraceDiff:
    """Compare two traces.

    Args:
        a: the trace before; any that ``check_trace`` takes.
        b: the trace after.
        layers: how many layers a step has, if known; in both.
        plan: kernel names to families, as for ``check_trace``.
        names: names tables, as for ``check_trace``.
        force: compare although the GPU, the number of ranks, the rows or the layers differ.

    Raises:
        TraceError: one of them is no usable trace, or a wrong argument.
    """
    require_positive(layers=layers)
    known = gather_names(plan, names)
    one, other = (report_on(read_trace(path), None, known, layers=layers) for path in (a, b))
    open_questions = [*_open_questions(one, "a"), *_open_questions(other, "b")]
    differing = _differing(one, other)
    notes = _notes(one, other, force and bool(differing))
    if differing and not force:
        reasons = tuple(f"{field} differs: {values}" for field, values in differing)
        return TraceDiff(one.trace, other.trace, REFUSED, tuple(differing), reasons, (), notes)
    if (
        not one.devices
        or not other.devices
        or any(report.layers.abstained for r in (one, other) for report in r.devices)
    ):
        return TraceDiff(one.trace, other.trace, INCONCLUSIVE, (), tuple(open_questions), (), notes)
    devices = tuple(
        compare_devices(one.trace, left.layers, other.trace, right.layers, known)
        for left, right in zip(one.devices, other.devices, strict=False)
    )
    told = [line for device in devices for line in device_reasons(device, len(devices) > 1)]
    if any(item.period.beyond is None for device in devices for item in device.classes):
        open_questions.append(
            f"under {FEWEST_STEPS} steps on a side: whether times changed beyond their spread is not known"
        )
    verdict = CHANGED if told else INCONCLUSIVE if open_questions else UNCHANGED
    return TraceDiff(one.trace, other.trace, verdict, (), (*told, *dict.fromkeys(open_questions)), devices, notes)


def _open_questions(report: Report, side: str) -> list[str]:
    """Why nothing can be said of a trace, or not that nothing changed."""
    found = [f"{side}, {report.trace.path}: {reason}" for reason in report.reasons]
    found += [f"{side}, {report.trace.path}: {reason}" for reason in report.trace.incomplete]
    if report.trace.rejected:
        found.append(f"{side}, {report.trace.path}: {len(report.trace.rejected)} kernel rows have unusable times")
    for device in report.devices:
        if device.layers.abstained is None and device.layers.counts.source == NONE:
            found.append(f"{side}, {report.trace.path}: nothing marks the steps")
    return found


def _differing(one: Report, other: Report) -> list[tuple[str, str]]:
    """Fields in which the traces are not of like things; what a file does not say differs from nothing."""
    found = []

    def compare(field: str, told: Callable[[Report], Any]) -> None:
        values = told(one), told(other)
        if None not in values and values[0] != values[1]:
            found.append((field, f"{values[0]} in {one.trace.path}, {values[1]} in {other.trace.path}"))

    def first(report: Report) -> DeviceLayers | None:
        return report.devices[0].layers if report.devices else None

    compare("GPU", lambda report: device.gpu if (device := first(report)) else None)
    compare("number of ranks (TP)", lambda report: report.trace.world_size)
    compare("number of devices", lambda report: len(report.devices) or None)
    compare("rows", lambda report: device.counts.rows if (device := first(report)) else None)
    compare("requests", lambda report: device.counts.requests if (device := first(report)) else None)
    compare("kind of step", lambda report: _kind_of_step(first(report)))
    for left, right in zip(one.devices, other.devices, strict=False):
        if left.layers.abstained is None and right.layers.abstained is None and not _alike(left.layers, right.layers):
            shapes = [", ".join(f"{len(group.members)} x {len(group.sequence)} kernels" for group in side.classes)
                      for side in (left.layers, right.layers)]  # fmt: skip
            found.append(("layer structure", f"{shapes[0]} in {one.trace.path}, {shapes[1]} in {other.trace.path}"))
            break
    return found


def _kind_of_step(device: DeviceLayers | None) -> str | None:
    if device is None or device.abstained is not None:
        return None
    return "decode" if device.counts.decode else "prefill"


def _alike(a: DeviceLayers, b: DeviceLayers) -> bool:
    """Whether most layers of each have a class in the other that stands for theirs."""
    pairs = match_classes(a.classes, b.classes)
    of_a = sum(len(a.classes[index].members) for index in {pair.a for pair in pairs})
    of_b = sum(len(b.classes[index].members) for index in {pair.b for pair in pairs})
    return of_a >= _LIKE_LAYERS * len(a.layers) and of_b >= _LIKE_LAYERS * len(b.layers)


def _notes(one: Report, other: Report, forced: bool) -> tuple[str, ...]:
    found = []
    if forced:
        found += [f"compared although {field} differs: {values}" for field, values in _differing(one, other)]
    for report in (one, other):
        if report.trace.synthetic:
            found.append(f"{report.trace.path} is synthetic: made by a generator, not recorded on a GPU")
        if report.devices and report.devices[0].layers.gpu is None:
            found.append(f"{report.trace.path} does not name its GPU")
    counts = [[len(device.layers.layers) for device in report.devices] for report in (one, other)]
    if all(counts) and counts[0] != counts[1] and all(map(all, counts)):
        found.append(f"{counts[0][0]} layers in a, {counts[1][0]} in b: compared by class, not by step")
    found.append("the spread is that of the steps of each capture; captures of the same thing may differ by more")
    return tuple(found)
