"""Figures of the notebook facade and the report beyond the study's own: checks, times, parameters, the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .figures import BLUE, GREEN, GREY, ORANGE, plain

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RED = "#c4422f"
ABOVE = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
"""Words of a line, above the bars that it crosses."""


def check_figure(title: str, cases: Sequence[Mapping[str, Any]]) -> Figure:
    """Relative error over its bound for every comparison of a check, logarithmic: a bar that passes 1 fails."""
    import plotly.graph_objects as go

    shown = [case for case in cases if case.get("relative") is not None]
    names = [f"{case['output']}, rows {case['rows']}, {case['run']}" for case in shown]
    shares = [max(case["relative"] / case["tolerance"]["relative"], 1e-6) for case in shown]
    figure = go.Figure()
    figure.add_bar(
        y=names, x=shares, orientation="h", marker={"color": [BLUE if case["ok"] else RED for case in shown]},
        hovertemplate="%{y}<br>%{x:.3g} of the bound<extra></extra>",
    )  # fmt: skip
    figure.add_vline(x=1, line={"color": GREEN, "dash": "dash"})
    figure.add_annotation(
        x=0, text="bound", **ABOVE
    )  # of a logarithmic axis annotations name the exponent, lines the value
    figure.update_layout(yaxis={"autorange": "reversed", "automargin": True})
    figure.update_xaxes(title="relative error over its bound", type="log")
    return plain(figure, title, height=140 + 26 * len(shown))


def time_figure(title: str, timing: Mapping[str, Any]) -> Figure:
    """Cold and hot time, what PyTorch takes for the same work and the chain, against the byte floor."""
    import plotly.graph_objects as go

    bars = [("cold", timing["cold_us"], BLUE), ("hot", timing["hot_us"], BLUE)]
    bars += [(name, value, GREY) for name, value in timing.get("alternatives", {}).items()]
    if chain := timing.get("chain"):
        bars.append(("added in a chain", chain["chain_us"], ORANGE))
    figure = go.Figure()
    figure.add_bar(
        y=[name for name, _, _ in bars], x=[value for _, value, _ in bars], orientation="h",
        marker={"color": [colour for _, _, colour in bars]}, hovertemplate="%{y}<br>%{x:.2f} us<extra></extra>",
    )  # fmt: skip
    floor = timing["floor_us"]
    figure.add_vline(x=floor, line={"color": GREEN, "dash": "dash"})
    figure.add_annotation(x=floor, text=f"byte floor {floor:.2f} us", **ABOVE)
    figure.update_layout(yaxis={"autorange": "reversed", "automargin": True})
    figure.update_xaxes(title="us", rangemode="tozero")
    return plain(figure, title, height=180 + 30 * len(bars))


def samples_figure(title: str, timing: Mapping[str, Any]) -> Figure:
    """Every replay of the cold and the hot series, in order."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, colour in (("cold", BLUE), ("hot", ORANGE)):
        values = [sample / 1000 for sample in timing[name]["samples_ns"]]
        figure.add_scatter(y=values, mode="lines+markers", name=name, line={"color": colour})
    figure.update_xaxes(title="replay")
    figure.update_yaxes(title="us a call", rangemode="tozero")
    return plain(figure, title)


def importance_figure(title: str, shares: Mapping[str, float]) -> Figure:
    """Share of the spread of times that each parameter explains alone."""
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_bar(
        y=list(shares), x=[100 * share for share in shares.values()], orientation="h", marker={"color": BLUE},
        hovertemplate="%{y}<br>%{x:.0f} %<extra></extra>",
    )  # fmt: skip
    figure.update_layout(yaxis={"autorange": "reversed", "automargin": True})
    figure.update_xaxes(title="of the spread of log time, %", range=[0, 100])
    return plain(figure, title, height=150 + 26 * len(shares))


def slices_figure(title: str, found: Mapping[str, Sequence[Any]]) -> Figure:
    """One column of points a value of each parameter; the line joins the best of each value."""
    from plotly.subplots import make_subplots

    names = [name for name, parts in found.items() if len(parts) > 1] or list(found)
    columns = min(3, max(1, len(names)))
    rows = -(-max(1, len(names)) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=names, shared_yaxes=True)
    for place, name in enumerate(names):
        where = {"row": place // columns + 1, "col": place % columns + 1}
        x = [str(part.value) for part in found[name] for _ in part.times_us]
        y = [time for part in found[name] for time in part.times_us]
        figure.add_scatter(
            x=x, y=y, mode="markers", marker={"color": BLUE, "size": 6, "opacity": 0.6}, showlegend=False, **where
        )
        best = [part.best_us for part in found[name]]
        figure.add_scatter(x=[str(part.value) for part in found[name]], y=best, mode="lines", line={"color": ORANGE}, showlegend=False, **where)  # fmt: skip
        figure.update_xaxes(type="category", **where)
    figure.update_yaxes(title="us", col=1)
    figure = plain(figure, title, height=150 + 210 * rows)
    return figure.update_layout(margin_t=94)  # two lines of title, and the parameters' names below them


def roofline_figure(title: str, roofs: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> Figure:
    """Operations a second against operations a byte: the roofs of GPUs, and problems where a time of them is known.

    Args:
        title: carries the evidence words.
        roofs: ``gpu``, ``bandwidth`` in bytes/s, ``flops`` in operations/s.
        points: ``name``, ``gpu``, ``intensity`` in operations a byte, ``flops`` in operations/s, ``evidence``.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    ends = (min([0.5, *(point["intensity"] for point in points)]), 2000.0)
    for roof, colour in zip(roofs, (BLUE, GREY, GREEN, ORANGE, RED), strict=False):
        ridge = roof["flops"] / roof["bandwidth"]
        x = [ends[0], ridge, max(ends[1], 2 * ridge)]
        y = [min(roof["flops"], intensity * roof["bandwidth"]) / 1e12 for intensity in x]
        figure.add_scatter(
            x=x, y=y, mode="lines", name=f"{roof['gpu']} ({roof['source']})", line={"color": colour}, hoverinfo="name"
        )
    for word, symbol in (("measured", "circle"), ("predicted", "diamond-open"), ("floor", "line-ew-open")):
        own = [point for point in points if point["evidence"] == word]
        if own:
            figure.add_scatter(
                x=[point["intensity"] for point in own], y=[point["flops"] / 1e12 for point in own], mode="markers", name=word,
                text=[f"{point['name']} on {point['gpu']}" for point in own], marker={"color": ORANGE, "symbol": symbol, "size": 9, "line": {"width": 2}},
                hovertemplate="%{text}<br>%{x:.1f} operations a byte<br>%{y:.1f} T operations a second<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(title="operations a byte", type="log")
    figure.update_yaxes(title="T operations a second", type="log")
    return plain(figure, title, height=400)
