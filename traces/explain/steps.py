"""What whole steps tell: the pause between them, several graph launches in one, times that the profiler shifted."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis import DeviceLayers
from ..model import Kernel, Trace
from ..timing import median_ns
from ..verdict import microseconds
from .alignment import examined
from .causes import HOST, SYNC, Causes, covered
from .finding import NOTABLE_NS, Finding
from .gaps import Gap, main_cause

SHIFTED = 0.05
_SHARE = 0.01


def between_steps(device: DeviceLayers, causes: Causes) -> list[Finding]:
    """Idle time from the end of a step to the start of the next; where it is longer than a step, the host bounds them."""
    gaps: list[Gap] = []
    idle: list[int] = []
    for step in examined(device):
        if step + 1 == len(device.steps):
            break
        one, following = device.steps[step], device.steps[step + 1]
        last = max(one, key=lambda kernel: kernel.end)
        first = min(following, key=lambda kernel: kernel.start)
        start, end = last.end, first.start
        if end <= start:
            idle.append(0)
            continue
        # what runs in between (sampling, the next step's inputs, a step of another kind) is no pause
        pause = end - start - covered(causes.kernels.touching(start, end), start, end)
        idle.append(pause)
        if pause > NOTABLE_NS:
            begin = max((end for _, end, _ in causes.kernels.touching(start, end) if end < first.start), default=start)
            gaps.append(Gap(len(gaps), 0, begin, end, causes.find(last, first, begin, end)))
    if not idle or device.step_ns is None:
        return []
    usual = median_ns(idle)
    if usual <= max(NOTABLE_NS, _SHARE * device.step_ns):
        return []
    cause = main_cause(gaps)  # the median is above a microsecond: there are some
    text = f"between steps: {microseconds(usual)} of idle time"
    if usual > device.step_ns:
        host = "host-bound graphs, " if cause.word in (HOST, SYNC) else ""
        text += f", {host}longer than a step"
    text += f" (a step takes {microseconds(device.step_ns)}): {cause.text}"
    return [Finding("between", None, text, usual, cause.word)]


def several_graphs(trace: Trace, device: DeviceLayers, gaps: Sequence[Gap], steps: int) -> list[Finding]:
    """Steps made of several graph launches (piecewise graphs), and the idle time where they meet, in ``steps`` steps."""
    step = device.steps[0]
    launches = {kernel.correlation for kernel in step if _replayed(trace, kernel)}
    if len(launches) < 2:
        return []
    eager = sum(not _replayed(trace, kernel) for kernel in step)
    meets = {
        index
        for index in range(1, len(step))
        if step[index].correlation != step[index - 1].correlation
        and (_replayed(trace, step[index]) or _replayed(trace, step[index - 1]))
    }
    cost = sum(gap.length for gap in gaps if gap.at in meets) // steps  # most steps may have none
    beside = f" and {eager} kernels launched one by one" if eager else ""
    text = f"a step is {len(launches)} graph launches (piecewise graphs){beside}: {microseconds(cost)} of gaps where they meet"
    return [Finding("graphs", None, text, cost, "piecewise graphs")]


def _replayed(trace: Trace, kernel: Kernel) -> bool:
    call = trace.api(kernel)
    return call is not None and call.is_graph_launch


def shifted(device: DeviceLayers, step_ns: int | None) -> list[Finding]:
    """Whether the traced step is another length than the untraced one, which the caller measured; ns."""
    if step_ns is None or device.step_ns is None:
        return []
    off = device.step_ns - step_ns
    if abs(off) <= SHIFTED * step_ns:
        return []
    text = (
        f"the traced step takes {microseconds(device.step_ns)}, the untraced {microseconds(step_ns)} "
        f"({off / step_ns:+.1%}): the profiler shifts times, or the steps are not the same"
    )
    return [Finding("profiler", None, text, off, "profiler")]
