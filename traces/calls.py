"""Kernel calls per step and per layer by name, where nothing tells the steps: the user gives their numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from .errors import TraceError, require_positive
from .families import UNNAMED, Names
from .readers.nsys_kernel_sums import counts_only, read_kernel_sums
from .readers.opening import STATS, opened, read_trace

CANNOT_TELL = (
    "not told by counts: order, times, which layer a call belongs to, and calls of warm-up, prefill or other processes"
)


@dataclass(frozen=True)
class KernelCalls:
    """Calls of one kernel in the whole file, and divided by the steps and layers that were given."""

    name: str
    calls: int
    per_step: Fraction
    per_layer: Fraction
    family: str | None = None

    @property
    def in_every_layer(self) -> bool:
        """Whether a whole number of calls a layer is possible."""
        return self.per_layer.denominator == 1


@dataclass(frozen=True)
class Calls:
    """All kernels of a file by number of calls. ``notes`` are plain lines on what the numbers do not say."""

    path: str
    steps: int
    layers: int
    kernels: tuple[KernelCalls, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; rates that are no whole numbers are floats."""
        total = sum(item.calls for item in self.kernels)
        return {
            "file": self.path,
            "steps": self.steps,
            "layers": self.layers,
            "calls": total,
            "per_step": _plain(Fraction(total, self.steps)),
            "per_layer": _plain(Fraction(total, self.steps * self.layers)),
            "per_layer_of_kernels_in_every_layer": sum(int(k.per_layer) for k in self.kernels if k.in_every_layer),
            "per_step_of_the_others": _plain(sum((k.per_step for k in self.kernels if not k.in_every_layer), Fraction(0))),
            "kernels": [
                {"kernel": item.name, "family": item.family, "calls": item.calls, "per_step": _plain(item.per_step),
                 "per_layer": _plain(item.per_layer), "in_every_layer": item.in_every_layer}
                for item in self.kernels
            ],
            "notes": list(self.notes),
        }  # fmt: skip


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def count_calls(path: str | Path, *, steps: int, layers: int, names: Names = UNNAMED) -> Calls:
    """Divide the kernel calls of a file by the steps and layers the caller knows it holds.

    Args:
        path: a cuda_gpu_kern_sum of nsys stats, or any trace.
        steps: decode steps that were recorded.
        layers: layers of a step.
        names: families of kernel names.

    Raises:
        TraceError: no usable file, no kernels in it, or numbers below 1.
    """
    require_positive(steps=steps, layers=layers)
    notes = [CANNOT_TELL]
    with opened(path) as (inside, kind):
        summed = kind == STATS and counts_only(inside)
        if summed:
            calls, rejected = read_kernel_sums(inside)
    if not summed:
        trace = read_trace(path)
        if not trace.kernels:
            raise TraceError(f"{trace.path}: no kernel records; {trace.no_kernels_hint}")
        calls, rejected = Counter(kernel.name for kernel in trace.kernels), trace.rejected
        notes.append("the file holds order and times: k3lab trace show FILE tells its layers")
        notes.extend(trace.incomplete)
    if rejected:
        notes.append(f"{len(rejected)} rows are not counted: {rejected[0].name[:60]}: {rejected[0].reason}")
    kernels = tuple(
        KernelCalls(name, number, Fraction(number, steps), Fraction(number, steps * layers), names.family(name))
        for name, number in sorted(calls.items(), key=lambda item: (-item[1], item[0]))
    )
    uneven = sum(item.per_step.denominator != 1 for item in kernels)
    if uneven:
        notes.append(
            f"{uneven} of {len(kernels)} kernels do not run a whole number of times a step: not only decode steps, or not {steps} of them"
        )
    return Calls(Path(path).name, steps, layers, kernels, tuple(notes))
