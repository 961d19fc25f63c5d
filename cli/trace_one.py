"""``k3lab trace check --layer N``: one layer kernel by kernel, beside the layers like it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .trace_words import NARROW, line, lines, made_up, titled, us

if TYPE_CHECKING:
    from rich.console import Console

    from ..traces import Report
    from ..traces.analysis import DeviceLayers
    from ..traces.families import Names

_TOLD_NS = 1000


def with_layer(report: Report, number: int | None) -> dict[str, Any]:
    """The report's data; of a layer that is asked for, every device also says what each of its kernels adds.

    Raises:
        TraceError: no device has such a layer.
    """
    from ..traces import TraceError

    data = report.to_json()
    if number is None:
        return data
    told = [_kernels(device.layers, number, report.names) for device in report.devices]
    if not any(told):
        known = sorted({layer.number for device in report.devices for layer in device.layers.layers})
        which = f"there are layers {known[0]} to {known[-1]}" if known else "no layers were found"
        raise TraceError(f"{report.trace.path}: no layer {number}; {which}")
    devices = [device | {"layer_kernels": kernels} for device, kernels in zip(data["devices"], told, strict=True)]
    return data | {"layer": number, "devices": devices}


def _kernels(device: DeviceLayers, number: int, names: Names) -> list[dict[str, Any]]:
    from ..traces.timing import median_ns

    position = next((index for index, layer in enumerate(device.layers) if layer.number == number), None)
    if position is None:
        return []
    layer = device.layers[position]
    alike = [device.layers[index] for group in device.classes if position in group.members for index in group.members
             if index != position and device.layers[index].kernels == layer.kernels]  # fmt: skip
    families = names.families(layer.kernels)
    return [
        {
            "place": place,
            "kernel": name,
            "family": families[place],
            "increment_ns": median_ns(times.increments[place] for times in layer.times),
            "idle_before_ns": median_ns(times.bubbles[place] for times in layer.times),
            "peers_ns": median_ns(t.increments[place] for other in alike for t in other.times) if alike else None,
        }
        for place, name in enumerate(layer.kernels)
    ]


def _small(kernels: list[dict[str, Any]]) -> list[str]:
    """What is below a finding: findings name a layer's kernels only where the layer fails or is far above its class."""
    from ..traces.names import short_name

    compared = [row for row in kernels if row["peers_ns"] is not None]
    if not compared:
        return ["no other layer has the same kernels"]
    top = max(compared, key=lambda row: row["increment_ns"] - row["peers_ns"])
    more = top["increment_ns"] - top["peers_ns"]
    if more < _TOLD_NS:
        return ["no kernel adds a microsecond more than in the layers like it"]
    return [
        f"small, most by kernel {top['place']} {short_name(top['kernel'], 60)}: {us(more)} us more than in the layers like it"
    ]


def render_layer(console: Console, device: dict[str, Any], number: int, judged: bool, synthetic: bool) -> None:
    """Print the layer's figure, what is found in it, and its kernels."""
    from rich.markup import escape

    from ..traces.names import short_name

    found = next((row for row in device["layers"] if row["number"] == number), None)
    if found is None:
        line(console, f"device {device['device']}: no layer {number}")
        return
    usual = next(group["completion_period_ns"] for group in device["classes"] if group["class"] == found["class"])
    kind = f", {found['kind']}" if found["kind"] else ""
    verdict = f"{found['verdict']}{made_up(found['verdict'], synthetic)}: " if judged else ""
    spread = f"p10 to p90 {us(found['p10_ns'])} to {us(found['p90_ns'])}" if device["steps"]["used"] > 1 else "one step"
    line(console, f"{verdict}{found['name']} (class {found['class']}{kind}): {us(found['completion_period_ns'])} us, "
                  f"{spread}; its class {us(usual)} us")  # fmt: skip
    lines(console, "Reasons", found["reasons"])
    own = [item["text"] for item in device["findings"] if item["layer"] == number]
    shared = [item["text"] for item in device["findings"] if item["text"].startswith(f"class {found['class']}:")]
    lines(console, "Findings", [*(own or _small(device["layer_kernels"])), *shared])
    wide = console.width >= NARROW
    table = titled("Its kernels: what each adds to the completion period, us",
                   ("", "kernel", *(["family"] if wide else [])), ("adds", "peers", "more", "idle before"))  # fmt: skip
    for row in device["layer_kernels"]:
        more = None if row["peers_ns"] is None else row["increment_ns"] - row["peers_ns"]
        name = escape(short_name(row["kernel"], 60 if wide else 40))
        table.add_row(str(row["place"]), name, *([escape(row["family"] or "?")] if wide else []), us(row["increment_ns"]),
                      us(row["peers_ns"]), us(more), us(row["idle_before_ns"]))  # fmt: skip
    console.print(table)
