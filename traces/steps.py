"""Cuts the kernels of one device into decode steps: by graph launch, by step mark, or by restarting layer marks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter, lt
from statistics import median

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


TOGETHER = f"all {GRAPHS} together"


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


def _alike(groups: Sequence[list[Marked]]) -> list[list[Marked]]:
    """Replays given by start: those with the same kernels on every stream all in one order, by their median places.

    Between streams the order of starts is another in every replay, and says nothing of what was launched.
    """
    forms: dict[object, list[tuple[int, list[tuple[int, Marked]]]]] = {}
    for index, group in enumerate(groups):
        # stable: on every stream by start, and the streams one after another
        rows = sorted(enumerate(group), key=lambda row: row[1].kernel.stream)
        if rows[0][1].kernel.stream != rows[-1][1].kernel.stream:
            form = tuple([(item.kernel.stream, item.kernel.name) for _, item in rows])
            forms.setdefault(form, []).append((index, rows))
    found = list(groups)
    for same in forms.values():
        places = [median(column) for column in zip(*([place for place, _ in rows] for _, rows in same), strict=True)]
        order = sorted(range(len(places)), key=places.__getitem__)
        for index, rows in same:
            found[index] = [rows[at][1] for at in order]
    return found


def _in_launch_order(items: Sequence[Marked]) -> tuple[Marked, ...]:
    """Kernels launched one by one: in the order of their launches, where all are known, then of their starts."""
    launched = all(item.launched is not None for item in items)

    def key(item: Marked) -> tuple[int, int]:
        return (item.launched if launched and item.launched is not None else 0, item.kernel.start)

    return tuple(sorted(items, key=key))  # what is equal stays in the order of the capture, which is total


def _joined(parts: Sequence[Sequence[Marked]]) -> Step:
    """The step made of graph launches, each with its kernels in order, and kernels launched between them."""
    heads = _in_launch_order([part[0] for part in parts])
    owners = {id(part[0]): part for part in parts}
    return _step(tuple([item for head in heads for item in owners[id(head)]]))


def _period(signatures: Sequence[tuple[str, ...]]) -> int:
    """The smallest number of launches after which their kernels repeat; 1 where they do not."""
    for step in range(1, len(signatures) // 2 + 1):
        pairs = len(signatures) - step
        same = sum(signatures[index] == signatures[index + step] for index in range(pairs))
        if same >= 0.9 * pairs:
            return step
    return 1


def _between(items: Sequence[Marked], run: Sequence[Step]) -> list[Marked]:
    """All kernels launched from the first to the last launch of a step made of several; none where those are unknown."""
    times = [item.launched for step in run for item in step.kernels]
    known = [launched for launched in times if launched is not None]
    if len(known) < len(times):
        return []
    first, last = min(known), max(known)
    return [item for item in items if item.launched is not None and first <= item.launched <= last]


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
            groups, source = _layer_passes(_in_launch_order(items)), LAYERS
        if not groups and items:
            groups, source = [list(items)], NONE
        steps = [_step(_in_launch_order(group)) for group in groups]
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
    launches = [_step(tuple(group)) for group in _by_node(groups) or _alike(groups)]
    by_mark: dict[HostRange, list[Step]] = {}
    for launch in launches:
        if launch.kernels[0].step is not None:
            by_mark.setdefault(launch.kernels[0].step, []).append(launch)
    if sum(map(len, by_mark.values())) == len(launches):
        steps: list[Step] = []
        for found, marked in by_mark.items():
            alone = eager.get(found, [])
            if len(alone) > sum(len(launch.kernels) for launch in marked):  # a small graph somewhere in an eager step
                steps.append(_joined([*((item,) for item in alone), *(launch.kernels for launch in marked)]))
            else:
                steps.extend(_together(items, run) for run in _one_step_each(marked))
        return steps, MARKED_GRAPHS
    width = _period([launch.names for launch in launches])
    parts = [launches[index : index + width] for index in range(0, len(launches), width)]
    return [_together(items, run) for run in parts], GRAPHS


def _together(items: Sequence[Marked], run: Sequence[Step]) -> Step:
    """The step made of these graph launches, with the kernels launched between them."""
    if len(run) == 1:
        return run[0]
    inside = _inside(run)
    return _joined(
        [*(step.kernels for step in run), *((item,) for item in _between(items, run) if id(item.kernel) not in inside)]
    )


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
    step = _together(items, steps.steps)
    return replace(steps, steps=(step,), source=TOGETHER, outside=len(items) - len(step.kernels))


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
