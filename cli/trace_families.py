"""Tables of ``k3lab trace``: the families of each class of layers, and what no family is known of."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .trace_words import lines, us, word

if TYPE_CHECKING:
    from rich.console import Console


def render_families(console: Console, data: dict[str, Any], judged: bool, synthetic: bool) -> None:
    """One table a class, with each family's kernels, time, share and verdict; then the unknown kernels."""
    from rich.markup import escape
    from rich.table import Table

    for group in data["classes"]:
        if not any(row["kernels"] for row in group["families"]):
            continue
        title = f"Families of class {group['class']} (us a layer: increments and bubbles)"
        table = Table(title=title, title_justify="left")
        for column in ("family", "kernels", "time"):
            table.add_column(column, justify="left" if column == "family" else "right")
        if judged:
            for column in ("share", "of share", "verdict"):
                table.add_column(column, justify="left" if column == "verdict" else "right")
        for row in group["families"]:
            cells = [escape(row["family"]), _of(row["kernels"], row["share_kernels"]), us(row["time_ns"])]
            if judged:
                share = row["share_ns"]
                cells += [us(share), f"{row['time_ns'] / share:.0%}" if share else "-", word(row["verdict"], synthetic)]
            table.add_row(*cells)
        if (unknown := group["unknown"])["kernels"]:
            table.add_row(
                "unknown", str(unknown["kernels"]), us(unknown["time_ns"]), *(["-", "-", "-"] if judged else [])
            )
        console.print(table)
    for group in data["classes"]:
        counts: Counter[str] = Counter()
        for item in group["unknown"]["names"]:
            counts[_short(item["kernel"])] += item["times"]
        names = [f"{times} x {name}" for name, times in counts.most_common()]
        lines(console, f"Unknown: kernels of no known family in class {group['class']}", names)


def _of(kernels: int, most: int | None) -> str:
    return str(kernels) if most is None else f"{kernels} of {most}"


def _short(name: str) -> str:
    from ..traces.names import short_name

    return short_name(name, 72)
