"""Judges layers against a budget: pass, fail or inconclusive; a pass is never said where anything is in doubt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .analysis import DeviceLayers, Layer
from .budget import Budget, Limit
from .layers import LayerClass
from .model import Trace
from .readers.nsys_sqlite import RECAPTURE
from .steps import NONE
from .timing import median_ns

PASS, FAIL, INCONCLUSIVE, NOT_JUDGED = "pass", "fail", "inconclusive", "not judged"
_RANK = {NOT_JUDGED: 0, PASS: 1, INCONCLUSIVE: 2, FAIL: 3}
COARSE_NS = 1000
_STRAY_SHARE = 0.01  # of the kernels in layers: one more in every layer is far above


@dataclass(frozen=True)
class Judgement:
    """A verdict and the plain reasons for it, with those on the kernel count and on the time alone."""

    verdict: str
    reasons: tuple[str, ...] = ()
    count: str = NOT_JUDGED
    time: str = NOT_JUDGED


@dataclass(frozen=True)
class Doubts:
    """What keeps a part of the verdict from being said; each entry is a plain reason.

    ``everything``: neither count nor time can be judged. ``time``: the time cannot. ``passing``: a failure can
    be told, a pass cannot.
    """

    everything: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Said:
    """What the caller says of a run; believed where the trace does not tell.

    ``gpu``: its name. ``tp``: the tensor-parallel size. ``rows``: tokens in a step.
    """

    gpu: str | None = None
    tp: int | None = None
    rows: int | None = None


UNSAID = Said()
"""Nothing."""


def microseconds(ns: int) -> str:
    """A time for people: microseconds with one decimal, more where it is below one."""
    return f"{ns / 1000:.1f} us" if abs(ns) >= 1000 or ns == 0 else f"{ns / 1000:.3f} us"


def worst(verdicts: Iterable[str]) -> str:
    """The verdict of a whole from those of its parts: fail before inconclusive before pass before not judged."""
    return max(verdicts, key=_RANK.__getitem__, default=NOT_JUDGED)


def find_doubts(trace: Trace, device: DeviceLayers, budget: Budget, said: Said) -> Doubts:
    """All reasons why a verdict on this device cannot be given, or not in full.

    Args:
        trace: the capture.
        device: its layers on the device.
        budget: what they are held against.
        said: what the caller says of the run.
    """
    everything: list[str] = []
    time: list[str] = []
    passing: list[str] = [*trace.incomplete, *device.missing]
    counts = device.counts
    if device.abstained is not None:
        close = ", ".join(f"{layers} x {kernels}" for layers, kernels in device.abstained.candidates)
        hint = f" (closest, layers x kernels: {close})" if close else ""
        everything.append(f"no layers found: {device.abstained.reason}{hint}")
    elif counts.source == NONE:
        everything.append("nothing marks the steps (no graph launch, step mark or layer mark)")
    elif not counts.decode:
        everything.append("no decode step in the trace: its step marks say prefill")
    name = device.gpu or said.gpu
    if name is None:
        time.append(f"the trace does not name its GPU (--gpu says it); the budget is for {budget.gpu}")
    elif not budget.fits_gpu(name):
        time.append(f"the GPU is {name}; the budget is for {budget.gpu}")
    tp = said.tp if said.tp is not None else trace.world_size
    if tp is not None and tp != budget.tp:
        time.append(f"TP is {tp}; the budget is for TP{budget.tp}")
    if trace.world_size is not None and said.tp is not None and trace.world_size % said.tp:
        time.append(f"TP is {said.tp} on your word, and the trace is of {trace.world_size} ranks")
    time.extend(_other_rows(said.rows, device, budget))
    if trace.resolution_ns >= COARSE_NS:
        time.append("resolution: the file counts whole microseconds, too coarse for this budget")
    if trace.rejected:
        passing.append(f"{len(trace.rejected)} kernel rows have unusable times")
    if counts.uneven:
        passing.append(f"{counts.uneven} steps have other kernels than the rest (lost events, or several graphs)")
    if counts.strays > _STRAY_SHARE * sum(len(layer.kernels) for layer in device.layers) * counts.used:
        passing.append(f"{counts.strays} kernels run during the steps and belong to none (launched from elsewhere?)")
    if device.in_turn:
        passing.append("two forms of layers follow each other in turn: maybe the halves of one; --layers N tells")
    if device.broken_at is not None:
        passing.append(
            f"the layers come in turn, and {device.layers[device.broken_at].name} falls out of it: is one lost? "
            "--layers N tells"
        )
    if trace.graph_replays:
        passing.append(f"{len(trace.graph_replays)} graph replays were traced as a whole; {RECAPTURE}")
    return Doubts(tuple(everything), tuple(time), tuple(passing))


def _other_rows(rows: int | None, device: DeviceLayers, budget: Budget) -> list[str]:
    """Why the steps are not those of the budget: by their marks, else by the caller's word."""
    marked, requests = device.counts.rows, device.counts.requests
    if budget.rows is None:
        return []
    if marked is not None and marked != budget.rows:
        return [f"a step has {marked} rows by its mark; the budget is for {budget.rows}"]
    if requests is not None and requests > budget.rows:
        return [f"a step has {requests} requests by its mark; the budget is for {budget.rows} rows"]
    if rows is not None and rows != budget.rows:
        return [f"a step has {rows} rows; the budget is for {budget.rows}"]
    return []


