"""What a timeline of one layer shows: its kernels in one typical step, what each adds, the gaps, the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .analysis import DeviceLayers, Layer
from .check import check_trace, inspect_trace
from .errors import TraceError
from .layers import LayerClass
from .names import short_name
from .report import DeviceReport, Report
from .verdict import class_period

LABEL_WIDTH = 40
"""Characters of a kernel's label."""


@dataclass(frozen=True)
class Bar:
    """One kernel; times in ns from the end of the last kernel before the layer.

    Its last ``increment_ns`` are what it alone adds to the completion period; before them it waits, or is hidden
    behind others. ``gap_ns`` of idle time lie before it.
    """

    name: str
    label: str
    family: str | None
    stream: int
    start_ns: int
    end_ns: int
    increment_ns: int
    gap_ns: int


@dataclass(frozen=True)
class LayerFigure:
    """One layer in one step, ``bars`` in launch order; the increments and gaps add up to ``period_ns``."""

    file: str
    gpu: str | None
    synthetic: bool
    layer: str
    number: int
    class_name: str
    kind: str | None
    step: int
    steps: int
    bars: tuple[Bar, ...]
    period_ns: int
    median_ns: int
    budget: str | None
    budget_gpu: str | None
    budget_ns: int | None
    budget_kernels: int | None
    shares: Mapping[str, int]
    """What the budget gives each family, ns."""
    verdict: str

    @property
    def gap_ns(self) -> int:
        """Idle time of the layer, ns."""
        return sum(bar.gap_ns for bar in self.bars)

    @property
    def streams(self) -> list[tuple[int, list[Bar]]]:
        """Bars by stream; the stream that adds most comes first."""
        found: dict[int, list[Bar]] = {}
        for bar in self.bars:
            found.setdefault(bar.stream, []).append(bar)
        return sorted(found.items(), key=lambda item: (-sum(bar.increment_ns for bar in item[1]), item[0]))

    @property
    def families(self) -> list[tuple[str | None, int]]:
        """What each family adds, ns, in order of its first kernel; families that add nothing too."""
        found: dict[str | None, int] = {}
        for bar in self.bars:
            found[bar.family] = found.get(bar.family, 0) + bar.increment_ns
        return list(found.items())


def layer_figure(
    path: str | Path,
    *,
    budget: str | Path | None = None,
    layer: int | None = None,
    class_name: str | None = None,
    device: int | None = None,
    **options: object,
) -> LayerFigure:
    """The layer to show, in its typical step.

    Args:
        path: a trace.
        budget: as for ``check_trace``; its period becomes a line.
        layer: number of the layer.
        class_name: or the class, whose most typical layer is shown. Without either it is the layer that is furthest
            over the budget, without a budget the slowest.
        device: number of the device, where the trace has several with layers.
        options: further arguments of ``check_trace``.

    Raises:
        TraceError: no usable trace, no layers in it, or no such layer or class.
    """
    if layer is not None and class_name is not None:
        raise TraceError("give a layer or a class, not both")
    report = (
        check_trace(path, budget, **options) if budget is not None else inspect_trace(path, **options)  # type: ignore[arg-type]
    )
    found = _device(report, device)
    layers = found.layers
    place = _place(report, found, layer, class_name)
    return _figure(report, found, layers.layers[place], place)


def _device(report: Report, number: int | None) -> DeviceReport:
    file = report.trace.path
    if number is not None and number not in {item.layers.device for item in report.devices}:
        raise TraceError(f"{file}: no device {number} in it")
    wanted = [item for item in report.devices if number is None or item.layers.device == number]
    layered = [item for item in wanted if item.layers.layers]
    if not layered:
        why = next((item.layers.abstained.reason for item in wanted if item.layers.abstained), "")
        raise TraceError(f"{file}: no layers to show: {why or '; '.join(report.reasons) or 'none were found'}")
    return layered[0]


def _place(report: Report, found: DeviceReport, layer: int | None, class_name: str | None) -> int:
    """Position of the layer to show."""
    device, file = found.layers, report.trace.path
    if layer is not None:
        numbers = [item.number for item in device.layers]
        if layer not in numbers:
            raise TraceError(f"{file}: no layer {layer}; there are layers {numbers[0]} to {numbers[-1]}")
        return numbers.index(layer)
    if class_name is not None:
        group = next((item for item in device.classes if item.name == class_name.upper()), None)
        if group is None:
            raise TraceError(f"{file}: no class {class_name}; there are {', '.join(x.name for x in device.classes)}")
        usual = class_period(group, device)
        return min(group.members, key=lambda place: (abs(device.layers[place].period - usual), place))
    return max(range(len(device.layers)), key=lambda place: (_over(report, device, place), -place))


def _over(report: Report, device: DeviceLayers, place: int) -> int:
    limit = report.budget.limit(_group(device, place).kind) if report.budget else None
    period = device.layers[place].period
    if report.budget is None:
        return period
    return period - limit.period_ns if limit is not None and limit.period_ns is not None else -(10**18)


def _group(device: DeviceLayers, place: int) -> LayerClass:
    return next(group for group in device.classes if place in group.members)


def _figure(report: Report, found: DeviceReport, layer: Layer, place: int) -> LayerFigure:
    device = found.layers
    step = layer.times.index(layer.typical)
    first, last = device.spans[place]
    kernels = device.steps[step]
    own = kernels[first:last]
    zero = max((kernel.end for kernel in kernels[:first]), default=min(kernel.start for kernel in own))
    group = _group(device, place)
    limit = report.budget.limit(group.kind) if report.budget else None
    names = report.names
    judged = found.layer_judgements[place].verdict if found.layer_judgements else report.verdict
    return LayerFigure(
        file=report.trace.path,
        gpu=device.gpu,
        synthetic=report.trace.synthetic,
        layer=layer.name,
        number=layer.number,
        class_name=group.name,
        kind=group.kind,
        step=step + 1,
        steps=len(device.steps),
        bars=tuple(
            Bar(
                name=kernel.name,
                label=short_name(kernel.name, LABEL_WIDTH),
                family=family,
                stream=kernel.stream,
                start_ns=kernel.start - zero,
                end_ns=kernel.end - zero,
                increment_ns=share.increment,
                gap_ns=share.bubble,
            )
            for kernel, share, family in zip(own, layer.typical.shares, names.families(layer.kernels), strict=True)
        ),
        period_ns=layer.typical.completion_period,
        median_ns=layer.period,
        budget=report.budget.name if report.budget else None,
        budget_gpu=report.budget.gpu if report.budget else None,
        budget_ns=limit.period_ns if limit else None,
        budget_kernels=limit.kernels if limit else None,
        shares={name: part.period_ns for name, part in limit.families.items() if part.period_ns} if limit else {},
        verdict=judged,
    )
