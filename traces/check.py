"""The two questions asked of a trace: what is in it, and does it keep a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .analysis import DeviceLayers, analyse, lanes
from .budget import Budget, budget_names, load_budget
from .collector import undisturbed
from .errors import TraceError, require_positive
from .explain import explain
from .families import Names, PlanLike, gather_names
from .family_check import (
    NOTHING,
    ClassFamilies,
    FamilyView,
    class_families,
    judge_family_layer,
    known_family,
    view_families,
)
from .lending import lend
from .lent import Lent
from .model import Trace
from .readers.nsys_sqlite import RECAPTURE
from .readers.opening import read_trace
from .report import DeviceReport, Report, capture_notes
from .timing import median_ns
from .verdict import (
    FAIL,
    INCONCLUSIVE,
    NOT_JUDGED,
    PASS,
    UNSAID,
    Doubts,
    Judgement,
    Said,
    find_doubts,
    judge_class,
    judge_layer,
    microseconds,
    worst,
)


@undisturbed()
def check_trace(
    path: str | Path,
    budget: str | Path | Budget,
    *,
    layers: int | None = None,
    gpu: str | None = None,
    tp: int | None = None,
    rows: int | None = None,
    plan: PlanLike | None = None,
    step_ns: int | None = None,
    family: str | None = None,
    names: Sequence[str | Path] | None = None,
    layers_from: str | Path | None = None,
) -> Report:
    """Hold the layers of a decode trace against a budget.

    Args:
        path: a trace of any kind that ``read_trace`` opens.
        budget: a name (``gb300-tp16``), the path of a budget file, or a budget.
        layers: how many layers a step has, if known; another number is then not accepted.
        gpu: the GPU it was recorded on, for a trace that does not say; never overrules one that does.
        tp: the tensor-parallel size; another than the budget's leaves the time inconclusive.
        rows: tokens in a step; likewise.
        plan: {kernel name: family}, a list of {kernel, family}, or the path of such a JSON file.
        step_ns: how long a step takes without a profiler; a traced step far from it is told.
        family: hold the kernels of this family against its share of the layer, instead of the layer.
        names: names tables (by name or path) for kernels of other engines; those of the package where not given.
        layers_from: another trace of the model, eager, with a range around each layer, where this one has none.

    Returns:
        A report whose verdict is ``pass``, ``fail`` or ``inconclusive``.

    Raises:
        TraceError: no usable trace, no kernels in it, or a wrong argument.
    """
    chosen = budget if isinstance(budget, Budget) else load_budget(budget)
    require_positive(layers=layers, tp=tp, rows=rows, step_ns=step_ns)
    if family is not None:
        known_family(family)
    return report_on(
        read_trace(path),
        chosen,
        gather_names(plan, names),
        layers=layers,
        lent=None if layers_from is None else lend(layers_from),
        said=Said(gpu, tp, rows),
        step_ns=step_ns,
        family=family,
    )


@undisturbed()
def inspect_trace(
    path: str | Path,
    *,
    layers: int | None = None,
    plan: PlanLike | None = None,
    step_ns: int | None = None,
    names: Sequence[str | Path] | None = None,
    layers_from: str | Path | None = None,
) -> Report:
    """The layers of a trace and their times, without a budget; arguments and errors as for ``check_trace``."""
    require_positive(layers=layers, step_ns=step_ns)
    lent = None if layers_from is None else lend(layers_from)
    return report_on(read_trace(path), None, gather_names(plan, names), layers=layers, lent=lent, step_ns=step_ns)


def report_on(
    trace: Trace,
    budget: Budget | None,
    names: Names,
    *,
    layers: int | None = None,
    lent: Lent | None = None,
    said: Said = UNSAID,
    step_ns: int | None = None,
    family: str | None = None,
) -> Report:
    """The report on a trace that was read already; arguments and errors as for ``check_trace``."""
    if not trace.kernels:
        return _without_kernels(trace, budget)
    reports, reasons = [], []
    for kernels in lanes(trace):
        device = analyse(trace, kernels, layers, lent)
        report, why = _judge_device(trace, device, budget, said, names, step_ns, family)
        reports.append(report)
        reasons.extend(why)
    devices = tuple(reports)
    notes = capture_notes(trace, devices, layers is not None)
    if budget is not None:
        notes.extend(_budget_notes(trace, devices, budget, said))
    verdict = worst(report.verdict for report in devices) if budget else NOT_JUDGED
    return Report(trace, budget, devices, verdict, tuple(dict.fromkeys(reasons)), tuple(notes), names, family)


def _without_kernels(trace: Trace, budget: Budget | None) -> Report:
    if trace.rejected:
        row = trace.rejected[0]
        raise TraceError(
            f"{trace.path}: none of its {len(trace.rejected)} kernel rows has usable times "
            f"({row.reason}); capture the trace again"
        )
    if not trace.graph_replays:
        raise TraceError(f"{trace.path}: no kernel records; {trace.no_kernels_hint}")
    step = median_ns(end - start for start, end in trace.graph_replays)
    reason = (
        f"kernels per layer cannot be counted: {len(trace.graph_replays)} graph replays "
        f"(median {microseconds(step)}) were traced as a whole; {RECAPTURE}"
    )
    verdict = INCONCLUSIVE if budget else NOT_JUDGED
    return Report(trace, budget, (), verdict, (reason,), tuple(capture_notes(trace, (), False)))


def _judge_device(
    trace: Trace,
    device: DeviceLayers,
    budget: Budget | None,
    said: Said,
    names: Names,
    step_ns: int | None,
    family: str | None,
) -> tuple[DeviceReport, list[str]]:
    view = view_families(device, names)
    if budget is None:
        reasons = [f"no layers found: {device.abstained.reason}"] if device.abstained else []
        findings = tuple(explain(trace, device, names=names, step_ns=step_ns))
        return DeviceReport(device, (), (), findings, NOT_JUDGED, _families(view, device, None, None)), reasons
    doubts = find_doubts(trace, device, budget, said)
    families = _families(view, device, budget, doubts)
    if family is None:
        layers = tuple(
            judge_layer(layer, device.class_of[i].kind, budget, doubts) for i, layer in enumerate(device.layers)
        )
        classes = tuple(judge_class(group, device, budget, doubts) for group in device.classes)
    else:
        layers = tuple(
            judge_family_layer(view, i, family, group.kind, budget, doubts) for i, group in enumerate(device.class_of)
        )
        classes = tuple(_row(found, family) for found in families)
    verdict = worst(judgement.verdict for judgement in (*layers, *classes))
    reasons = []
    for group, judgement in zip(device.classes, classes, strict=True):
        if judgement.verdict == FAIL:
            reasons.append(f"class {group.name}{f' ({group.kind})' if group.kind else ''}, "
                           f"{len(group.members)} layers: {'; '.join(judgement.reasons)}")  # fmt: skip
    told = {i for group, judgement in zip(device.classes, classes, strict=True) if judgement.verdict == FAIL
            for i in group.members}  # fmt: skip
    failed = [index for index, judgement in enumerate(layers) if judgement.verdict == FAIL]
    for index in failed:
        if index not in told:  # else the line of its class says it
            reasons.append(f"{device.layers[index].name}: {'; '.join(layers[index].reasons)}")
    reasons.extend(_inconclusive(layers, classes, doubts.everything))
    counted = [judgement.count for judgement in layers if judgement.count in (PASS, FAIL)]
    if verdict == INCONCLUSIVE and counted:
        reasons.append(f"the kernel count alone: {counted.count(PASS)} of {len(counted)} judged layers keep it")
    if verdict == PASS:
        kept = sum(judgement.verdict == PASS for judgement in layers)
        rest = f"; {len(layers) - kept} layers not judged" if kept < len(layers) else ""
        held = f"{family}: {kept} layers within its share" if family else f"{kept} layers within the budget"
        reasons.append(f"{held}{rest}")
    if verdict == NOT_JUDGED:  # nothing that the budget speaks of: never a pass
        verdict = INCONCLUSIVE
        kinds = ", ".join(sorted(budget.layers))
        if family is not None and device.layers:
            reasons.append(f"{family}: " + next((why for item in layers for why in item.reasons), "nothing to judge"))
        elif not doubts.everything:
            reasons.append(f"the budget is for {kinds} layers, and the trace has none")
    told_families = families if family is None else ()
    findings = tuple(
        explain(trace, device, failed, names=names, budget=budget, step_ns=step_ns, families=told_families)
    )
    adds = () if family is None else tuple(parts.get(family, NOTHING).time_ns for parts in view.layers)
    return DeviceReport(device, layers, classes, findings, verdict, families, adds), reasons


def _families(
    view: FamilyView, device: DeviceLayers, budget: Budget | None, doubts: Doubts | None
) -> tuple[ClassFamilies, ...]:
    return tuple(class_families(view, group, budget, doubts) for group in device.classes)


def _row(found: ClassFamilies, family: str) -> Judgement:
    rows = [row.judgement for row in found.rows if row.family == family]
    return rows[0] if rows else Judgement(NOT_JUDGED, (f"the budget has no share of {family} in such layers",))


def _inconclusive(
    layers: tuple[Judgement, ...], classes: tuple[Judgement, ...], everything: tuple[str, ...]
) -> list[str]:
    unknown = [reason for item in (*classes, *layers) if item.verdict == INCONCLUSIVE for reason in item.reasons]
    return list(dict.fromkeys([*everything, *unknown]))


def _budget_notes(trace: Trace, devices: tuple[DeviceReport, ...], budget: Budget, said: Said) -> list[str]:
    gpu, notes = said.gpu, []
    for report in devices:
        device = report.layers
        if gpu is not None and device.gpu is not None and gpu.upper() not in device.gpu.upper():
            notes.append(f"the trace names the GPU {device.gpu}; what it says counts, not {gpu}")
        elif gpu is not None and device.gpu is None:
            notes.append(f"GPU {gpu} on your word; the trace does not name it")
        if device.gpu is not None and not budget.fits_gpu(device.gpu):
            fitting = [name for name in budget_names() if load_budget(name).fits_gpu(device.gpu)]
            if fitting:
                notes.append(f"budgets for {device.gpu}: {', '.join(fitting)}")
        for group, judgement in zip(device.classes, report.class_judgements, strict=True):
            if judgement.verdict == NOT_JUDGED:
                notes.append(f"class {group.name}, {len(group.members)} layers: {judgement.reasons[0]}: not judged")
            elif group.kind is None and budget.limit(None) is not None:
                kinds = ", ".join(budget.layers)
                notes.append(f"class {group.name}: no kernel name tells the layer kind; held against {kinds}")
    assumed = []
    if said.tp is None and trace.world_size is None:
        assumed.append(f"TP{budget.tp} (--tp says it)")
    if said.rows is None and budget.rows is not None and any(report.layers.counts.rows is None for report in devices):
        assumed.append(f"{budget.rows} rows (--rows says it)")
    if assumed:
        notes.append(f"not in the trace and taken from the budget: {', '.join(assumed)}")
    if budget.evidence == "derived":
        notes.append(f"budget {budget.name} is derived, not measured and not published: {budget.source}")
    if budget.split is not None:
        notes.append(f"shares of families are {budget.split.evidence}: {budget.split.rule}")
    if budget.inferred:
        notes.append(f"inferred in the budget, not stated by its source: {', '.join(budget.inferred)}")
    return notes
