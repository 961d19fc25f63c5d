"""The figure of a kernel's page: microseconds against rows, an axis a shape. The same data gives the same bytes.

Readable on a light and on a dark page: no background, text and lines in middle tones.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .page_data import at, beside, fields, has, label, lettered

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


def shapes(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fields of the shapes to show: those of the mean, or the four with most rows in the table."""
    if "mean" in bars:
        return [{bars["shape"]: value} for value in bars["mean"][bars["shape"]]]
    names = ("tp", "kind")
    counts = Counter(tuple((name, row["problem"][name]) for name in names if name in row["problem"]) for row in table["rows"])  # fmt: skip
    return [dict(shape) for shape, _ in counts.most_common(4)]


def plotted(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each axis shows: its shape, lines of (rows, us) by name, and the bars' steps; shapes without a row are left out."""
    axes = []
    for shape in shapes(table, bars):
        rows = at(table, fields(bars, shape), (1, 64))
        if not rows:
            continue
        engines = sorted({name for row in rows for name in row["engines"]})
        axes.append({
            **shape,
            "shape": label(rows[0]["problem"]).replace(",", ""),
            "engines": {
                name: [(row["problem"]["rows"], row["engines"][name]) for row in rows if name in row["engines"]] for name in engines
            },
            "beside": [(row["problem"]["rows"], other) for row in rows if (other := beside(row)) is not None],
            "floor": [(row["problem"]["rows"], row["floor_us"]) for row in rows],
            "bars": [(*bar["rows"], bar["us"]) for bar in bars["bars"] if has(rows[0], fields(bars, bar))],
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
        down, across = (len(axes) + 1) // 2, min(len(axes), 2)
        figure = Figure(figsize=(9.2, 3.4 * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False)
        for place, axis in enumerate(grid.flat):
            if place < len(axes):
                _axis(axis, axes[place], names, bars["beside"])
                title = axes[place]["shape"]
                if lettered(bars):
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


def _line(points: Sequence[tuple[float, float]], style: str, mark: str | None) -> dict[str, Any]:
    """Points stand alone, each marked, where there are one or two: a line would tell of rows between them."""
    return {"linestyle": style, "marker": mark} if len(points) > 2 else {"linestyle": "none", "marker": mark or "_"}


def _runs(bars: Sequence[tuple[int, int, float]]) -> list[list[tuple[int, int, float]]]:
    """Bars whose rows follow one another, together: no line where no bar is."""
    runs: list[list[tuple[int, int, float]]] = []
    for bar in bars:
        if runs and runs[-1][-1][1] + 1 == bar[0]:
            runs[-1].append(bar)
        else:
            runs.append([bar])
    return runs


def _axis(axis: Any, data: Mapping[str, Any], names: list[str], other: str) -> None:
    from matplotlib.ticker import NullLocator

    for name, points in data["engines"].items():
        place = names.index(name)
        axis.plot(*zip(*points, strict=True), color=COLOURS[place % 5], markersize=3.5, linewidth=1.4, label=name, **_line(points, "-", MARKERS[place % 5]))  # fmt: skip
    if data["beside"]:
        axis.plot(*zip(*data["beside"], strict=True), color=GREY, markersize=4, linewidth=1.2, label=other, **_line(data["beside"], "--", "x"))  # fmt: skip
    axis.plot(*zip(*data["floor"], strict=True), color=GREY, linewidth=1.6, label="bytes at the read ceiling", **_line(data["floor"], ":", None))  # fmt: skip
    for run in _runs(data["bars"]):
        steps = [(first, us) for first, _, us in run] + [run[-1][1:]]
        mark = "_" if run[0][0] == run[-1][1] else None
        axis.plot(*zip(*steps, strict=True), color=RED, drawstyle="steps-post", linewidth=1.6, alpha=0.8, label="bar", marker=mark)  # fmt: skip
    times = [us for points in (*data["engines"].values(), data["beside"], data["floor"]) for _, us in points]
    if 0 < 10 * min(times) < max(times):  # on a linear axis all but the slowest would lie on the ground
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    ticks = [1, 2, 4, 8, 16, 32, 64]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("rows")
    axis.set_ylabel("us, isolated, weights cold")
    axis.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
