"""Several ranks of one run: layer times of each, their spread, the verdict over all, and who waited for whom.

Layer times are differences on one clock, so they need no alignment between ranks. A pass is said only where every
rank passes and every rank of the world is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .budget import Budget, load_budget
from .check import report_on
from .collector import undisturbed
from .errors import TraceError, require_positive
from .families import PlanLike, gather_names
from .rank_set import RankLane, find_world, numbered, one_gpu, ranks_text
from .rank_times import ClassSpread, LayerSpread, class_spreads, layer_spreads, unlike
from .readers.opening import read_trace
from .report import Report
from .skew import Skew, collectives_of, compare
from .verdict import FAIL, INCONCLUSIVE, NOT_JUDGED, PASS, Said, worst

SCHEMA = "k3lab.trace_ranks/1"
_IN_NAME = re.compile(r"(?:[Rr][Aa][Nn][Kk][-_ .]?|-TP-)(\d{1,5})(?!\d)")
"""``rank3``, ``rank_3``, and ``-TP-3`` as SGLang names its traces; ``tp16`` is the size of a group and no rank."""

_WORST_FIRST = (FAIL, INCONCLUSIVE, PASS, NOT_JUDGED)


@dataclass(frozen=True)
class RanksReport:
    """What several ranks show together. ``doubts`` keep a pass from being said; ``reasons`` hold them first."""

    ranks: tuple[RankLane, ...]
    world: int | None
    budget: Budget | None
    verdict: str
    reasons: tuple[str, ...]
    doubts: tuple[str, ...]
    notes: tuple[str, ...]
    layers: tuple[LayerSpread, ...]
    classes: tuple[ClassSpread, ...]
    skew: Skew

    def __repr__(self) -> str:  # the fields hold every layer of every rank
        why = f": {self.reasons[0]}" if self.reasons else ""
        return f"<RanksReport {len(self.ranks)} ranks: {self.verdict}{why}>"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data; all times in integer ns."""
        return {
            "schema": SCHEMA,
            "world": self.world,
            "budget": self.budget.to_json() if self.budget else None,
            "verdict": self.verdict,
            "synthetic": any(rank.synthetic for rank in self.ranks),
            "reasons": list(self.reasons),
            "doubts": list(self.doubts),
            "notes": list(self.notes),
            "ranks": [_rank_json(rank) for rank in self.ranks],
            "layers": [vars(item) for item in self.layers],
            "classes": [vars(item) for item in self.classes],
            "skew": vars(self.skew)
            | {
                "ranks": [vars(item) for item in self.skew.ranks],
                "transfers": [vars(item) for item in self.skew.transfers],
            },
        }


def _rank_json(rank: RankLane) -> dict[str, Any]:
    device = rank.device.layers if rank.device else None
    return {
        "rank": rank.number,
        "said": rank.said is not None,
        "file": rank.label,
        "synthetic": rank.synthetic,
        "verdict": rank.verdict,
        "reasons": list(rank.reasons),
        "process": device.process if device else None,
        "device": device.device if device else None,
        "gpu": device.gpu if device else None,
        "steps": device.counts.used if device else 0,
        "step_ns": device.step_ns if device else None,
        "layers": len(device.layers) if device else 0,
        "completion_periods_ns": [layer.period for layer in device.layers] if device else [],
    }


@undisturbed()
def check_ranks(
    paths: Iterable[str | Path],
    budget: str | Path | Budget | None = None,
    *,
    world: int | None = None,
    layers: int | None = None,
    gpu: str | None = None,
    tp: int | None = None,
    rows: int | None = None,
    plan: PlanLike | None = None,
    names: Sequence[str | Path] | None = None,
) -> RanksReport:
    """Look at the ranks of one run together; the order of the files makes no difference.

    Args:
        paths: traces, one a rank; or files that hold several, each process and device of which is a rank.
        budget: as for ``check_trace``; None judges nothing.
        world: how many ranks the run had, where the files do not say.
        layers: as for ``check_trace``, like ``gpu``, ``tp``, ``rows``, ``plan`` and ``names``.

    Raises:
        TraceError: no file, one that is no usable trace, or a wrong argument.
    """
    files = sorted((str(path) for path in paths), key=lambda name: (Path(name).name, name))
    if not files:
        raise TraceError("name the trace files of the ranks")
    require_positive(world=world, layers=layers, tp=tp, rows=rows)
    chosen = budget if isinstance(budget, Budget) or budget is None else load_budget(budget)
    named, said = gather_names(plan, names), Said(gpu, tp, rows)
    short = Counter(Path(name).name for name in files)
    lanes: list[RankLane] = []
    notes: list[str] = []
    for name in files:
        label = Path(name).name if short[Path(name).name] == 1 else name
        report = report_on(read_trace(name), chosen, named, layers=layers, said=said)
        lanes.extend(_lanes(report, label, Path(name).name))
        notes.extend(f"{label}: {note}" for note in report.notes)
    lanes, told = numbered(lanes)
    known, world_doubts, world_notes = find_world(lanes, told, world, tp, chosen)
    doubts = [*world_doubts, *unlike(_layers_by_rank(lanes)), *one_gpu(lanes), *_unequal_steps(lanes)]
    judged = worst(lane.verdict for lane in lanes) if chosen else NOT_JUDGED
    verdict = INCONCLUSIVE if judged == PASS and doubts else judged
    by_rank = _layers_by_rank(lanes)
    apart = _apart(lanes)
    skew = Skew(apart) if apart else compare({lane.number: lane.collectives for lane in lanes})
    return RanksReport(
        ranks=tuple(lanes),
        world=known,
        budget=chosen,
        verdict=verdict,
        reasons=tuple(dict.fromkeys([*doubts, *_merged_reasons(lanes)])),
        doubts=tuple(doubts),
        notes=(*world_notes, *_shared(notes, len(files))),
        layers=tuple(layer_spreads(by_rank)),
        classes=tuple(class_spreads(by_rank)),
        skew=skew,
    )


