"""Says in plain lines what makes a layer slow: a kernel over its peers, a bubble, an extra or missing kernel, PDL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from .analysis import DeviceLayers, Layer
from .families import Plan, family_of
from .layers import LayerClass
from .names import base_name, short_name
from .timing import LayerTimes, median_ns
from .verdict import class_period, microseconds

NOTABLE_NS = 1000
"""Differences below a microsecond are not told."""
_OUTLIER = 1.15
_SHARE = 0.02
_PER_LAYER = 4
_AHEAD = 0.05
_IDLE = 0.1


@dataclass(frozen=True)
class Finding:
    """One observation. ``kind``: kernel, bubble, extra, missing, parts, idle, ahead; ``layer`` its number, or None."""

    kind: str
    layer: int | None
    text: str
    cost_ns: int = 0


def _aligned(layer: Layer, modal: tuple[str, ...]) -> dict[int, int]:
    """Position in the layer to position in its class's modal sequence."""
    if layer.kernels == modal:
        return {index: index for index in range(len(modal))}
    blocks = SequenceMatcher(None, layer.kernels, modal, autojunk=False).get_matching_blocks()
    return {block.a + step: block.b + step for block in blocks for step in range(block.size)}


def explain(device: DeviceLayers, over: Iterable[int], plan: Plan | None = None) -> list[Finding]:
    """Findings on the layers that are over their time or stand out, the costliest first, then on classes and whole.

    Args:
        device: the analysed layers.
        over: positions of the layers that failed.
        plan: kernel names to families.
    """
    failed = set(over)
    single: list[Finding] = []
    general: list[Finding] = []
    for group in device.classes:
        usual = class_period(group, device)
        shares = {index: _shares(device.layers[index], group) for index in group.members}
        for index in group.members:
            layer = device.layers[index]
            single.extend(_differences(layer, group))
            stands_out = layer.period > _OUTLIER * usual + NOTABLE_NS
            if stands_out or (index in failed and layer.period > usual):
                single.extend(_against_peers(layer, index, shares, group, plan))
        if failed.intersection(group.members):
            general.append(_parts(group, device, plan))
        general.extend(_idle(group, device))
    single.sort(key=lambda finding: (finding.kind not in ("extra", "missing"), -finding.cost_ns))
    return [*single, *general, *_run_ahead(device)]


def _shares(layer: Layer, group: LayerClass) -> dict[int, tuple[list[int], list[int]]]:
    """By modal position: increments and bubbles of the layer's kernel there, one a step."""
    places = _aligned(layer, group.sequence)
    return {
        modal: (
            [times.shares[own].increment for times in layer.times],
            [times.shares[own].bubble for times in layer.times],
        )
        for own, modal in places.items()
    }


def _against_peers(
    layer: Layer,
    index: int,
    shares: dict[int, dict[int, tuple[list[int], list[int]]]],
    group: LayerClass,
    plan: Plan | None,
) -> list[Finding]:
    peers = [shares[other] for other in group.members if other != index]
    least = max(NOTABLE_NS, round(_SHARE * layer.period))
    found = []
    for position, (increments, bubbles) in sorted(shares[index].items()):
        label = kernel_label(group.sequence[position], plan)
        others = [peer[position] for peer in peers if position in peer]
        if not others:
            continue
        own, usual = median_ns(increments), median_ns(value for peer in others for value in peer[0])
        if own - usual > least:
            text = (
                f"{layer.name}: kernel {position} {label} adds {microseconds(own)}, "
                f"{microseconds(usual)} in its peers (+{microseconds(own - usual)})"
            )
            found.append(Finding("kernel", layer.number, text, own - usual))
        idle, usual = median_ns(bubbles), median_ns(value for peer in others for value in peer[1])
        if idle - usual > least:
            text = (
                f"{layer.name}: a bubble of {microseconds(idle)} before kernel {position} {label}, "
                f"{microseconds(usual)} in its peers"
            )
            found.append(Finding("bubble", layer.number, text, idle - usual))
    return sorted(found, key=lambda finding: -finding.cost_ns)[:_PER_LAYER]


def _differences(layer: Layer, group: LayerClass) -> list[Finding]:
    if layer.kernels == group.sequence:
        return []
    found = []
    matcher = SequenceMatcher(None, group.sequence, layer.kernels, autojunk=False)
    for operation, a, b, c, d in matcher.get_opcodes():
        if [base_name(name) for name in group.sequence[a:b]] == [base_name(name) for name in layer.kernels[c:d]]:
            continue  # the same kernels, or other instances of the same templates
        if operation in ("insert", "replace"):
            names = ", ".join(map(short_name, layer.kernels[c:d]))
            found.append(Finding("extra", layer.number, f"{layer.name}: extra kernels against its class: {names}"))
        if operation in ("delete", "replace"):
            names = ", ".join(map(short_name, group.sequence[a:b]))
            found.append(Finding("missing", layer.number, f"{layer.name}: kernels of its class missing: {names}"))
    return found


def kernel_label(name: str, plan: Plan | None = None) -> str:
    """Short name, with the family where it is known."""
    family = family_of(name, plan)
    return f"{short_name(name)} [{family}]" if family else short_name(name)


def median_increments(group: LayerClass, device: DeviceLayers) -> list[int]:
    """Median increment of every kernel of a class's modal sequence over its layers and steps, ns."""
    shares = [_shares(device.layers[index], group) for index in group.members]
    return [
        median_ns(value for share in shares if position in share for value in share[position][0])
        for position in range(len(group.sequence))
    ]


def _parts(group: LayerClass, device: DeviceLayers, plan: Plan | None) -> Finding:
    increments = median_increments(group, device)
    ranked = sorted(range(len(increments)), key=lambda index: (-increments[index], index))[:3]
    listed = ", ".join(f"{kernel_label(group.sequence[i], plan)} {microseconds(increments[i])}" for i in ranked)
    return Finding("parts", None, f"class {group.name}: most time is added by {listed}")


def _all_times(device: DeviceLayers, members: Sequence[int]) -> list[LayerTimes]:
    return [times for index in members for times in device.layers[index].times]


def _idle(group: LayerClass, device: DeviceLayers) -> list[Finding]:
    times = _all_times(device, group.members)
    idle = median_ns(sum(share.bubble for share in item.shares) for item in times)
    period = class_period(group, device)
    if idle <= max(NOTABLE_NS, _IDLE * period):
        return []
    text = (
        f"class {group.name}: {microseconds(idle)} of {microseconds(period)} a layer is idle time between kernels: "
        "launches come late (no graph, a wait for the host, or the profiler)"
    )
    return [Finding("idle", None, text, idle)]


def _run_ahead(device: DeviceLayers) -> list[Finding]:
    times = _all_times(device, range(len(device.layers)))
    overlap = sum(item.overlap_same_stream for item in times)
    pairs = [(item.start_period, item.completion_period) for item in times if item.start_period is not None]
    off = [abs(start - period) / period for start, period in pairs if period > 0]
    apart = sum(value > _AHEAD for value in off)
    if not overlap or not off:
        return []
    busy, total = sum(item.busy for item in times), sum(item.total for item in times)
    text = f"kernels overlap on their stream (PDL): durations add up to {total / busy:.2f} times the busy time"
    if apart > 0.1 * len(off):
        text = (
            f"launches run ahead: PDL (start periods differ from completion periods by up to {max(off):.0%}; "
            f"durations add up to {total / busy:.2f} times the busy time)"
        )
    return [Finding("ahead", None, text)]
