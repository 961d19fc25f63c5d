"""What each kernel of a layer takes: from profiled replays of the two graphs whose slope is the layer's time.

Kernels with programmatic edges start before they can work and wait inside, so that starts and durations mislead. A
kernel's time here is the time from the end of the kernel that ended before it to its own end: these add up to the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..kernels.accounting import floor_us
from ..kernels.gpu_cards import GpuCard
from ..kernels.model_card import LayerKind
from ..kernels.registry import family, family_names
from .choices import Choice, Tuned
from .launches import OURS

REPLAYS = 5
OTHER = "torch"
"""In place of a family: kernels of PyTorch operators, copies, fills."""


class NotSeenError(RuntimeError):
    """A profiler did not see every kernel: nothing can be said of what each takes."""


@dataclass(frozen=True)
class Ran:
    """A kernel of one replay, in microseconds of the device's clock."""

    name: str
    start_us: float
    end_us: float


Tracer = Callable[[Callable[[], None], int], list[list[Ran]]]
"""Kernels of so many runs, run by run."""


def by_profiler(run: Callable[[], None], replays: int) -> list[list[Ran]]:
    """Through torch.profiler; runs are apart, each ends before the next begins. Needs a GPU.

    Raises:
        NotSeenError: the runs do not show equally many kernels.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            run()
            torch.cuda.synchronize()
    on_device = [one for one in recorded.events() or () if one.device_type == torch.autograd.DeviceType.CUDA]
    return split([Ran(one.name, one.time_range.start, one.time_range.end) for one in on_device], replays)


def split(ran: Iterable[Ran], replays: int) -> list[list[Ran]]:
    """Kernels of all runs, run by run, in the order in which they ended; raises NotSeenError unless all have as many."""
    every = sorted(ran, key=lambda one: (one.end_us, one.start_us))
    each, left = divmod(len(every), replays)
    if left or not each:
        raise NotSeenError(f"{len(every)} kernels were seen in {replays} replays: some are missing")
    return [every[start : start + each] for start in range(0, len(every), each)]


def spent(ran: Sequence[Ran]) -> dict[str, tuple[int, float, float]]:
    """Launches, microseconds, and those of them in which nothing ran, by kernel: of one run, in the order of first ends."""
    found: dict[str, tuple[int, float, float]] = {}
    before: float | None = None
    for one in sorted(ran, key=lambda one: (one.end_us, one.start_us)):
        since = one.start_us if before is None else before
        count, us, idle = found.get(one.name, (0, 0.0, 0.0))
        found[one.name] = count + 1, us + one.end_us - since, idle + max(0.0, one.start_us - since)
        before = one.end_us
    return found


def family_of(kernel: str) -> str:
    """Whose kernel it is, by its name; :data:`OTHER` for those that are no family's."""
    those = [name for name in family_names() if kernel.startswith(f"{OURS}{name}_")]
    return max(those, key=len, default=OTHER)


def a_layer(few: Sequence[Sequence[Ran]], many: Sequence[Sequence[Ran]], more: int) -> list[dict[str, Any]]:
    """Kernel by kernel what ``more`` layers add, a layer: medians over replays, in the order in which they end.

    Args:
        few: replays of the graph with fewer layers; empty: everything is told, not what is added.
        many: of the other one.
        more: layers that it has more of.
    """
    nothing = (0, 0.0, 0.0)
    told = [[spent(one) for one in runs] for runs in (few, many)]

    def added(name: str, field: int) -> float:
        totals = [[one.get(name, nothing)[field] for one in runs] for runs in told]
        return (statistics.median(totals[1]) - (statistics.median(totals[0]) if totals[0] else 0.0)) / more

    made = [
        {"kernel": name, "family": family_of(name), "launches": added(name, 0), "us": added(name, 1), "idle_us": added(name, 2)}
        for name in (told[1][0] if told[1] else ())
    ]  # fmt: skip
    return [one for one in made if one["launches"]]


def made_of(kernels: Iterable[Mapping[str, Any]], floors: Mapping[str, float]) -> list[dict[str, Any]]:
    """The same family by family, each beside the least time of its bytes: what the distance to the floor is made of.

    Args:
        kernels: of :func:`a_layer`.
        floors: microseconds by family; one that is missing has no bytes of its own.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in kernels:
        own = found.setdefault(one["family"], {"family": one["family"], "launches": 0.0, "us": 0.0})
        own["launches"] += one["launches"]
        own["us"] += one["us"]
    for name, own in found.items():
        own["floor_us"] = floors.get(name, 0.0)
        own["above_floor_us"] = own["us"] - own["floor_us"]
    return sorted(found.values(), key=lambda own: -own["above_floor_us"])


def family_floors(choices: Iterable[Choice], kind: LayerKind, rows: int, gpu: GpuCard) -> dict[str, float]:
    """Least time of the cold bytes of each tuned family in a MoE layer of a kind, in microseconds, by family."""
    elsewhere = {"kda", "mla", "lm_head"} - {kind}
    return {
        one.family: floor_us(family(one.family).traffic(replace(one.compiled.problem, rows=rows)).weight_bytes, gpu)
        for one in choices
        if isinstance(one, Tuned) and one.kind in (None, kind) and one.family not in elsewhere
    }
