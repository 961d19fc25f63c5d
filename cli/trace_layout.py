"""Lays out the timeline of a layer: rectangles, lines and texts in pixels, for SVG and PNG alike.

A row a kernel, so that no label meets another however many there are: its name to the left, what it adds to the
right, its bar between. Rows stand under their stream. Colours are middle tones, readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .page_figure import COLOURS, GREY, RED

if TYPE_CHECKING:
    from ..traces.figure import Bar, LayerFigure

WIDTH = 1120
CHARACTER = 0.61
"""Width of a character of a monospaced font over its size, at most."""
ON_BARS = "#ffffff"
"""Colour of text that stands on a bar."""
WAITING = 0.3
"""Opacity of the part of a bar in which a kernel waits or is hidden."""
_MORE = ("#d65c9d", "#3aa7c4", "#8aa33c", "#b07d56")
_PALETTE = (*COLOURS, *_MORE)
_MARGIN, _VALUES, _TITLE, _BAND = 14, 78, 19, 22
_NAMED_FROM_NS = 1000


Scale = Callable[[int], float]
"""From ns to the x of a pixel."""


@dataclass(frozen=True)
class Rect:
    """A filled rectangle; ``tip`` is what hovering shows, ``data`` what a test or a script may read."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    tip: str = ""
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0
    dashed: bool = False
    opacity: float = 1.0


@dataclass(frozen=True)
class Text:
    """A text; ``y`` is its baseline, ``anchor`` start, middle or end; ``colour`` None is that of the page's text."""

    x: float
    y: float
    text: str
    size: float = 11.5
    anchor: str = "start"
    colour: str | None = None
    bold: bool = False
    tip: str = ""

    @property
    def span(self) -> tuple[float, float]:
        """Left and right end, px."""
        width = len(self.text) * self.size * CHARACTER
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, left + width


@dataclass(frozen=True)
class Layout:
    """The figure: size in px, what to draw in order, its title in words and its numbers."""

    width: int
    height: int
    items: tuple[Rect | Line | Text, ...]
    title: str
    data: Mapping[str, str]


def us(ns: int) -> str:
    """Microseconds with one decimal; with three below one, where one would say nothing."""
    return f"{ns / 1000:.1f}" if abs(ns) >= 1000 or ns == 0 else f"{ns / 1000:.3f}"


def family_colours(figure: LayerFigure) -> dict[str | None, str]:
    """A colour a family, the same in every figure for those of the model; grey where the family is not known."""
    from ..traces.families import FAMILIES

    found: dict[str | None, str] = dict(zip(FAMILIES, _PALETTE, strict=True))
    others = sorted({bar.family for bar in figure.bars if bar.family is not None and bar.family not in found})
    found.update({name: _PALETTE[(place + 4) % len(_PALETTE)] for place, name in enumerate(others)})
    return {bar.family: found.get(bar.family, GREY) for bar in figure.bars}


def titles(figure: LayerFigure) -> tuple[str, str]:
    """What is shown and judged, and where it comes from."""
    kind = f", {figure.kind}" if figure.kind else ""
    first = (
        f"{figure.layer:.60} (class {figure.class_name}{kind}): {len(figure.bars)} kernels, {us(figure.period_ns)} us"
    )
    if figure.budget is not None:
        limits = [f"{figure.budget_kernels} kernels"] if figure.budget_kernels is not None else []
        limits += [f"{us(figure.budget_ns)} us"] if figure.budget_ns is not None else []
        made = " (synthetic)" if figure.synthetic and figure.verdict == "pass" else ""
        first += f"; budget {figure.budget}: {' / '.join(limits) or 'none for this kind'}: {figure.verdict}{made}"
    second = (
        f"{figure.file:.60}, step {figure.step} of {figure.steps} (the typical one), {figure.gpu or 'GPU not named'}"
    )
    return first, second + (", synthetic: no measurement" if figure.synthetic else "")


