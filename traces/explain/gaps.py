"""Idle time between kernels: in one layer against its peers, in every layer of a class, in some steps, around layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..analysis import DeviceLayers
from ..families import Names
from ..model import Kernel
from ..names import short_name
from ..steps import NONE
from ..timing import median_ns
from ..verdict import class_period, microseconds
from .alignment import Aligned, examined, notable
from .causes import Cause, Causes
from .finding import NOTABLE_NS, Finding, by_cost, kernel_label

_IDLE = 0.1
_PER_LAYER = 4
_TOLD = 0.01  # a cause with a smaller part of the idle time is left out
_FAR = 10**9
_RARE = 0.005
_MOST_CAUSES = 20_000  # gaps whose cause is looked for; an eager capture has one before every kernel


class Gap(NamedTuple):
    """Idle time before a kernel of a step; ``at`` is the index of the kernel in the step."""

    step: int
    at: int
    start: int
    end: int
    cause: Cause

    @property
    def length(self) -> int:
        """Of the pause, ns."""
        return self.end - self.start


def step_gaps(kernels: Sequence[Kernel], least: int = NOTABLE_NS) -> list[tuple[int, Kernel]]:
    """The kernels of a step (index) before which none ran for more than ``least`` ns, with the one that ended last.

    In the order of their starts: a kernel of a side stream that is launched early may start late.
    """
    found = []
    order = sorted(range(len(kernels)), key=lambda index: kernels[index].order)
    last = kernels[order[0]]
    for index in order:
        kernel = kernels[index]
        if kernel.start - last.end > least:
            found.append((index, last))
        if kernel.end >= last.end:
            last = kernel
    return found


def find_gaps(device: DeviceLayers, causes: Causes) -> tuple[list[Gap], int]:
    """All gaps above a microsecond in the examined steps, by step, and how many steps those are."""
    gaps: list[Gap] = []
    steps = 0
    for step in examined(device):
        if len(gaps) > _MOST_CAUSES:
            break
        kernels = device.steps[step]
        for index, last in step_gaps(kernels):
            start, end = last.end, kernels[index].start
            gaps.append(Gap(step, index, start, end, causes.find(last, kernels[index], start, end)))
        steps += 1
    return gaps, steps


def main_cause(gaps: Sequence[Gap]) -> Cause:
    """The cause of most of the idle time, told by a middling gap of it, and its part where there are others too."""
    total: Counter[str] = Counter()
    for gap in gaps:
        total[gap.cause.word] += gap.length
    word = max(total, key=lambda word: (total[word], word))
    ranked = sorted((gap for gap in gaps if gap.cause.word == word), key=lambda gap: (gap.length, gap.start))
    text = ranked[len(ranked) // 2].cause.text
    shares = {other: total[other] / sum(total.values()) for other in sorted(total)}
    rest = ", ".join(f"{other} {share:.0%}" for other, share in shares.items() if other != word and share >= _TOLD)
    return Cause(word, f"{text} ({word} {shares[word]:.0%} of the time, {rest})" if rest else text)


def gap_findings(
    device: DeviceLayers,
    classes: Sequence[Aligned],
    gaps: Sequence[Gap],
    steps: int,
    names: Names,
    told: set[int],
) -> list[Finding]:
    """Findings on gaps.

    Args:
        device: the analysed layers.
        classes: its classes, aligned.
        gaps: of the examined steps.
        steps: how many steps those are.
        names: families of kernel names.
        told: indices into a step of kernels that were told already.
    """
    by_index: dict[int, list[Gap]] = defaultdict(list)
    for gap in gaps:
        by_index[gap.at].append(gap)
    found: list[Finding] = []
    seen = set(told)
    for one in classes:
        found.extend(_everywhere(one, device, by_index, steps, names, seen))
        found.extend(_against_peers(one, device, by_index, names, told, seen))
    if device.counts.source != NONE:
        found.extend(_outside(device, by_index, steps, names, seen))
    found.extend(_rare(device, by_index, steps, seen))
    return found


def _against_peers(
    one: Aligned,
    device: DeviceLayers,
    by_index: Mapping[int, list[Gap]],
    names: Names,
    told: set[int],
    seen: set[int],
) -> list[Finding]:
    found = []
    for index, places in one.places.items():
        layer = device.layers[index]
        least = notable(layer)
        own_gaps = []
        for own, position in places.items():
            _, idle = one.medians[index][position]
            at = device.spans[index][0] + own
            if idle <= least or at in told:
                continue
            peers = one.in_peers(index, position)
            if peers is None or idle - peers[1] <= least:
                continue
            _, usual = peers
            if at not in by_index:
                continue  # others ran meanwhile: late only in the order of launches
            seen.add(at)
            behind = f" (after {device.layers[index - 1].name})" if own == 0 and index else ""
            cause = main_cause(by_index[at])
            text = (
                f"{layer.name}: a gap of {microseconds(idle)} before kernel {position} "
                f"{kernel_label(one.group.sequence[position], names)}{behind}, {microseconds(usual)} in its peers: {cause.text}"
            )
            own_gaps.append(Finding("gap", layer.number, text, idle - usual, cause.word))
        found += sorted(own_gaps, key=by_cost)[:_PER_LAYER]
    return found


def _everywhere(
    one: Aligned,
    device: DeviceLayers,
    by_index: Mapping[int, list[Gap]],
    steps: int,
    names: Names,
    seen: set[int],
) -> list[Finding]:
    """Idle time that most layers of a class have."""
    group = one.group
    times = [device.layers[index].times[step] for index in group.members for step in examined(device)]
    large = median_ns(sum([bubble for bubble in item.bubbles if bubble > NOTABLE_NS]) for item in times)
    idle = median_ns(sum(item.bubbles) for item in times)
    period = class_period(group, device)
    head = f"class {group.name}: {microseconds(idle)} of {microseconds(period)} a layer is idle time between kernels"
    cost = idle * len(group.members)
    if large <= NOTABLE_NS:
        if idle <= max(NOTABLE_NS, _IDLE * period):
            return []
        text = f"{head}, in gaps of at most {microseconds(NOTABLE_NS)} each: kernels start one by one, without overlap"
        return [Finding("idle", None, text, cost, "launch gaps")]
    by_place: dict[int, list[Gap]] = defaultdict(list)
    idling = 0
    for index, places in one.places.items():
        first = device.spans[index][0]
        own = {position: by_index.get(first + at, []) for at, position in places.items()}
        idling += any(2 * len(gaps) > steps for gaps in own.values())
        for position, gaps in own.items():
            by_place[position].extend(gaps)
    if 2 * idling <= len(group.members):
        return []  # told by the layers that have them
    common = {place for place, gaps in by_place.items() if 2 * len(gaps) > len(group.members) * steps}
    for index, places in one.places.items():
        seen.update(device.spans[index][0] + at for at, position in places.items() if position in common)
    cause = main_cause([gap for gaps in by_place.values() for gap in gaps])
    worst = max(by_place, key=lambda place: (sum(gap.length for gap in by_place[place]), -place))
    text = (
        f"{head}, most of it before kernel {worst} {kernel_label(group.sequence[worst], names)} "
        f"({microseconds(median_ns(gap.length for gap in by_place[worst]))}): {cause.text}"
    )
    return [Finding("idle", None, text, cost, cause.word)]


def _steps(gaps: Sequence[Gap]) -> int:
    return len({gap.step for gap in gaps})


def _outside(
    device: DeviceLayers, by_index: Mapping[int, list[Gap]], steps: int, names: Names, seen: set[int]
) -> list[Finding]:
    """Idle time among the kernels before the first layer and after the last."""
    found = []
    first, last = device.spans[0][0], device.spans[-1][1]
    for where, inside in (("before the first layer", range(first)), ("after the last layer", range(last, _FAR))):
        usual = {at: gaps for at, gaps in by_index.items() if at in inside and 2 * len(gaps) > steps}
        if not usual:
            continue
        seen.update(usual)
        idle = {at: median_ns(gap.length for gap in gaps) for at, gaps in usual.items()}
        longest = max(idle, key=lambda at: (idle[at], -at))
        cause = main_cause([gap for gaps in usual.values() for gap in gaps])
        many = (
            f"{len(usual)} gaps, {microseconds(sum(idle.values()))} in all, the longest" if len(usual) > 1 else "a gap"
        )
        text = (
            f"{where}: {many} of {microseconds(idle[longest])} before "
            f"{kernel_label(device.steps[0][longest].name, names)}: {cause.text}"
        )
        found.append(Finding("gap", None, text, sum(idle.values()), cause.word))
    return found


def _rare(device: DeviceLayers, by_index: Mapping[int, list[Gap]], steps: int, seen: set[int]) -> list[Finding]:
    """Gaps in less than half of the steps, by cause: medians do not show them."""
    by_cause: dict[str, list[Gap]] = defaultdict(list)
    for at, gaps in by_index.items():
        if at not in seen and 2 * len(gaps) <= steps:
            for gap in gaps:
                by_cause[gap.cause.word].append(gap)
    found = []
    for word, gaps in sorted(by_cause.items()):
        cost = sum(gap.length for gap in gaps) // steps
        if cost <= max(NOTABLE_NS, _RARE * (device.step_ns or 0)):
            continue
        longest = max(gaps, key=lambda gap: (gap.length, -gap.start))
        inside = (i for i, (a, b) in enumerate(device.spans) if a <= longest.at < b)
        layer = next((device.layers[i] for i in inside), None)
        where = layer.name if layer else "outside the layers"
        name = short_name(device.steps[0][longest.at].name)
        many = "a gap of" if len(gaps) == 1 else f"{len(gaps)} gaps of up to"
        text = (
            f"in {_steps(gaps)} of {steps} steps: {many} {microseconds(longest.length)} "
            f"({where}, before {name}): {longest.cause.text}"
        )
        found.append(Finding("gap", layer.number if layer else None, text, cost, word))
    return found
