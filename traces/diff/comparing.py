"""Like devices of two traces compared: their classes, the kernels of these, launches and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..analysis import DeviceLayers
from ..explain.alignment import align, columns_of
from ..families import Names
from ..layers import LayerClass
from ..model import Trace
from ..timing import LayerTimes
from .matching import SAME, ClassPair, Pair, align_kernels, match_classes
from .spread import Change, change

UNKNOWN = "unknown"


@dataclass(frozen=True)
class KernelDiff:
    """A kernel of a class in both traces; the name is None where it is not there. ``increment`` is a layer's."""

    state: str
    a: str | None
    b: str | None
    family: str | None
    increment: Change


@dataclass(frozen=True)
class ClassDiff:
    """Like classes of the two traces, with their numbers of layers. Times are means over the layers, step by step."""

    a: str
    b: str
    kind: str | None
    layers: tuple[int, int]
    split_off: bool
    period: Change
    idle: Change
    overlap_same_stream: Change
    overlap_cross_stream: Change
    kernels: tuple[KernelDiff, ...]
    families: tuple[tuple[str, Change], ...]
    parted: tuple[int, ...] = ()
    """Numbers of the layers whose own completion period changed beyond the spread; of layers that both classes have."""

    @property
    def moved(self) -> tuple[KernelDiff, ...]:
        """Kernels not on both sides, or of another name."""
        return tuple(kernel for kernel in self.kernels if kernel.state != SAME)


@dataclass(frozen=True)
class DeviceDiff:
    """One device of both traces. ``launches`` are host calls a step, None where the file does not tell."""

    device: int
    classes: tuple[ClassDiff, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    step: Change
    layers: tuple[int, int]
    kernels: tuple[int, int]
    launches: tuple[int | None, int | None]


def compare_devices(trace_a: Trace, a: DeviceLayers, trace_b: Trace, b: DeviceLayers, names: Names) -> DeviceDiff:
    """Compare two devices, both with layers; classes are paired whatever their numbers of layers."""
    resolution = max(trace_a.resolution_ns, trace_b.resolution_ns)
    pairs = match_classes(a.classes, b.classes)
    classes = tuple(_compare_classes(a, b, pair, names, resolution) for pair in pairs)
    known = ({pair.a for pair in pairs}, {pair.b for pair in pairs})
    only = [
        tuple(f"class {group.name}, {len(group.members)} layers of {len(group.sequence)} kernels"
              for index, group in enumerate(side.classes) if index not in paired)
        for side, paired in zip((a, b), known, strict=True)
    ]  # fmt: skip
    return DeviceDiff(
        device=a.device,
        classes=classes,
        only_a=only[0],
        only_b=only[1],
        step=change(_spans(a), _spans(b), resolution),
        layers=(len(a.layers), len(b.layers)),
        kernels=(len(a.steps[0]), len(b.steps[0])),
        launches=(_launches(trace_a, a), _launches(trace_b, b)),
    )


def _spans(device: DeviceLayers) -> list[int]:
    return [max(kernel.end for kernel in step) - min(kernel.start for kernel in step) for step in device.steps]


def _launches(trace: Trace, device: DeviceLayers) -> int | None:
    step = device.steps[0]
    if any(trace.api(kernel) is None for kernel in step):
        return None
    return len({kernel.correlation for kernel in step})


def _compare_classes(a: DeviceLayers, b: DeviceLayers, pair: ClassPair, names: Names, resolution: int) -> ClassDiff:
    groups = a.classes[pair.a], b.classes[pair.b]
    sides = (a, groups[0]), (b, groups[1])

    def per_step(of: Callable[[LayerTimes], int]) -> Change:
        return change(_means(*sides[0], of), _means(*sides[1], of), resolution)

    families = [names.families(group.sequence) for group in groups]
    aligned = align_kernels(groups[0].sequence, groups[1].sequence, *families)
    added = [_increments(device, group) for device, group in sides]
    return ClassDiff(
        a=groups[0].name,
        b=groups[1].name,
        kind=groups[0].kind or groups[1].kind,
        layers=(len(groups[0].members), len(groups[1].members)),
        split_off=pair.second,
        period=per_step(lambda times: times.completion_period),
        idle=per_step(lambda times: sum(times.bubbles)),
        overlap_same_stream=per_step(lambda times: times.overlap_same_stream),
        overlap_cross_stream=per_step(lambda times: times.overlap_cross_stream),
        kernels=tuple(_kernel(item, groups, families, added, resolution) for item in aligned),
        families=_by_family(families, added, resolution),
        parted=_parted(sides, resolution),
    )


def _means(device: DeviceLayers, group: LayerClass, of: Callable[[LayerTimes], int]) -> list[int]:
    """Step by step the mean over the layers of a class, ns."""
    count = len(group.members)
    return [
        sum(of(device.layers[index].times[step]) for index in group.members) // count
        for step in range(len(device.steps))
    ]


def _parted(sides: Sequence[tuple[DeviceLayers, LayerClass]], resolution: int) -> tuple[int, ...]:
    a, b = (
        {
            device.layers[index].number: [times.completion_period for times in device.layers[index].times]
            for index in group.members
        }
        for device, group in sides
    )
    return tuple(sorted(number for number in a.keys() & b.keys() if change(a[number], b[number], resolution).beyond))


def _increments(device: DeviceLayers, group: LayerClass) -> list[list[int]]:
    """By modal position, step by step, the mean over the layers that have a kernel there of what it adds, ns."""
    adds = {index: [times.increments for times in device.layers[index].times] for index in group.members}
    found = []
    for where in columns_of(align(group, device), device):
        own = [(adds[index], at - device.spans[index][0]) for index, at in where.items()]
        found.append(
            [sum(rows[step][place] for rows, place in own) // max(1, len(own)) for step in range(len(device.steps))]
        )
    return found


def _kernel(
    pair: Pair,
    groups: Sequence[LayerClass],
    families: Sequence[Sequence[str | None]],
    added: Sequence[Sequence[Sequence[int]]],
    resolution: int,
) -> KernelDiff:
    at = (pair.a, pair.b)
    names = [None if index is None else group.sequence[index] for index, group in zip(at, groups, strict=True)]
    family = [None if index is None else side[index] for index, side in zip(at, families, strict=True)]
    values = [None if index is None else side[index] for index, side in zip(at, added, strict=True)]
    return KernelDiff(pair.state, names[0], names[1], family[1] or family[0], change(values[0], values[1], resolution))


def _by_family(
    families: Sequence[Sequence[str | None]], added: Sequence[Sequence[Sequence[int]]], resolution: int
) -> tuple[tuple[str, Change], ...]:
    """What the kernels of each family add together; those of no known family are told as unknown, not dropped."""
    found = []
    for family in sorted({name or UNKNOWN for side in families for name in side}):
        sums = []
        for side, values in zip(families, added, strict=True):
            own = [values[index] for index, name in enumerate(side) if (name or UNKNOWN) == family]
            sums.append([sum(step) for step in zip(*own, strict=True)] if own else None)
        found.append((family, change(sums[0], sums[1], resolution)))
    return tuple(found)