def _tick(span_ns: int, pixels: float) -> int:
    """Distance of ticks: 1, 2 or 5 times a power of ten ns, at least 64 px apart."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if step * factor * pixels / span_ns >= 64:
                return step * factor
        step *= 10


def _tip(bar: Bar) -> str:
    hidden = bar.end_ns - bar.start_ns - bar.increment_ns
    lines = [
        bar.name if len(bar.name) <= 400 else bar.name[:397] + "...",
        f"family {bar.family or 'not known'}, stream {bar.stream}",
        f"runs {us(bar.end_ns - bar.start_ns)} us, from {us(bar.start_ns)} to {us(bar.end_ns)}",
        f"adds {us(bar.increment_ns)} us; waits or is hidden {us(hidden)} us",
    ]
    return "\n".join(lines + ([f"{us(bar.gap_ns)} us of idle time before it"] if bar.gap_ns else []))


def lay_out(figure: LayerFigure) -> Layout:
    """Place everything."""
    count = len(figure.bars)
    row, size = (20, 11.5) if count <= 40 else (16, 10.5) if count <= 100 else (13, 9.5)
    longest = max(len(bar.label) for bar in figure.bars)
    left = _MARGIN + max(96.0, longest * size * CHARACTER + 12)
    right = WIDTH - _MARGIN - _VALUES
    begin = min(0, *(bar.start_ns for bar in figure.bars))
    finish = max(figure.period_ns, figure.budget_ns or 0, *(bar.end_ns for bar in figure.bars))
    span = max(1, finish - begin)
    scale = (right - left) / span

    def x(ns: int) -> float:
        return left + (ns - begin) * scale

    colours = family_colours(figure)
    first, second = titles(figure)
    items: list[Rect | Line | Text] = [
        Text(_MARGIN, _MARGIN + _TITLE - 4, first, 13.5, bold=True),
        Text(_MARGIN, _MARGIN + 2 * _TITLE - 4, second, 11.5, colour=GREY),
    ]
    top = _MARGIN + 2 * _TITLE + 12
    items += _band(figure, colours, x, top)
    marks = top + _BAND + 16  # a line of text for the period, one for the budget: they never meet
    tall = count > 40  # the axis below is far away: ticks above as well
    plot = marks + (36 if tall else 20)
    bottom, rows = _rows(figure, colours, x, plot, row, size, left)
    items += _grid(begin, finish, x, plot, bottom, scale, span, tall)
    items += _gaps(figure, x, plot, bottom)
    items += rows
    items += _limits(figure, x, marks, plot, bottom, right)
    height = bottom + 44
    legend, height = _legend(figure, colours, height)
    data = {
        "layer": str(figure.number), "completion-period-ns": str(figure.period_ns), "gap-ns": str(figure.gap_ns),
        "budget-ns": "" if figure.budget_ns is None else str(figure.budget_ns), "synthetic": str(figure.synthetic).lower(),
    }  # fmt: skip
    return Layout(WIDTH, round(height + _MARGIN), (*items, *legend), f"{first} - {second}", data)


def _band(figure: LayerFigure, colours: Mapping[str | None, str], x: Scale, top: float) -> list[Rect | Line | Text]:
    """The families' shares of the period side by side, and the idle time last."""
    items: list[Rect | Line | Text] = [Text(_MARGIN, top + 15, "shares")]
    at = 0
    for family, ns in [*figure.families, ("idle", figure.gap_ns)]:
        if ns <= 0:
            continue
        idle = family == "idle"
        name, width = family or "other", x(at + ns) - x(at)
        data = {"share": name, "share-ns": str(ns)}
        tip = f"{name}: {us(ns)} us, {ns / max(1, figure.period_ns):.0%} of the period"
        items.append(
            Rect(x(at), top, width, _BAND, RED if idle else colours[family], WAITING if idle else 1.0, tip, data)
        )
        text = f"{name} {us(ns)}"
        if len(text) * 10.5 * CHARACTER + 8 <= width:
            items.append(Text(x(at) + width / 2, top + 15, text, 10.5, "middle", None if idle else ON_BARS))
        at += ns
    return items


def _rows(
    figure: LayerFigure, colours: Mapping[str | None, str], x: Scale, top: float, row: int, size: float, left: float
) -> tuple[float, list[Rect | Line | Text]]:
    items: list[Rect | Line | Text] = []
    y = top
    for stream, bars in figure.streams:
        adds = sum(bar.increment_ns for bar in bars)
        y += 22
        name = Text(_MARGIN, y - 7, f"stream {stream}", 11.5, bold=True)
        head = f"{len(bars)} kernel{'s' if len(bars) > 1 else ''}, together +{us(adds)} us"
        items += [name, Text(name.span[1] + 12, y - 7, head, 10.5, colour=GREY)]
        items.append(Line(_MARGIN, y - 1, WIDTH - _MARGIN, y - 1, GREY, 0.8, opacity=0.5))
        for bar in bars:
            base, thick = y + row * 0.5 + size * 0.36, row * 0.66
            items.append(Text(left - 8, base, bar.label, size, "end", tip=_tip(bar)))
            cut = bar.end_ns - bar.increment_ns
            data = {
                "kernel": bar.name, "family": bar.family or "", "stream": str(stream), "start-ns": str(bar.start_ns),
                "end-ns": str(bar.end_ns), "increment-ns": str(bar.increment_ns), "before-ns": str(bar.gap_ns),
            }  # fmt: skip
            at = y + (row - thick) / 2
            width = max(0.8, x(bar.end_ns) - x(bar.start_ns))
            items.append(Rect(x(bar.start_ns), at, width, thick, colours[bar.family], WAITING, _tip(bar), data))
            if bar.increment_ns:
                width = max(0.8, x(bar.end_ns) - x(cut))
                items.append(Rect(x(cut), at, width, thick, colours[bar.family], 1.0, _tip(bar)))
            value = f"+{us(bar.increment_ns)}" if bar.increment_ns else "hidden"
            items.append(Text(WIDTH - _MARGIN, base, value, size, "end", None if bar.increment_ns else GREY))
            y += row
    return y + 6, items


