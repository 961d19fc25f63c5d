"""The timeline of a layer as PNG, drawn by matplotlib from the same layout as the SVG."""

from __future__ import annotations

import io
from typing import Any

from .page_figure import GREY
from .trace_layout import Layout, Line, Rect

_DPI = 100
_ANCHOR = {"start": "left", "middle": "center", "end": "right"}


def png(layout: Layout) -> bytes:
    """The figure as PNG at twice its size in pixels, without a background: middle tones suit light and dark pages.

    Raises:
        InputError: matplotlib is not installed.
    """
    from ..kernels.errors import InputError

    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise InputError("a PNG needs matplotlib: pip install 'k3lab[docs]'; .html and .svg need nothing") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        settings: Any = matplotlib.rcParams
        settings.update({"font.family": "DejaVu Sans Mono"})
        figure = Figure(figsize=(layout.width / _DPI, layout.height / _DPI), dpi=_DPI)
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        axis.set_xlim(0, layout.width)
        axis.set_ylim(layout.height, 0)
        point = 72 / _DPI
        for item in layout.items:
            if isinstance(item, Rect):
                axis.add_patch(
                    Rectangle(
                        (item.x, item.y), item.width, item.height, color=item.colour, alpha=item.opacity, linewidth=0
                    )
                )
            elif isinstance(item, Line):
                style = (0, (5, 4)) if item.dashed else "-"
                axis.plot([item.x1, item.x2], [item.y1, item.y2], color=item.colour, linewidth=item.width * point,
                          linestyle=style, alpha=item.opacity, solid_capstyle="butt")  # fmt: skip
            else:
                axis.text(item.x, item.y, _drawable(item.text), fontsize=item.size * point, color=item.colour or GREY,
                          ha=_ANCHOR[item.anchor], va="baseline", fontweight="bold" if item.bold else "normal",
                          parse_math=False)  # fmt: skip
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=2 * _DPI, transparent=True, metadata={"Software": None})
    return out.getvalue()


def _drawable(text: str) -> str:
    """The text without characters that are not for drawing."""
    return "".join(
        letter if letter.isprintable() and not "\ud800" <= letter <= "\udfff" else "\ufffd" for letter in text
    )