def _lanes(report: Report, label: str, name: str) -> list[RankLane]:
    trace = report.trace
    alone = len(report.devices) < 2
    in_name = _IN_NAME.findall(name)
    said = trace.rank if trace.rank is not None else int(in_name[-1]) if in_name else None
    base = RankLane(label, 0, said if alone or trace.rank is not None else None, trace.world_size, trace.synthetic,
                    report.verdict, report.reasons, None, (), None)  # fmt: skip
    found = []
    for device in sorted(report.devices, key=lambda item: (item.layers.process, item.layers.device)):
        where = "" if alone else f" process {device.layers.process >> 24 & 0xFFFFFF} device {device.layers.device}"
        steps = device.layers.steps
        stamp = hash(tuple((kernel.start, kernel.end) for step in steps for kernel in step)) if steps else None
        lean = replace(device, layers=replace(device.layers, steps=()))  # many ranks' kernels would fill the memory
        found.append(
            replace(
                base,
                label=label + where,
                verdict=device.verdict,
                device=lean,
                collectives=collectives_of(steps),
                stamp=stamp,
            )
        )
    return found or [base]


def _layers_by_rank(lanes: Sequence[RankLane]) -> dict[int, Any]:
    return {lane.number: lane.device.layers for lane in lanes if lane.device is not None and lane.device.layers.layers}


def _unequal_steps(lanes: Sequence[RankLane]) -> list[str]:
    """A rank that has other steps than the rest lost some, or ran apart: what the capture's edge cut off is no step."""
    whole = {lane.number: lane.device.layers.counts for lane in lanes if lane.device}
    steps = {number: counts.found - counts.cut for number, counts in whole.items()}
    often = Counter(steps.values())
    if len(often) < 2:
        return []
    usual = max(often, key=lambda count: (often[count], count))
    odd = {number: count for number, count in steps.items() if count != usual}
    listed = ", ".join(map(str, sorted(set(odd.values()))))
    return [f"the ranks have different numbers of steps: {usual}, and {listed} on {ranks_text(list(odd))}"]


def _apart(lanes: Sequence[RankLane]) -> str | None:
    """Why the steps of the ranks do not correspond one to one, before their collectives are looked at."""
    if len({lane.number for lane in lanes}) < len(lanes):
        return "a rank is there twice"
    if empty := [lane.number for lane in lanes if not lane.collectives]:
        return f"no steps to compare on {ranks_text(empty)}"
    counts = {lane.number: lane.device.layers.counts for lane in lanes if lane.device}
    if odd := [rank for rank, item in counts.items() if item.uneven]:
        return f"steps with other kernels than the rest were left out on {ranks_text(odd)}"
    if len({(item.found, item.cut) for item in counts.values()}) > 1:
        listed = ", ".join(f"rank {rank} {item.found} ({item.cut} cut)" for rank, item in counts.items())
        return f"the ranks have different numbers of steps: {listed}"
    return None


def _merged_reasons(lanes: Sequence[RankLane]) -> list[str]:
    """The reasons of the ranks, each once with the ranks that have it, those of the worst ranks first."""
    owners: dict[str, list[RankLane]] = {}
    for lane in sorted(lanes, key=lambda lane: _WORST_FIRST.index(lane.verdict)):
        for reason in lane.reasons:
            owners.setdefault(reason, []).append(lane)
    everywhere = len(lanes)
    return [
        reason
        if len(own) == everywhere and everywhere > 1
        else f"{ranks_text([lane.number for lane in own])}: {reason}"
        for reason, own in owners.items()
    ]


def _shared(notes: Sequence[str], files: int) -> list[str]:
    """Notes of the files; one that all have is told once."""
    texts: Mapping[str, int] = Counter(note.split(": ", 1)[1] for note in notes)
    shared = [text for text, count in texts.items() if count == files and files > 1]
    return [*shared, *(note for note in notes if note.split(": ", 1)[1] not in shared)]
