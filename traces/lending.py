"""The marked layers of a trace, for another one that has no marks."""

from __future__ import annotations

from pathlib import Path

from .analysis import analyse, lanes
from .errors import TraceError
from .layers import LAUNCH_MARKS, NODE_MARKS
from .lent import Lent
from .readers.opening import read_trace


def lend(path: str | Path) -> Lent:
    """The marked layers of a trace.

    Raises:
        TraceError: no usable trace, or its layers are not told by ranges.
    """
    trace = read_trace(path)
    if not trace.kernels:
        raise TraceError(f"{trace.path}: has no kernels whose layers it could lend")
    device = analyse(trace, lanes(trace)[0])
    if device.method not in (NODE_MARKS, LAUNCH_MARKS):
        raise TraceError(
            f"{trace.path}: its layers are not under ranges (layer_0, layer_1, ...), so that it has none to lend"
        )
    kernels = device.steps[0]
    layers: list[tuple[int, str] | None] = [None] * len(kernels)
    for layer, (begin, end) in zip(device.layers, device.spans, strict=True):
        layers[begin:end] = [(layer.number, layer.name)] * (end - begin)
    return Lent(trace.path, tuple(kernel.name for kernel in kernels), tuple(layers))
