"""A comparison in plain lines, and as JSON-able data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..explain.finding import one_line
from ..names import short_name
from ..verdict import microseconds
from .comparing import ClassDiff, DeviceDiff, KernelDiff
from .matching import ADDED, REMOVED, SAME
from .spread import RULE, Change

if TYPE_CHECKING:
    from .asking import TraceDiff

SCHEMA = "k3lab.trace_diff/1"
_LISTED = 6


def told_change(item: Change) -> str:
    """From what to what, and by how much."""
    if item.a is None or item.b is None:
        there = item.a if item.b is None else item.b
        return microseconds(there or 0)
    by = item.b - item.a
    share = f", {by / item.a:+.1%}" if item.a > 0 else ""
    return f"{microseconds(item.a)} to {microseconds(item.b)} ({'+' if by >= 0 else ''}{microseconds(by)}{share})"


def device_reasons(device: DeviceDiff, several: bool) -> list[str]:
    """What changed on a device, a line each: nothing that is within the spread of the steps."""
    lines = [f"only in a: {text}" for text in device.only_a] + [f"only in b: {text}" for text in device.only_b]
    for item in device.classes:
        lines += _class_lines(item)
    if device.layers[0] == device.layers[1]:  # another number of layers is another step: that is told by class
        if device.step.beyond:
            lines.append(f"step: {told_change(device.step)}, beyond the spread of the steps")
        if device.kernels[0] != device.kernels[1]:
            lines.append(f"kernels a step: {device.kernels[0]} to {device.kernels[1]}")
    if None not in device.launches and device.launches[0] != device.launches[1]:
        lines.append(f"launches a step: {device.launches[0]} to {device.launches[1]}")
    return [one_line(f"device {device.device}: {line}" if several else line) for line in lines]


def _class_lines(item: ClassDiff) -> list[str]:
    head = f"class {item.a}" if item.a == item.b else f"class {item.a} in a, {item.b} in b"
    head += f" ({item.kind})" if item.kind else ""
    head += f", {item.layers[0]} and {item.layers[1]} layers" if item.layers[0] != item.layers[1] else ""
    lines = []
    if item.split_off:
        lines.append(f"{head}: a part of the layers is of another form than the rest")
    if item.period.beyond:
        few = 0 < len(item.parted) <= 0.5 * min(item.layers)
        where = f", in layers {', '.join(map(str, item.parted))} alone" if few else ""
        word = "slower" if item.period.worth > 0 else "faster"
        lines.append(
            f"{head}: {word} beyond the spread of the steps: completion period {told_change(item.period)}{where}"
        )
    lines += [f"{head}: {_moved(kernel)}" for kernel in item.moved]
    kept = [kernel for kernel in item.kernels if kernel.state == SAME and kernel.increment.beyond]
    for kernel in sorted(kept, key=lambda kernel: -abs(kernel.increment.worth))[:_LISTED]:
        lines.append(f"{head}: {_label(kernel.b, kernel)} adds {told_change(kernel.increment)}")
    for name, change in (("idle time", item.idle), ("overlap on one stream", item.overlap_same_stream),
                         ("overlap across streams", item.overlap_cross_stream)):  # fmt: skip
        if change.beyond:
            lines.append(f"{head}: {name} {told_change(change)}{_pdl(name, change)}")
    return lines


def _pdl(name: str, change: Change) -> str:
    if name != "overlap on one stream" or (change.a and change.b):
        return ""
    return ": PDL seen in a alone" if change.a else ": PDL seen in b alone"


def _label(name: str | None, kernel: KernelDiff) -> str:
    return short_name(name or "") + (f" [{kernel.family}]" if kernel.family else "")


def _moved(kernel: KernelDiff) -> str:
    if kernel.state == ADDED:
        return f"kernel added: {_label(kernel.b, kernel)}, {told_change(kernel.increment)}"
    if kernel.state == REMOVED:
        return f"kernel removed: {_label(kernel.a, kernel)}, {told_change(kernel.increment)}"
    return f"kernel {kernel.state}: {short_name(kernel.a or '')} is {_label(kernel.b, kernel)}, {told_change(kernel.increment)}"


def diff_json(diff: TraceDiff) -> dict[str, Any]:
    """The comparison as JSON-able data; all times in integer ns, null where there is no figure."""
    return {
        "schema": SCHEMA,
        "a": {"file": diff.a.path, "synthetic": diff.a.synthetic},
        "b": {"file": diff.b.path, "synthetic": diff.b.synthetic},
        "verdict": diff.verdict,
        "rule": RULE,
        "refused": [{"field": field, "values": values} for field, values in diff.refused],
        "reasons": list(diff.reasons),
        "devices": [_device_json(device) for device in diff.devices],
        "notes": list(diff.notes),
    }


def _device_json(device: DeviceDiff) -> dict[str, Any]:
    return {
        "device": device.device,
        "only_a": list(device.only_a),
        "only_b": list(device.only_b),
        "step": device.step.to_json(),
        "layers": list(device.layers),
        "kernels_a_step": list(device.kernels),
        "launches_a_step": list(device.launches),
        "classes": [_class_json(item) for item in device.classes],
    }


def _class_json(item: ClassDiff) -> dict[str, Any]:
    return {
        "a": item.a,
        "b": item.b,
        "kind": item.kind,
        "layers": list(item.layers),
        "split_off": item.split_off,
        "layers_beyond_the_spread": list(item.parted),
        "completion_period": item.period.to_json(),
        "idle": item.idle.to_json(),
        "overlap_same_stream": item.overlap_same_stream.to_json(),
        "overlap_cross_stream": item.overlap_cross_stream.to_json(),
        "kernels": [
            {"state": kernel.state, "a": kernel.a, "b": kernel.b, "family": kernel.family,
             "increment": kernel.increment.to_json()}
            for kernel in item.kernels
        ],
        "families": [{"family": name, "increment": change.to_json()} for name, change in item.families],
    }  # fmt: skip
