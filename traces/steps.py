"""Cuts the kernels of one device into decode steps: by graph launch, by step mark, or by restarting layer marks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter, lt

from .marking import Marked
from .marks import step_mark
from .model import HostRange


@dataclass(frozen=True)
class Step:
    """The kernels of one step in launch order. ``decode`` is None where no mark says what the step was."""

    kernels: tuple[Marked, ...]
    decode: bool | None = None
    requests: int | None = None
    rows: int | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Kernel names in launch order."""
        return tuple([item.kernel.name for item in self.kernels])

    @property
    def begin(self) -> int:
        """Earliest start of a kernel, ns."""
        return min([item.kernel.start for item in self.kernels])

    @property
    def end(self) -> int:
        """Latest end of a kernel, ns."""
        return max([item.kernel.end for item in self.kernels])

    def form(self) -> tuple[object, ...]:
        """What it launches and under which layer marks: steps of one form split into the same layers."""
        return (
            self.names,
            [item.kernel.grid for item in self.kernels],
            [item.kernel.block for item in self.kernels],
            [item.layer and item.layer.number for item in self.kernels],
            [item.replay is None for item in self.kernels],
        )


@dataclass(frozen=True)
class Steps:
    """The steps of a device and how they were found; ``source`` is ``none`` where nothing marks a step.

    ``outside`` counts the kernels in no step.
    """

    steps: tuple[Step, ...]
    source: str
    outside: int = 0


GRAPHS, MARKED_GRAPHS, MARKS, LAYERS, NONE = (
    "graph launches", "graph launches under step marks", "step marks", "restarting layer marks", "none"
)  # fmt: skip


def _by_node(groups: Sequence[list[Marked]]) -> list[list[Marked]] | None:
    """The kernels of each graph launch in node order if that is a launch order, else None.

    It is one if it is known for all, unique, and the order of starts on every stream.
    """
    found = []
    for group in groups:
        keys = [item.created for item in group if item.created is not None]
        if len(keys) < len(group):
            return None
        if all(map(lt, keys, keys[1:])):  # as the starts are
            found.append(group)
            continue
        ordered = sorted(group, key=attrgetter("created"))
        starts: dict[int, list[int]] = {}
        for item in ordered:
            starts.setdefault(item.kernel.stream, []).append(item.kernel.start)
        if any(own != sorted(own) for own in starts.values()):
            return None
        if len(set(keys)) != len(keys):
            return None
        found.append(ordered)
    return found


def _in_launch_order(items: Sequence[Marked], by_node: bool) -> tuple[Marked, ...]:
    """Host launch order, then node order inside a replay, then device start."""
    launched = all(item.launched is not None for item in items)

    def key(item: Marked) -> tuple[int, int, int]:
        node = item.created if by_node and item.replay is not None and item.created is not None else 0
        return (item.launched if launched and item.launched is not None else 0, node, item.kernel.start)

    return tuple(sorted(items, key=key))  # what is equal stays in the order of the capture, which is total


