"""Steps in CUDA graphs: one for each row count, all in one pool of memory; without a GPU their bodies are simply run.

A graph is captured once, on the padding slot of the cache, so that no request is disturbed. Fewer requests than a graph
has are filled up with that slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import Collectives
from .caches import DecodeCache
from .operators import Operators
from .step import MAX_ROWS, Tap, forward
from .weights import RankWeights

SIZES = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Rows of the plain steps that are captured."""
WARM_UP = 2


def sizes_of(q_len: int, most_rows: int = MAX_ROWS) -> tuple[int, ...]:
    """Requests of the steps that are captured, ascending: with ``q_len`` tokens each, at most ``most_rows`` rows."""
    most = most_rows // q_len
    return tuple(sorted({size for size in SIZES if size <= most} | ({most} if most else set())))


class Capture:
    """Captures bodies, one after the other, into graphs that share a pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        """``device``: without a GPU nothing is captured."""
        self.device = device
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None
        # what a body made before its capture (a table of peers, a copy of saved blocks) is read by every replay
        self._bodies: list[Callable[[], None]] = []

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """What runs the body: a replay, or the body itself. The body runs a few times before."""
        if self.device.type != "cuda":

            def direct() -> None:
                with torch.inference_mode():
                    body()

            return direct
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(WARM_UP):
                body()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool):
            body()
        graph.instantiate()
        self._pool = self._pool or graph.pool()
        self.graphs.append(graph)
        self._bodies.append(body)
        return graph.replay


def kernel_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Symbols of a captured graph's kernels, copies and fills left out: what a replay launches.

    Raises:
        RuntimeError: the driver refuses.
    """
    import cuda.bindings.driver as driver

    def answer(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver does not tell a graph's kernels: {code.name}")
        return values[0] if len(values) == 1 else values

    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, count = answer(driver.cuGraphGetNodes(handle))
    nodes, _ = answer(driver.cuGraphGetNodes(handle, count))
    kernel, found = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, []
    for node in nodes[:count]:
        if answer(driver.cuGraphNodeGetType(node)) == kernel:
            made = answer(driver.cuGraphKernelNodeGetParams(node))
            # a node has a function, or a kernel that belongs to no context
            name = driver.cuFuncGetName(made.func) if int(made.func) else driver.cuKernelGetName(made.kern)
            found.append(answer(name).decode())
    return found


class StepGraphs:
    """A model's forward for every row count: ids and slots in, logits and tapped residuals out."""

    def __init__(
        self,
        weights: RankWeights,
        cache: DecodeCache,
        comm: Collectives,
        operators: Callable[[int], Operators],
        *,
        q_len: int = 1,
        sizes: Iterable[int] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """Capture.

        Args:
            weights: this rank's.
            cache: this rank's, with a padding slot.
            comm: the tensor-parallel group.
            operators: rows to the operators that serve a step of so many.
            q_len: tokens a request.
            sizes: requests of the steps to capture (default: :func:`sizes_of`).
            taps: layers whose residual is kept.

        Raises:
            InputError: a cache without a padding slot, or steps of more rows than the path serves.
        """
        if cache.padding is None:
            raise InputError("captured steps need a cache with a padding slot: DecodeCache(padding=True)")
        self.q_len, self.sizes = q_len, tuple(sorted(set(sizes or sizes_of(q_len))))
        if not self.sizes or self.sizes[0] < 1 or self.sizes[-1] * q_len > MAX_ROWS:
            raise InputError(
                f"steps of {self.sizes} requests with {q_len} tokens: 1 to {MAX_ROWS} rows can be captured"
            )
        self.weights, self.cache, self.comm, self._operators = weights, cache, comm, operators
        most, device = self.sizes[-1], weights.device
        rows = most * q_len
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), cache.padding, dtype=torch.int64, device=device)
        self._logits = torch.zeros(rows, weights.card.vocab_size, dtype=weights.dtype, device=device)
        self._taps = {
            layer: torch.zeros(rows, weights.card.hidden_size, dtype=weights.dtype, device=device) for layer in taps
        }
        self.capture = Capture(device)
        # the largest first: the others find room in what it has left
        self._replays = {size: self.capture(self._body(size)) for size in reversed(self.sizes)}

    @property
    def most_rows(self) -> int:
        """Of a captured step."""
        return self.sizes[-1] * self.q_len

    def _body(self, size: int) -> Callable[[], None]:
        rows, operators = size * self.q_len, self._operators(size * self.q_len)
        ids, slots = self._ids[:rows], self._slots[:size]

        def keep(layer: int, residual: Tensor) -> None:
            if layer in self._taps:
                self._taps[layer][:rows].copy_(residual)

        def body() -> None:
            tap = keep if self._taps else None
            logits = forward(
                self.weights, self.cache, ids, slots, operators, self.comm, q_len=self.q_len, tap=tap
            )  # fmt: skip
            self._logits[:rows].copy_(logits)

        return body

    def size_for(self, requests: int) -> int:
        """The smallest captured step that holds so many requests.

        Raises:
            InputError: none does.
        """
        size = next((size for size in self.sizes if size >= requests), None)
        if size is None:
            raise InputError(f"no captured step holds {requests} requests of {self.q_len} tokens; the largest has {self.sizes[-1]}")  # fmt: skip
        return size

    def step(self, ids: Tensor, slots: Sequence[int], tap: Tap | None = None) -> Tensor:
        """Run a step: host side begun (:meth:`~k3lab.decode.caches.DecodeCache.begin`), acceptance still to come.

        Args:
            ids: int64 [requests, q].
            slots: of the requests.
            tap: sees the residuals of the layers that are kept, rows of these requests alone.

        Returns:
            Logits [requests, q, V]: this object's memory, which the next step overwrites.

        Raises:
            InputError: other than q tokens a request, or no captured step that is large enough.
        """
        count = len(slots)
        if tuple(ids.shape) != (count, self.q_len):
            raise InputError(f"ids {list(ids.shape)} for {count} requests; these graphs take {self.q_len} tokens each")
        size, rows = self.size_for(count), count * self.q_len
        assert self.cache.padding is not None
        padded = [*slots, *[self.cache.padding] * (size - count)]
        self._slots[:size].copy_(torch.tensor(padded))
        self._ids[:rows].copy_(ids.reshape(-1))
        self._ids[rows : size * self.q_len].zero_()
        self._replays[size]()
        for layer, kept in self._taps.items():
            if tap:
                tap(layer, kept[:rows])
        return self._logits[:rows].view(count, self.q_len, -1)
