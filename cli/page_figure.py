"""The figure of a kernel's page: microseconds against rows, an axis a shape. The same data gives the same bytes.

Readable on a light and on a dark page: no background, text and lines in middle tones.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

from .page_data import at, beside

GREY = "#8b8f98"
RED = "#d9463d"
COLOURS = ("#3d8be0", "#e08a2e", "#2aa579", "#a06fd6", "#c9a227")
"""Of engines, in the order of their names."""
MARKERS = ("o", "s", "^", "D", "v")
STYLE: dict[str, Any] = {
    "svg.hashsalt": "k3lab",
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
}


def plotted(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each axis shows: its shape, lines of (rows, us) by name, and the bars' steps; shapes without a row are left out."""
    axes = []
    shape = bars["shape"]
    for value in bars["mean"][shape]:
        rows = at(table, bars, value, (1, 64))
        if not rows:
            continue
        engines = sorted({name for row in rows for name in row["engines"]})
        axes.append({
            shape: value,
            "shape": f"TP{rows[0]['problem']['tp']} {rows[0]['problem']['kind'].upper()}",
            "engines": {
                name: [(row["problem"]["rows"], row["engines"][name]) for row in rows if name in row["engines"]] for name in engines
            },
            "beside": [(row["problem"]["rows"], other) for row in rows if (other := beside(row)) is not None],
            "floor": [(row["problem"]["rows"], row["floor_us"]) for row in rows],
            "bars": [(*bar["rows"], bar["us"]) for bar in bars["bars"] if bar[shape] == value],
        })  # fmt: skip
    return axes


def digest(table: Mapping[str, Any], bars: Mapping[str, Any]) -> str:
    """Of what is shown: a figure of other data has another, whatever draws it."""
    return hashlib.sha256(json.dumps(plotted(table, bars), sort_keys=True).encode()).hexdigest()[:16]


def draw(table: Mapping[str, Any], bars: Mapping[str, Any]) -> str:
    """The figure as SVG text, with the digest of its data in the description.

    Raises:
        InputError: matplotlib is not installed, or the table has no row of these shapes.
    """
    from ..kernels.errors import InputError

    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("the figure needs matplotlib: pip install 'k3lab[docs]'") from error
    axes = plotted(table, bars)
    if not axes:
        raise InputError("the table has no row of a shape that the figure shows")
    names = sorted({name for one in axes for name in one["engines"]})
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        settings: Any = matplotlib.rcParams
        settings.update(STYLE)
        figure = Figure(figsize=(9.2, 6.8), layout="constrained")
        grid = figure.subplots(2, 2, squeeze=False)
        for place, axis in enumerate(grid.flat):
            if place < len(axes):
                _axis(axis, axes[place], names, bars["beside"])
                title = axes[place]["shape"]
                if bars["shape"] != "tp":
                    title = f"{bars['letter']} = {axes[place][bars['shape']]} ({title})"
                axis.set_title(title, fontsize=9)
            else:
                axis.set_axis_off()
        entries: dict[str, Any] = {}
        for axis in grid.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        columns = len(entries) if len(entries) <= 5 else (len(entries) + 1) // 2
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
        out = io.StringIO()
        about = {"Date": None, "Creator": None, "Description": f"data {digest(table, bars)}"}
        figure.savefig(out, format="svg", transparent=True, metadata=about)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _axis(axis: Any, data: Mapping[str, Any], names: list[str], other: str) -> None:
    from matplotlib.ticker import NullLocator

    for name, points in data["engines"].items():
        place = names.index(name)
        axis.plot(*zip(*points, strict=True), color=COLOURS[place % 5], marker=MARKERS[place % 5], markersize=3.5, linewidth=1.4, label=name)  # fmt: skip
    if data["beside"]:
        axis.plot(*zip(*data["beside"], strict=True), color=GREY, linestyle="--", marker="x", markersize=4, linewidth=1.2, label=other)  # fmt: skip
    axis.plot(*zip(*data["floor"], strict=True), color=GREY, linestyle=":", linewidth=1.6, label="bytes at the read ceiling")  # fmt: skip
    if data["bars"]:
        steps = [(first, us) for first, _, us in data["bars"]] + [(data["bars"][-1][1], data["bars"][-1][2])]
        axis.plot(*zip(*steps, strict=True), color=RED, drawstyle="steps-post", linewidth=1.6, alpha=0.8, label="bar")
    ticks = [1, 2, 4, 8, 16, 32, 64]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("rows")
    axis.set_ylabel("us, isolated, weights cold")
    axis.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
