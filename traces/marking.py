"""Attaches to every kernel what the host side says about it: its launch, its step and its layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from .marks import enclosing, layer_number, step_mark, step_of
from .model import HostRange, Kernel, Thread, Trace, rows_of


class LayerMark(NamedTuple):
    """The layer a kernel was captured or launched in: number and name of the range."""

    number: int
    name: str


class Marked(NamedTuple):
    """A kernel with what the host side says about it. ``replay`` is the correlation of its graph launch."""

    kernel: Kernel
    launched: int | None
    replay: int | None
    created: int | None
    step: HostRange | None
    layer: LayerMark | None


_NOWHERE: tuple[Thread, int] = ((-1, -1), 0)


def mark(trace: Trace, kernels: Sequence[Kernel]) -> list[Marked]:
    """Attach to each kernel of one process its launch, step mark and layer mark.

    What a launch or a graph node says is found once for all its kernels: a replay has thousands.
    """
    owned = Counter(map(attrgetter("correlation"), kernels))
    owned.pop(None, None)
    process = kernels[0].process if kernels else 0
    calls = [trace.apis.get((process, number)) for number in owned]
    places = [(call.thread, call.start) if call is not None else _NOWHERE for call in calls]
    launches = {}
    for (number, count), call, (step, layer) in zip(owned.items(), calls, _marks_at(trace, places), strict=True):
        launched = call.start if call is not None else None
        # a replayed kernel's launch lies outside every layer range; what counts is where its node was captured
        replayed = call.is_graph_launch if call is not None else count > 1
        launches[number] = (launched, number, step, None) if replayed else (launched, None, step, layer)
    nodes = [(node, origin) for (owner, node), origin in trace.node_origins.items() if owner == process]
    marks = _marks_at(trace, [(origin.thread, origin.created) for _, origin in nodes])
    captured = {node: (origin.created, layer) for (node, origin), (_, layer) in zip(nodes, marks, strict=True)}
    unlaunched = (None, None, None, None)

    def rows() -> Iterator[tuple]:
        for kernel in kernels:
            launched, replay, step, layer = launches.get(kernel.correlation, unlaunched)
            node = kernel.node
            if node is None:
                yield kernel, launched, replay, None, step, layer
            elif node in captured:
                created, layer = captured[node]
                yield kernel, launched, replay, created, step, layer
            else:
                yield kernel, launched, replay, node, step, layer

    return rows_of(Marked, rows())


def _marks_at(trace: Trace, places: Sequence[tuple[Thread, int]]) -> list[tuple[HostRange | None, LayerMark | None]]:
    """The step mark and the layer mark around each place."""
    found = enclosing(
        trace.ranges, places, lambda item: step_mark(item.name) is not None or layer_number(item.name) is not None
    )
    told: dict[int, tuple[HostRange | None, LayerMark | None]] = {}
    for around in found:  # launches under the same ranges share one tuple
        if id(around) not in told:
            told[id(around)] = step_of([item for item in around if step_mark(item.name) is not None]), _layer(around)
    return [told[id(around)] for around in found]


def _layer(around: Sequence[HostRange]) -> LayerMark | None:
    """The innermost layer range; its name is that of the outermost of the same number."""
    numbers = [(layer_number(item.name), item.name) for item in around]
    inner = next((number for number, _ in reversed(numbers) if number is not None), None)
    if inner is None:
        return None
    return LayerMark(inner, next(name for number, name in numbers if number == inner))
