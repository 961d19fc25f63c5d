"""The clock of a rank that has a GPU: graphs, replays behind a barrier on the device, and waits that end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ...kernels.collectives import CollectiveError
from .clock import Call
from .group import RankGroup

AHEAD_CYCLES = 400_000
"""That the GPU idles before the barrier, about 0.2 ms: meanwhile the host queues the barrier and the graph behind it."""
PAUSE_S = 0.0002
"""Between two looks whether the GPU has ended."""


def ended(group: RankGroup, limit_s: float) -> None:
    """Wait until the current stream has ended what it was given.

    Raises:
        CollectiveError: it did not within the limit, or the GPU reported a fault; names who is gone, if somebody is.
    """
    try:
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + limit_s
        while not event.query():
            if time.monotonic() > deadline:
                _blame(group, f"launches did not end within {limit_s:g} s")
            time.sleep(PAUSE_S)
    except CollectiveError:
        raise
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _blame(group, f"the GPU stopped: {first}")


def _blame(group: RankGroup, what: str) -> None:
    try:
        group.meet()
    except CollectiveError as late:
        raise CollectiveError(f"{what}: {late}") from late
    raise CollectiveError(f"{what} on rank {group.rank}, and all ranks are there")


class GpuClock:
    """See :class:`k3lab.tuning.ranks.clock.Clock`."""

    def __init__(self, index: int, group: RankGroup, limit_s: float) -> None:
        """A collective call: the barrier is of all ranks."""
        self.index: int | None = index
        self.group, self.limit_s = group, limit_s
        world = dist.group.WORLD
        assert world is not None
        self._own = symmetric.empty(1024, dtype=torch.uint8, device=torch.device("cuda", index))
        self._barrier = symmetric.rendezvous(self._own, world)

    def capture(self, calls: Sequence[Call], total: int) -> Call:
        """See the protocol."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        ended(self.group, self.limit_s)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks after events from a thread of its own meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for index in range(total):
                calls[index % len(calls)]()
        return graph.replay

    def samples_ns(self, replay: Call, count: int) -> list[float]:
        """See the protocol."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        try:
            for start, end in pairs:
                torch.cuda._sleep(AHEAD_CYCLES)
                self._barrier.barrier(channel=0, timeout_ms=round(self.limit_s * 1000))
                start.record()
                replay()
                end.record()
        except RuntimeError as error:  # the barrier of an earlier replay gave up meanwhile
            _blame(self.group, f"the GPU stopped: {str(error).strip().splitlines()[0]}")
        ended(self.group, self.limit_s)
        return [start.elapsed_time(end) * 1e6 for start, end in pairs]
