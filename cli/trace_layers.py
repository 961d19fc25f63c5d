"""Tables of ``k3lab trace``: the classes of layers and the layers themselves; on a narrow terminal only what is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .trace_words import NARROW, titled, us, word

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 24


def class_table(console: Console, data: dict[str, Any], judged: bool, synthetic: bool, family: str | None) -> Any:
    """A row a class; the kernels that add most only where there is room, else the families' tables tell."""
    from rich.markup import escape

    wide = console.width >= NARROW
    table = titled("Layer classes (layers of the same kernels)", ("class", "kind"), ("layers", "kernels", "period us"))
    if wide:
        table.add_column("most time in")
    if judged:
        table.add_column("verdict" if family is None else f"{family} alone")
    for row in data["classes"]:
        cells = [row["class"], row["kind"] or "?", str(len(row["layers"])), str(row["kernels"]),
                 us(row["completion_period_ns"])]  # fmt: skip
        if wide:
            top = sorted(row["sequence"], key=lambda item: -item["increment_ns"])[:3]
            cells.append(escape(", ".join(
                f"{item['family'] or _short(item['kernel'])} {us(item['increment_ns'])}" for item in top)))  # fmt: skip
        table.add_row(*cells, *([word(row["verdict"], synthetic)] if judged else []))
    return table


def _short(name: str) -> str:
    from ..traces.names import short_name

    return short_name(name, 32)


def _worst(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The layers to show, in their order: all where they are few, else those over and those farthest above their class."""
    rows = data["layers"]
    if len(rows) <= _SHOWN:
        return list(rows)
    typical: dict[str, list[int]] = {}
    for row in rows:
        typical.setdefault(row["class"], []).append(row[key] or 0)
    middle = {name: sorted(values)[len(values) // 2] for name, values in typical.items()}

    def rank(index: int) -> tuple[bool, int, int]:
        row = rows[index]
        return row["verdict"] != "fail", middle[row["class"]] - (row[key] or 0), index

    return [rows[index] for index in sorted(sorted(range(len(rows)), key=rank)[:_SHOWN])]


def layer_table(console: Console, data: dict[str, Any], judged: bool, synthetic: bool, family: str | None) -> Any:
    """A row a layer. With a family its time is there beside the layer's, since that is what is judged."""
    from rich.markup import escape

    wide = console.width >= NARROW and family is None
    rows = _worst(data, "family_ns" if family else "completion_period_ns")
    title = "Layers: completion period over the steps, us" if family is None else f"Layers: time of {family}, us"
    title += " (from wall on: one typical step)" if wide else ""
    title += (
        "" if len(rows) == len(data["layers"]) else f"; the worst {len(rows)} of {len(data['layers'])}, --json has all"
    )
    middle = ("kernels", "period", "p10-p90") if family is None else (family, "whole layer")
    rest = (
        ("wall", "busy", "sum", "overlap", "gap", "idle", "start period")
        if wide
        else ("idle",)
        if family is None
        else ()
    )
    table = titled(title, ("layer", "class"), (*middle, *rest))
    if judged:
        table.add_column("verdict")
    for row in rows:
        period = us(row["completion_period_ns"])
        cells = [escape(row["name"]), row["class"]]
        if family is None:
            spread = f"{us(row['p10_ns'])}-{us(row['p90_ns'])}" if data["steps"]["used"] > 1 else "one step"
            cells += [str(row["kernels"]), period, spread]
        else:
            cells += [us(row["family_ns"]), period]
        table.add_row(*cells, *(us(_of_step(row["typical_step"], name)) for name in rest),
                      *([word(row["verdict"], synthetic)] if judged else []))  # fmt: skip
    return table


def _of_step(step: dict[str, Any], name: str) -> int | None:
    if name == "overlap":
        return int(step["overlap_same_stream_ns"] + step["overlap_cross_stream_ns"])
    found = step[f"{name.replace(' ', '_')}_ns"]
    return None if found is None else int(found)
