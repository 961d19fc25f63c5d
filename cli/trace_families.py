"""Tables of ``k3lab trace``: the families of each class of layers, and what no family is known of."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .trace_words import lines, us, word

if TYPE_CHECKING:
    from rich.console import Console


def render_families(
    console: Console, data: dict[str, Any], judged: bool, synthetic: bool, family: str | None = None
) -> None:
    """One table a class, with each family's kernels, time, share and verdict; then the unknown kernels.

    With a family only its rows, since those of the others say nothing of it. The verdicts are those that
    ``--family`` would give: a layer that keeps its time may have a family over its share.
    """
    from rich.markup import escape
    from rich.table import Table

    for group in data["classes"]:
        rows = [row for row in group["families"] if family in (None, row["family"])]
        if not any(row["kernels"] for row in rows):
            continue
        shared = judged and any(row["share_ns"] is not None or row["share_kernels"] for row in rows)
        table = Table()
        for column in ("family", "kernels", "time"):
            table.add_column(column, justify="left" if column == "family" else "right")
        if shared:
            for column in ("share", "of share", "verdict"):
                table.add_column(column, justify="left" if column == "verdict" else "right")
        for row in rows:
            cells = [escape(row["family"]), _of(row["kernels"], row["share_kernels"]), us(row["time_ns"])]
            if shared:
                share = row["share_ns"]
                cells += [us(share), f"{row['time_ns'] / share:.0%}" if share else "-", word(row["verdict"], synthetic)]
            table.add_row(*cells)
        if (unknown := group["unknown"])["kernels"]:
            table.add_row(
                "unknown", str(unknown["kernels"]), us(unknown["time_ns"]), *(["-", "-", "-"] if shared else [])
            )
        title = f"Families of class {group['class']}: increments and bubbles, us a layer"
        console.print(f"[italic]{title}{'; verdicts of --family' if shared else ''}[/]", soft_wrap=True)
        console.print(table)
    _unknown(console, data["classes"])


def _unknown(console: Console, classes: list[dict[str, Any]]) -> None:
    """Each name once, with the classes it is in: classes of one model share most of their kernels."""
    found: dict[tuple[str, int], list[str]] = {}
    for group in classes:
        counts: Counter[str] = Counter()
        for item in group["unknown"]["names"]:
            counts[_short(item["kernel"])] += item["times"]
        for name, times in counts.items():
            found.setdefault((name, times), []).append(group["class"])
    all_of_them = len(classes)
    names = [f"{times} x {name}" + (f" (class {', '.join(inside)})" if len(inside) < all_of_them else "")
             for (name, times), inside in sorted(found.items(), key=lambda item: -item[0][1])]  # fmt: skip
    lines(console, "Unknown kernels of a layer (--plan or --names tells their family)", names)


def _of(kernels: int, most: int | None) -> str:
    return str(kernels) if most is None else f"{kernels} of {most}"


def _short(name: str) -> str:
    from ..traces.names import short_name

    return short_name(name, 72)
