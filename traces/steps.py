"""Cuts the kernels of one device into decode steps: by graph launch, by step mark, or by restarting layer marks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .marks import enclosing, layer_number, step_mark, step_of
from .model import HostRange, Kernel, Thread, Trace


@dataclass(frozen=True)
class LayerMark:
    """The layer a kernel was captured or launched in: number and name of the range."""

    number: int
    name: str


@dataclass(frozen=True)
class Marked:
    """A kernel with what the host side says about it. ``replay`` is the correlation of its graph launch."""

    kernel: Kernel
    launched: int | None
    replay: int | None
    created: int | None
    step: HostRange | None
    layer: LayerMark | None


@dataclass(frozen=True)
class Step:
    """The kernels of one step in launch order. ``decode`` is None where no mark says what the step was."""

    kernels: tuple[Marked, ...]
    decode: bool | None = None
    requests: int | None = None
    rows: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Kernel names in launch order."""
        return tuple(item.kernel.name for item in self.kernels)


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


def mark(trace: Trace, kernels: Sequence[Kernel]) -> list[Marked]:
    """Attach to each kernel its launch, step mark and layer mark."""
    shared = Counter((kernel.process, kernel.correlation) for kernel in kernels if kernel.correlation is not None)
    calls = [trace.api(kernel) for kernel in kernels]
    replays: list[int | None] = []
    step_at: list[tuple[Thread, int]] = []
    layer_at: list[tuple[Thread, int]] = []
    nowhere = ((-1, -1), 0)
    for kernel, call in zip(kernels, calls, strict=True):
        group = shared[kernel.process, kernel.correlation] if kernel.correlation is not None else 0
        replayed = (call is not None and call.is_graph_launch) or (call is None and group > 1)
        replays.append(kernel.correlation if replayed else None)
        launch = (call.thread, call.start) if call is not None else nowhere
        step_at.append(launch)
        origin = trace.node_origins.get((kernel.process, kernel.node)) if kernel.node is not None else None
        # a replayed kernel's launch lies outside every layer range; what counts is where its node was captured
        layer_at.append((origin.thread, origin.created) if origin else nowhere if replayed else launch)
    step_ranges = enclosing(trace.ranges, step_at, lambda item: step_mark(item.name) is not None)
    layer_ranges = enclosing(trace.ranges, layer_at, lambda item: layer_number(item.name) is not None)
    found = []
    for index, kernel in enumerate(kernels):
        layers = layer_ranges[index]
        layer = None
        if layers:
            number = layer_number(layers[-1].name)
            outer = next(item for item in layers if layer_number(item.name) == number)
            layer = LayerMark(number if number is not None else 0, outer.name)
        origin = trace.node_origins.get((kernel.process, kernel.node)) if kernel.node is not None else None
        call = calls[index]
        found.append(
            Marked(
                kernel,
                launched=call.start if call is not None else None,
                replay=replays[index],
                created=origin.created if origin else kernel.node,
                step=step_of(step_ranges[index]),
                layer=layer,
            )
        )
    return found


def _nodes_follow_streams(groups: Sequence[Sequence[Marked]]) -> bool:
    """Whether node order is a launch order: known for all, unique, and the order of starts on every stream."""
    for group in groups:
        keys = [item.created for item in group]
        if None in keys or len(set(keys)) != len(keys):
            return False
        latest: dict[int, int] = {}
        for item in sorted(group, key=lambda item: item.created or 0):
            if item.kernel.start < latest.get(item.kernel.stream, item.kernel.start):
                return False
            latest[item.kernel.stream] = item.kernel.start
    return True


def _in_launch_order(items: Sequence[Marked], by_node: bool) -> tuple[Marked, ...]:
    """Host launch order, then node order inside a replay, then device start."""
    launched = all(item.launched is not None for item in items)

    def key(item: Marked) -> tuple:
        node = item.created if by_node and item.replay is not None and item.created is not None else 0
        return (item.launched if launched else 0, node, item.kernel.order)

    return tuple(sorted(items, key=key))


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


def _one_step_each(launches: list[list[Marked]], by_node: bool) -> list[list[list[Marked]]]:
    """Launches under one mark: one step, unless they replay the same graph again and again."""
    names = {_step(_in_launch_order(launch, by_node)).names for launch in launches}
    return [[launch] for launch in launches] if len(names) == 1 else [launches]


def _whole_step(items: Sequence[Marked], run: Sequence[Sequence[Marked]], source: str) -> list[Marked]:
    """The kernels of a step made of these graph launches, with the eager ones that belong to it."""
    group = [item for launch in run for item in launch]
    if source == MARKED_GRAPHS:
        under = [item for item in items if item.step == group[0].step]
        eager = sum(item.replay is None for item in under)
        if eager > len(under) - eager:
            return under  # mostly eager, with a small graph somewhere
    return group if len(run) == 1 else _between(items, group)


def find_steps(items: Sequence[Marked]) -> Steps:
    """Cut the kernels of one device into steps, in time order."""
    replays: dict[int, list[Marked]] = defaultdict(list)
    for item in items:
        if item.replay is not None:
            replays[item.replay].append(item)
    groups: list[list[Marked]] = []
    if replays:
        launches = sorted(replays.values(), key=lambda group: min(item.kernel.order for item in group))
        by_node = _nodes_follow_streams(launches)
        source = GRAPHS
        by_mark: dict[HostRange, list[list[Marked]]] = {}
        for launch in launches:
            if launch[0].step is not None:
                by_mark.setdefault(launch[0].step, []).append(launch)
        if len(by_mark) > 0 and sum(map(len, by_mark.values())) == len(launches):
            source = MARKED_GRAPHS
            runs = [run for marked in by_mark.values() for run in _one_step_each(marked, by_node)]
        else:
            width = _period([_step(_in_launch_order(launch, by_node)).names for launch in launches])
            runs = [launches[index : index + width] for index in range(0, len(launches), width)]
        for run in runs:
            groups.append(_whole_step(items, run, source))
    else:
        by_node = False
        marks: dict[HostRange, list[Marked]] = defaultdict(list)
        for item in items:
            if item.step is not None:
                marks[item.step].append(item)
        groups, source = list(marks.values()), MARKS
        if not groups:
            groups, source = _layer_passes(_in_launch_order(items, False)), LAYERS
        if not groups and items:
            groups, source = [list(items)], NONE
    steps = [_step(_in_launch_order(group, by_node)) for group in groups if group]
    steps.sort(key=lambda step: min(item.kernel.order for item in step.kernels))
    inside = sum(len(step.kernels) for step in steps)
    return Steps(tuple(steps), source, len(items) - inside)


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


def strays(steps: Sequence[Step], items: Sequence[Marked], every: Sequence[Step]) -> int:
    """Kernels in none of ``every`` step that run while one of ``steps`` does, launched from elsewhere."""
    inside = {id(item.kernel) for step in every for item in step.kernels}
    windows = [
        (min(item.kernel.start for item in step.kernels), max(item.kernel.end for item in step.kernels))
        for step in steps
    ]
    starts = [start for start, _ in windows]  # steps come in time order
    count = 0
    for item in items:
        if id(item.kernel) in inside:
            continue
        index = bisect_left(starts, item.kernel.end) - 1
        count += any(window[1] > item.kernel.start for window in windows[max(0, index - 1) : index + 1])
    return count