def _judge(kernels: int, period: int, budget: Budget, kind: str | None, doubts: Doubts) -> Judgement:
    if doubts.everything:
        return Judgement(INCONCLUSIVE, doubts.everything, INCONCLUSIVE, INCONCLUSIVE)
    limit = budget.limit(kind)
    if limit is not None:
        return judge_part(kernels, period, limit, doubts)
    if kind is not None:
        return Judgement(NOT_JUDGED, (f"the budget has no figure for {kind} layers",))
    return judge_any_kind(kernels, period, budget, doubts)


def judge_any_kind(kernels: int, time_ns: int, budget: Budget, doubts: Doubts, family: str | None = None) -> Judgement:
    """A layer of unknown kind, or a family in it: told where it is the same for all kinds of the budget."""
    bounds = budget.bounds(family)
    if bounds is None:
        return Judgement(NOT_JUDGED, (f"not every layer kind of the budget has a share of {family}",))
    tightest, loosest = (judge_part(kernels, time_ns, limit, doubts, family or "") for limit in bounds)
    if loosest.verdict == FAIL:
        return loosest
    if tightest.verdict != FAIL:
        return tightest
    kinds = ", ".join(budget.layers)
    of = f"{family}: " if family else ""
    reason = f"{of}no kernel name tells the layer kind; the budget differs by kind: {kinds}"
    return Judgement(INCONCLUSIVE, (reason,), INCONCLUSIVE, INCONCLUSIVE)


def judge_part(kernels: int, time_ns: int, limit: Limit, doubts: Doubts, what: str = "") -> Judgement:
    """A layer, or ``what`` of it, by its kernel count and its time; only ``doubts.everything`` is not looked at."""
    of = f"{what}: " if what else ""
    spent = "adds" if what else "completion period"
    bound = "share" if what else "budget"
    count = time = NOT_JUDGED
    over: list[str] = []
    unknown: list[str] = []
    if limit.kernels is not None:
        count = PASS
        if kernels > limit.kernels:
            count = FAIL
            over.append(f"{of}{kernels} kernels, {bound} {limit.kernels}")
    if limit.period_ns is not None:
        time = PASS
        if doubts.time:
            time = INCONCLUSIVE
            unknown.extend(doubts.time)
        elif time_ns > limit.period_ns:
            time = FAIL
            over.append(f"{of}{spent} {microseconds(time_ns)}, {bound} {microseconds(limit.period_ns)}")
    if over:
        return Judgement(FAIL, tuple(over), count, time)
    unknown.extend(doubts.passing)
    return Judgement(INCONCLUSIVE if unknown else PASS, tuple(unknown), count, time)


def judge_layer(layer: Layer, kind: str | None, budget: Budget, doubts: Doubts) -> Judgement:
    """One layer by its kernel count and its median completion period."""
    return _judge(len(layer.kernels), layer.period, budget, kind, doubts)


def class_period(found: LayerClass, device: DeviceLayers) -> int:
    """Median completion period over all layers of a class and all steps, ns."""
    return median_ns(times.completion_period for index in found.members for times in device.layers[index].times)


def judge_class(found: LayerClass, device: DeviceLayers, budget: Budget, doubts: Doubts) -> Judgement:
    """A class of layers by its modal kernel count and its median completion period."""
    return _judge(len(found.sequence), class_period(found, device), budget, found.kind, doubts)
