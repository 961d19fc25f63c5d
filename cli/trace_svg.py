"""The timeline of a layer as SVG, and as an HTML page of its own: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.sax.saxutils import escape, quoteattr

from .trace_layout import ON_BARS, Layout, Line, Rect, Text

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML may hold."""
_STYLE = """
svg{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
text{fill:#1f2328;white-space:pre}
g:hover>rect{stroke:#1f2328;stroke-width:1}
@media (prefers-color-scheme:dark){text{fill:#e6e8eb}g:hover>rect{stroke:#e6e8eb}}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>:root{{color-scheme:light dark}}body{{margin:0 auto;padding:8px;max-width:{width}px}}svg{{width:100%;height:auto}}</style>
</head><body>
{svg}
</body></html>
"""


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)


def _text(text: str) -> str:
    return escape(_clean(text))


def _attribute(text: str) -> str:
    return quoteattr(_clean(text))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _item(item: Rect | Line | Text) -> str:
    if isinstance(item, Line):
        dash = ' stroke-dasharray="5 4"' if item.dashed else ""
        ends = " ".join(f'{name}="{_number(getattr(item, name))}"' for name in ("x1", "y1", "x2", "y2"))
        return f'<line {ends} stroke="{item.colour}" stroke-width="{item.width}" opacity="{item.opacity}"{dash}/>'
    if isinstance(item, Rect):
        data = "".join(f" data-{name}={_attribute(value)}" for name, value in item.data.items())
        place = (
            f'x="{_number(item.x)}" y="{_number(item.y)}" width="{_number(item.width)}" height="{_number(item.height)}"'
        )
        drawn = f'<rect {place} fill="{item.colour}" fill-opacity="{item.opacity}"{data}/>'
    else:
        style = f' style="fill:{item.colour}"' if item.colour else ""
        weight = ' font-weight="600"' if item.bold else ""
        place = f'x="{_number(item.x)}" y="{_number(item.y)}" font-size="{item.size}" text-anchor="{item.anchor}"'
        drawn = f"<text {place}{weight}{style}>{_text(item.text)}</text>"
    return f"<g><title>{_text(item.tip)}</title>{drawn}</g>" if item.tip else drawn


def _head(layout: Layout, style: str = "") -> str:
    data = "".join(f" data-{name}={_attribute(value)}" for name, value in layout.data.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {layout.height}" '
        f'width="{layout.width}" height="{layout.height}" role="img" aria-label={_attribute(layout.title)}{data}{style}>'
    )


def svg(layout: Layout) -> str:
    """The figure as SVG text: light and dark by what the reader prefers, full names and times on hovering."""
    return "\n".join([_head(layout), f"<style>{_STYLE}</style>", *map(_item, layout.items), "</svg>"]) + "\n"


def inline_svg(layout: Layout) -> str:
    """The figure to put into a page of others: texts in the colour of those around it, without a style sheet of its own."""
    style = ' style="max-width:none;font-family:ui-monospace,Menlo,Consolas,monospace" fill="currentColor"'
    inked = [
        replace(item, colour=None) if isinstance(item, Text) and item.colour != ON_BARS else item for item in layout.items
    ]  # fmt: skip
    return "\n".join([_head(layout, style), *map(_item, inked), "</svg>"]) + "\n"


def page(layout: Layout) -> str:
    """The figure as an HTML page."""
    return _PAGE.format(title=_text(layout.title), width=layout.width, svg=svg(layout))