def _grid(
    begin: int, finish: int, x: Scale, top: float, bottom: float, scale: float, span: int, tall: bool
) -> list[Rect | Line | Text]:
    step = _tick(span, scale * span)
    items: list[Rect | Line | Text] = []
    for at in range(-(-begin // step) * step, finish + 1, step):
        items.append(Line(x(at), top, x(at), bottom, GREY, 0.8, opacity=0.55 if at == 0 else 0.22))
        label = f"{at / 1000:.3f}".rstrip("0").rstrip(".")
        items.append(Text(x(at), bottom + 14, label, 10.5, "middle", GREY))
        if tall:
            items.append(Text(x(at), top - 4, label, 10.5, "middle", GREY))
    note = "us from the end of the last kernel before the layer"
    items.append(Text((x(begin) + x(finish)) / 2, bottom + 32, note, 10.5, "middle", GREY))
    return items


def _gaps(figure: LayerFigure, x: Scale, top: float, bottom: float) -> list[Rect | Line | Text]:
    items: list[Rect | Line | Text] = []
    for bar in figure.bars:
        if bar.gap_ns:
            tip = f"idle {us(bar.gap_ns)} us before {bar.label}"
            width = max(0.8, x(bar.start_ns) - x(bar.start_ns - bar.gap_ns))
            data = {"gap-ns": str(bar.gap_ns)}
            items.append(Rect(x(bar.start_ns - bar.gap_ns), top, width, bottom - top, RED, 0.18, tip, data))
    return items


def _limits(
    figure: LayerFigure, x: Scale, marks: float, top: float, bottom: float, right: float
) -> list[Rect | Line | Text]:
    """Vertical lines where the layer ends and where the budget does, each with its text on a line of its own."""
    lines = [(figure.period_ns, f"ends {us(figure.period_ns)} us", GREY, False, marks)]
    if figure.budget_ns is not None:
        said = f"budget {us(figure.budget_ns)} us ({figure.budget_gpu})"
        lines.append((figure.budget_ns, said, RED, True, marks + 15))
    items: list[Rect | Line | Text] = []
    for ns, text, colour, dashed, y in lines:
        items.append(Line(x(ns), y + 3, x(ns), bottom, colour, 1.4, dashed))
        items.append(
            Text(min(x(ns) + 4, WIDTH - _MARGIN), y, text, 10.5, "end" if x(ns) > right - 180 else "start", colour)
        )
    return items


def _legend(
    figure: LayerFigure, colours: Mapping[str | None, str], top: float
) -> tuple[list[Rect | Line | Text], float]:
    entries = [(family or "other", colours[family], 1.0, ns) for family, ns in figure.families]
    if figure.gap_ns:
        entries.append(("idle", RED, WAITING, figure.gap_ns))
    items: list[Rect | Line | Text] = []
    x, y = float(_MARGIN), top
    texts = []
    for name, colour, opacity, ns in entries:
        part = f"{ns / max(1, figure.period_ns):.0%}"
        share = f", share {us(figure.shares[name])}" if name in figure.shares else ""
        texts.append((f"{name} {us(ns)} us, {part}{share}", colour, opacity))
    for text, colour, opacity in [*texts, ("pale: waits for or is hidden behind others", GREY, WAITING)]:
        width = 20 + len(text) * 10.5 * CHARACTER + 18
        if x + width > WIDTH - _MARGIN and x > _MARGIN:
            x, y = float(_MARGIN), y + 18
        items.append(Rect(x, y, 13, 11, colour, opacity))
        items.append(Text(x + 19, y + 9.5, text, 10.5))
        x += width
    return items, y + 14