def _period(signatures: Sequence[tuple[str, ...]]) -> int:
    """The smallest number of launches after which their kernels repeat; 1 where they do not."""
    for step in range(1, len(signatures) // 2 + 1):
        pairs = len(signatures) - step
        same = sum(signatures[index] == signatures[index + step] for index in range(pairs))
        if same >= 0.9 * pairs:
            return step
    return 1


def _between(items: Sequence[Marked], group: Sequence[Marked]) -> list[Marked]:
    """All kernels launched from the first to the last launch of a step made of several launches."""
    times = [item.launched for item in group if item.launched is not None]
    if len(times) != len(group):
        return list(group)
    return [item for item in items if item.launched is not None and min(times) <= item.launched <= max(times)]


def _one_step_each(launches: list[Step]) -> list[list[Step]]:
    """Launches under one mark: one step, unless they replay the same graph again and again."""
    return [[launch] for launch in launches] if len({launch.names for launch in launches}) == 1 else [launches]


def find_steps(items: Sequence[Marked]) -> Steps:
    """Cut the kernels of one device, given by start, into steps in time order."""
    replays: dict[int, list[Marked]] = defaultdict(list)
    eager: dict[HostRange, list[Marked]] = defaultdict(list)
    mark, group = None, []
    for replay, run in groupby(items, key=attrgetter("replay")):
        if replay is not None:
            replays[replay].extend(run)
            continue
        for item in run:
            if item.step is None:
                continue
            if item.step is not mark:  # else that of the kernel before: a range takes long to hash
                mark, group = item.step, eager[item.step]
            group.append(item)
    shared = False
    if replays:
        steps, source = _replayed_steps(items, list(replays.values()), eager)
        shared = len(steps) < len(replays)
    else:
        groups, source = list(eager.values()), MARKS
        if not groups:
            groups, source = _layer_passes(_in_launch_order(items, False)), LAYERS
        if not groups and items:
            groups, source = [list(items)], NONE
        steps = [_step(_in_launch_order(group, False)) for group in groups]
    steps.sort(key=lambda step: step.begin)
    # a kernel launched between two graphs may be in two steps
    inside = len(_inside(steps)) if shared else sum(len(step.kernels) for step in steps)
    return Steps(tuple(steps), source, len(items) - inside)


def _inside(steps: Sequence[Step]) -> set[int]:
    """The identities of the kernels in these steps."""
    return {id(item.kernel) for step in steps for item in step.kernels}


def _replayed_steps(
    items: Sequence[Marked], groups: list[list[Marked]], eager: Mapping[HostRange, list[Marked]]
) -> tuple[list[Step], str]:
    """Steps from the kernels of each graph launch (by start), and how they were found.

    Args:
        items: all kernels of the device.
        groups: those of each graph launch.
        eager: by step mark those launched one by one.
    """
    ordered = _by_node(groups)
    by_node = ordered is not None
    launches = [_step(tuple(group)) for group in ordered or groups]
    by_mark: dict[HostRange, list[Step]] = {}
    for launch in launches:
        if launch.kernels[0].step is not None:
            by_mark.setdefault(launch.kernels[0].step, []).append(launch)
    if sum(map(len, by_mark.values())) == len(launches):
        steps: list[Step] = []
        for found, marked in by_mark.items():
            replayed, alone = [item for launch in marked for item in launch.kernels], eager.get(found, [])
            if len(alone) > len(replayed):  # a small graph somewhere in an eager step
                steps.append(_step(_in_launch_order([*alone, *replayed], by_node)))
            else:
                steps.extend(_together(items, run, by_node) for run in _one_step_each(marked))
        return steps, MARKED_GRAPHS
    width = _period([launch.names for launch in launches])
    parts = [launches[index : index + width] for index in range(0, len(launches), width)]
    return [_together(items, run, by_node) for run in parts], GRAPHS


def _together(items: Sequence[Marked], run: Sequence[Step], by_node: bool) -> Step:
    """The step made of these graph launches, with the eager kernels launched between them."""
    if len(run) == 1:
        return run[0]
    return _step(_in_launch_order(_between(items, [item for launch in run for item in launch.kernels]), by_node))


def _layer_passes(items: Sequence[Marked]) -> list[list[Marked]]:
    """Without step marks a new step begins where the layer numbers start again."""
    if not any(item.layer for item in items):
        return []
    groups: list[list[Marked]] = [[]]
    last = -1
    for item in items:
        if item.layer is not None:
            if item.layer.number < last:
                groups.append([])
            last = item.layer.number
        groups[-1].append(item)
    return groups


def _step(kernels: tuple[Marked, ...]) -> Step:
    found = kernels[0].step
    said = step_mark(found.name) if found is not None else None
    return Step(kernels, said.decode, said.requests, said.rows) if said else Step(kernels)


def merged(steps: Steps, items: Sequence[Marked]) -> Steps:
    """All launches taken as one step: for a capture of a single step that is made of several graphs.

    What was launched between them belongs to it: eager attention between piecewise graphs.
    """
    launched = [item for step in steps.steps for item in step.kernels]
    everything = _between(items, launched)
    return replace(
        steps,
        steps=(_step(_in_launch_order(everything, False)),),
        source=f"all {steps.source} together",
        outside=len(items) - len(everything),
    )


def strays(steps: Sequence[Step], items: Sequence[Marked], every: Steps) -> int:
    """Kernels in none of ``every`` step that run while one of ``steps`` does, launched from elsewhere."""
    if not every.outside:
        return 0
    inside = _inside(every.steps)
    windows = [(step.begin, step.end) for step in steps]
    starts = [start for start, _ in windows]  # steps come in time order
    count = 0
    for item in items:
        if id(item.kernel) in inside:
            continue
        index = bisect_left(starts, item.kernel.end) - 1
        count += any(window[1] > item.kernel.start for window in windows[max(0, index - 1) : index + 1])
    return count
