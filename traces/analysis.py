"""From a trace to the layers of one device over all its steady steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from .families import layer_kind
from .layers import (
    LAUNCH_MARKS,
    LENT,
    NODE_MARKS,
    RECURRENCE,
    LayerClass,
    StepLayers,
    by_position,
    classify,
    split_step,
)
from .lent import Lent
from .macro import broken_at
from .marking import Marked, mark
from .mixture import mixed
from .model import Kernel, Trace
from .recurrence import Abstain
from .silence import silent_marks
from .steps import GRAPHS, NONE, Step, Steps, find_steps, merged, strays
from .timing import LayerTimes, layer_times, median_ns

WARM_UP = 5
ENOUGH_STEPS = 20
_SIDE_SHARE = 0.05


@dataclass(frozen=True)
class Layer:
    """One layer, over all steady steps: kernel names in launch order and its times in every step."""

    position: int
    number: int
    name: str
    kernels: tuple[str, ...]
    times: tuple[LayerTimes, ...]

    @cached_property
    def period(self) -> int:
        """Median completion period, ns."""
        return median_ns(item.completion_period for item in self.times)

    @cached_property
    def typical(self) -> LayerTimes:
        """The step whose completion period is nearest to the median: numbers that belong together."""
        return min(self.times, key=lambda item: (abs(item.completion_period - self.period), item.wall, item.total))


@dataclass(frozen=True)
class StepCounts:
    """What became of the steps of a device."""

    source: str
    found: int
    used: int
    warm_up: int
    cut: int
    uneven: int
    prefill: int
    outside: int
    decode: bool
    requests: int | None
    rows: int | None = None
    """Tokens in a step, where all marks say the same."""
    strays: int = 0
    """Kernels in no step that run during the steps used."""


@dataclass(frozen=True)
class DeviceLayers:
    """Layers of one device of one process; ``abstained`` says why there are none."""

    process: int
    device: int
    gpu: str | None
    kernels: int
    counts: StepCounts
    method: str | None
    layers: tuple[Layer, ...]
    classes: tuple[LayerClass, ...]
    prefix: int
    suffix: int
    between: int
    step_ns: int | None
    abstained: Abstain | None
    in_turn: bool = False
    """Told apart by recurrence alone, with two forms in strict turn: layers, or halves of layers."""
    broken_at: int | None = None
    """Told apart by their kernels alone: the layer (a position) that falls out of the turn of the others."""
    steps: tuple[tuple[Kernel, ...], ...] = ()
    """The kernels of every step used, in launch order."""
    spans: tuple[tuple[int, int], ...] = ()
    """Where each layer lies in such a step: half-open index ranges."""
    missing: tuple[str, ...] = ()
    """Plain lines on what forbids a pass: marks without kernels, steps of several sizes or at once."""
    cut_marks: int = 0
    """Step marks without kernels before the first and after the last step."""

    @cached_property
    def class_of(self) -> tuple[LayerClass, ...]:
        """The class of each layer, by position."""
        return by_position(self.classes)


def lanes(trace: Trace) -> list[tuple[Kernel, ...]]:
    """The kernels of each (process, device), largest first; those with a trifle of them are left out."""
    groups: dict[tuple[int, int], list[Kernel]] = {}
    for place, run in groupby(trace.kernels, key=attrgetter("process", "device")):
        groups.setdefault(place, []).extend(run)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [tuple(group) for _, group in ranked if len(group) >= _SIDE_SHARE * len(ranked[0][1])]


def analyse(
    trace: Trace, kernels: Sequence[Kernel], layers: int | None = None, lent: Lent | None = None
) -> DeviceLayers:
    """Steps, layers and times of one device.

    Args:
        trace: the capture.
        kernels: the kernels of one device of it.
        layers: how many layers a step has, if known.
        lent: the marked layers of another run of the model, for a trace without marks.
    """
    items = mark(trace, kernels)
    steps = find_steps(items)
    if not steps.steps:
        abstained = Abstain("no kernel is in any step")
        return _nothing(trace, kernels, steps, abstained)
    result = _analyse_steps(trace, items, steps, layers, lent)
    if result.abstained is not None and steps.source == GRAPHS and len(steps.steps) > 1:
        together = _analyse_steps(trace, items, merged(steps, items), layers, lent)
        if together.abstained is None:
            return together
    return result


def _chosen(steps: Steps) -> tuple[list[Step], StepCounts]:
    """The steps to judge: decode steps, whole, after warm-up, all with the same kernels."""
    prefill = sum(step.decode is False for step in steps.steps)
    decode = [step for step in steps.steps if step.decode is not False]
    pool = decode or list(steps.steps)
    whole, cut = list(pool), 0
    if len(whole) > 2:
        modal = _modal(whole)
        for edge, left in ((0, modal[-len(whole[0].names) :]), (-1, modal[: len(whole[-1].names)])):
            # only what is missing towards the capture's edge was cut off by it; a hole inside is lost events
            if whole[edge].names == left != modal:
                del whole[edge]
                cut += 1
    warm_up = min(WARM_UP, max(0, len(whole) - ENOUGH_STEPS))
    modal = _modal(whole[warm_up:])
    lost = sum(len(step.names) < len(modal) for step in whole[:warm_up])  # more: compiled or tuned in the warm-up
    whole = whole[warm_up:]
    even = [step for step in whole if step.names == modal]
    requests, rows = {step.requests for step in even}, {step.rows for step in even}
    counts = StepCounts(
        source=steps.source,
        found=len(steps.steps),
        used=len(even),
        warm_up=warm_up,
        cut=cut,
        uneven=len(whole) - len(even) + lost,
        prefill=prefill,
        outside=steps.outside,
        decode=bool(decode),
        requests=requests.pop() if len(requests) == 1 else None,
        rows=rows.pop() if len(rows) == 1 else None,
    )
    return even, counts


def _modal(steps: Sequence[Step]) -> tuple[str, ...]:
    counts = Counter(step.names for step in steps)
    return max(counts, key=lambda names: (counts[names], len(names)))


def _analyse_steps(
    trace: Trace, items: Sequence[Marked], steps: Steps, layers: int | None, lent: Lent | None
) -> DeviceLayers:
    kernels = [item.kernel for item in items]
    even, counts = _chosen(steps)
    counts = replace(counts, strays=strays(even, items, steps))
    split = split_step(even[0], layers, lent)
    if isinstance(split, Abstain):
        return _nothing(trace, kernels, steps, split, counts)
    form = even[0].form()
    if not all(_same_layers(split, step, form, layers, lent) for step in even[1:]):
        reason = "steps with the same kernels split into different layers"
        return _nothing(trace, kernels, steps, Abstain(reason), counts)
    missing, cut_marks = silent_marks(trace, items, steps, split)
    names = even[0].names
    sequences = [names[start:end] for start, end in split.spans]
    rows = [layer_times([item.kernel for item in step.kernels], split.spans) for step in even]
    found = tuple(
        Layer(
            position=position,
            number=split.numbers[position],
            name=split.names[position],
            kernels=sequences[position],
            times=tuple(row[position] for row in rows),
        )
        for position in range(len(split.spans))
    )
    untold = layers is None and split.method not in (NODE_MARKS, LAUNCH_MARKS, LENT)
    classes = tuple(classify(sequences))
    return DeviceLayers(
        process=kernels[0].process,
        device=kernels[0].device,
        gpu=trace.gpu(kernels[0].device),
        kernels=len(kernels),
        counts=counts,
        method=split.method,
        layers=found,
        classes=classes,
        prefix=split.spans[0][0],
        suffix=len(names) - split.spans[-1][1],
        between=split.between,
        step_ns=median_ns(_span(step) for step in even),
        abstained=None,
        in_turn=layers is None and split.method == RECURRENCE and _in_turn(sequences),
        broken_at=broken_at([group.name for group in by_position(classes)]) if untold else None,
        steps=tuple(tuple(item.kernel for item in step.kernels) for step in even),
        spans=split.spans,
        missing=(*missing, *mixed(even, split, layers)),
        cut_marks=cut_marks,
    )


def _in_turn(sequences: Sequence[tuple[str, ...]]) -> bool:
    """Whether two forms follow each other in strict turn (the first and the last layer may differ)."""
    inner = sequences[1:-1]
    return (
        len(inner) > 1
        and inner[0] != inner[1]
        and all(inner[index] == inner[index % 2] for index in range(len(inner)))
        and layer_kind(inner[0]) == layer_kind(inner[1])
    )


def _same_layers(
    split: StepLayers, step: Step, form: tuple[object, ...], layers: int | None, lent: Lent | None
) -> bool:
    """Whether a step splits like the first one, which it does when it has its form."""
    if step.form() == form:
        return True
    other = split_step(step, layers, lent)
    return isinstance(other, StepLayers) and other.spans == split.spans


def _span(step: Step) -> int:
    return step.end - step.begin


def _nothing(
    trace: Trace, kernels: Sequence[Kernel], steps: Steps, why: Abstain, counts: StepCounts | None = None
) -> DeviceLayers:
    found = len(steps.steps)
    counts = counts or StepCounts(steps.source, found, 0, 0, 0, 0, 0, steps.outside, False, None)
    known = found and steps.source != NONE
    return DeviceLayers(
        process=kernels[0].process,
        device=kernels[0].device,
        gpu=trace.gpu(kernels[0].device),
        kernels=len(kernels),
        counts=counts,
        method=None,
        layers=(),
        classes=(),
        prefix=0,
        suffix=0,
        between=0,
        step_ns=median_ns(_span(step) for step in steps.steps) if known else None,
        abstained=why,
    )
