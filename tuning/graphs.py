"""Captured CUDA graphs: making one that keeps its nodes, and counting its programmatic edges."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROGRAMMATIC = 1
"""``CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC``."""


class EdgeData(ctypes.Structure):
    """``CUgraphEdgeData``: eight bytes."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def captured(calls: Iterable[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """The calls, captured in their order on one stream; the graph keeps its nodes and can still be asked for them."""
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def edges(handle: int, library: Any = None) -> list[EdgeData]:
    """The edges of a ``CUgraph``.

    The driver is called by its C name: the Python bindings gave this call another name in each of their
    releases. It is bound to the version with edge data since CUDA 12.3, without which a programmatic edge is
    an error.

    Args:
        handle: address of the graph.
        library: the driver's library, by default the one of this process.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver = library or ctypes.CDLL("libcuda.so.1")
    room = 1024
    while True:
        ends = [(ctypes.c_void_p * room)() for _ in range(2)]
        data, count = (EdgeData * room)(), ctypes.c_size_t(room)
        code = driver.cuGraphGetEdges_v2(ctypes.c_void_p(handle), *ends, data, ctypes.byref(count))
        if code:
            raise RuntimeError(f"the driver does not list the graph's edges: error {code}")
        if count.value < room:
            return list(data[: count.value])
        room *= 8  # as many as there was room for: there may be more


def programmatic_edges(graph: torch.cuda.CUDAGraph) -> int:
    """Edges of a graph of :func:`captured` along which a kernel may start before its predecessor has ended.

    An event that forks or joins a stream makes full edges, in place of these: the count shows what was lost.
    """
    return sum(edge.type == PROGRAMMATIC for edge in edges(graph.raw_cuda_graph()))
