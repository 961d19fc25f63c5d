"""What a decode run tells: head lines, tokens, step times, fallbacks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .choices import Fallback, Tuned
from .unused import Unused


@dataclass(frozen=True)
class RunReport:
    """The result of :func:`~k3lab.decode.run.run`."""

    head: tuple[str, ...]
    """What must be known before reading on: entries that are not measured, ranks that are stand-ins."""
    model: str
    tp: int
    dcp: int
    """Ranks that share each context."""
    ranks: str
    """How the ranks ran, in words."""
    rows: int
    tokens_per_request: int
    prompt_tokens: int
    """Random tokens a request began with."""
    filled_context: int
    """Tokens of a made-up context before them."""
    backend: str
    device: str
    dtype: str
    operators: str
    weight_bytes: int
    """On one rank."""
    peak_memory_bytes: int
    """On the GPU: the most that was allocated at once; without one: of the process, all ranks together."""
    tokens: list[list[int]]
    step_ns: list[int]
    """Eager wall times, integer nanoseconds."""
    graph_step_ns: list[int] | None
    """Device times of the CUDA graph's replays; None without a GPU."""
    graph_agrees: bool | None
    """Whether the replays gave the eager run's tokens."""
    tuned: tuple[Tuned, ...]
    fallbacks: tuple[Fallback, ...]
    trace: Path | None
    unused: tuple[Unused, ...] = ()
    """Entries of the bundle that nothing launches."""
    launches: dict[str, Any] | None = None
    """Of the captured step: tuned kernels found and planned, all kernels, and where they differ."""
    planned: dict[str, int] = field(default_factory=dict)
    """Launches a step of every tuned kernel."""
    backend_steps: dict[str, Any] | None = None
    """Steps that the specialised backend served, and why it left the others to auto."""
    rank: int = 0
    """Of the process in its group; one of them prints."""
    speculation: dict[str, Any] | None = None
    """Of a run with drafts: how they were accepted, how many, and which steps were left to auto."""

    @property
    def ok(self) -> bool:
        """False where the graph gave other tokens, or launches other tuned kernels than planned."""
        return self.graph_agrees is not False and not (self.launches or {}).get("differences")

    @property
    def served(self) -> int | None:
        """Steps of the specialised backend, each of which ran the fallbacks' families untuned; None without a GPU."""
        told = self.backend_steps or (self.speculation or {}).get("backend_steps")
        return told["served"] if told else None

    @property
    def planned_here(self) -> dict[str, int]:
        """Launches a step of every tuned kernel, none where the scope left the step to ``auto``."""
        return self.planned if self.launches and self.launches["planned"] else {}

    def to_json(self) -> dict[str, Any]:
        """The report as data; times in integer nanoseconds."""
        return {
            "head": list(self.head), "model": self.model, "tp": self.tp, "dcp": self.dcp, "ranks": self.ranks, "rows": self.rows,
            "tokens_per_request": self.tokens_per_request, "prompt_tokens": self.prompt_tokens,
            "filled_context": self.filled_context, "backend": self.backend, "device": self.device,
            "dtype": self.dtype, "operators": self.operators, "weight_bytes": self.weight_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "tokens": self.tokens, "step_ns": self.step_ns, "step_ns_median": median(self.step_ns) if self.step_ns else None,
            "graph_step_ns": self.graph_step_ns,
            "graph_step_ns_median": median(self.graph_step_ns) if self.graph_step_ns else None,
            "graph_agrees": self.graph_agrees, "speculation": self.speculation,
            "rank": self.rank, "backend_steps": self.backend_steps, "launches": self.launches,
            "tuned": [
                {"family": one.family, "kind": one.kind, "engine": one.engine, "config": one.config, "evidence": one.evidence}
                for one in self.tuned
            ],
            "fallbacks": [{**one.to_json(), "count": self.served} for one in self.fallbacks],
            "unused_entries": [one.to_json() for one in self.unused],
            "trace": str(self.trace) if self.trace else None,
            "ok": self.ok,
        }  # fmt: skip


def median(times: list[int]) -> int:
    """Median in whole nanoseconds; the first step, which warms up, is left out where there are others."""
    return int(statistics.median(times[1:] or times))
