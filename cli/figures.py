"""Figures of the report and the notebook. Every title carries the evidence word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BLUE, ORANGE, GREY, GREEN = "#2a78d6", "#d9730d", "#8b8f98", "#1a8f6c"
HEIGHT = 340


def plain(figure: Figure, title: str, height: int = HEIGHT) -> Figure:
    """The figure in the house's style: no background of its own, so that light and dark pages both suit it."""
    figure.update_layout(
        title={"text": title, "font": {"size": 14}, "x": 0, "xanchor": "left", "xref": "container", "pad": {"l": 4}},
        height=height,
        margin={"l": 56, "r": 16, "t": 64, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": GREY},
        legend={"orientation": "h", "y": -0.34, "yanchor": "top"},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(gridcolor="rgba(139,143,152,.25)", zerolinecolor="rgba(139,143,152,.4)")
    figure.update_yaxes(gridcolor="rgba(139,143,152,.25)", zerolinecolor="rgba(139,143,152,.4)")
    return figure


def config_text(config: dict[str, Any]) -> str:
    """A config in one line."""
    return " ".join(f"{name}={value}" for name, value in config.items())


def study_figure(study: dict[str, Any]) -> Figure:
    """Trials of a study in order: time of each, the best so far, the byte floor, and what failed and why."""
    import plotly.graph_objects as go

    done = [trial for trial in study["trials"] if trial["value"] is not None]
    failed = [trial for trial in study["trials"] if trial["value"] is None]
    figure = go.Figure()
    texts = [f"trial {trial['trial']}<br>{config_text(trial['config'])}" for trial in done]
    numbers, values = [trial["trial"] for trial in done], [trial["value"] for trial in done]
    figure.add_scatter(
        x=numbers, y=values, mode="markers", name="trial", text=texts, marker={"color": BLUE, "size": 8},
        hovertemplate="%{text}<br>%{y:.2f} us<extra></extra>",
    )  # fmt: skip
    best, so_far = [], float("inf")
    for value in values:
        so_far = min(so_far, value)
        best.append(so_far)
    figure.add_scatter(
        x=numbers, y=best, mode="lines", name="best so far", line={"color": ORANGE, "shape": "hv"}, hoverinfo="skip"
    )
    if failed:
        top = max(values, default=study["floor_us"])
        figure.add_scatter(
            x=[trial["trial"] for trial in failed], y=[top] * len(failed), mode="markers", name="failed",
            marker={"color": GREY, "symbol": "x", "size": 8},
            text=[f"trial {trial['trial']}: {trial['status']}<br>{trial['reason'][:120]}" for trial in failed],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    floor = study["floor_us"]
    figure.add_hline(
        y=floor,
        line={"color": GREEN, "dash": "dash"},
        annotation_text=f"byte floor {floor:.2f} us ({study['bandwidth']})",
    )
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title=f"{study['evidence']} time, us", rangemode="tozero")
    title = f"{study['family']}/{study['engine']}<br>{study['label']} on {study['gpu']}: {study['evidence']}"
    return plain(figure, title)


def layer_figure(layer: dict[str, Any], budget_us: float | None = None) -> Figure:
    """One layer, family by family: the byte floor, and what a winner adds to it. Titles have lines short enough for a phone."""
    import plotly.graph_objects as go

    names = [part["family"] for part in layer["parts"]]
    figure = go.Figure()
    figure.add_bar(
        y=names, x=[part["floor_us"] for part in layer["parts"]], orientation="h", name="byte floor", marker={"color": BLUE},
        hovertemplate="%{y}<br>floor %{x:.2f} us<extra></extra>",
    )  # fmt: skip
    over = [max(0.0, (part["time_us"] or 0) - part["floor_us"]) for part in layer["parts"]]
    texts = [part["evidence"] if part["time_us"] else "" for part in layer["parts"]]
    figure.add_bar(
        y=names, x=over, orientation="h", name="winner above its floor", marker={"color": ORANGE}, text=texts,
        textposition="outside", cliponaxis=False, hovertemplate="%{y}<br>+%{x:.2f} us (%{text})<extra></extra>",
    )  # fmt: skip
    figure.update_layout(barmode="stack", yaxis={"autorange": "reversed"})
    longest = max((part["time_us"] or part["floor_us"] for part in layer["parts"]), default=1.0)
    figure.update_xaxes(title="us", range=[0, 1.35 * longest])  # room for the evidence word beside a bar
    beside = f"; budget {budget_us:.0f} us" if budget_us else ""
    title = f"{layer['kind'].upper()} + MoE, TP{layer['tp']}, {layer['rows']} rows, {layer['gpu']}"
    return plain(figure, f"{title}<br>{layer['sum_us']:.1f} us, {layer['evidence']}{beside}")


def figure_html(figure: Figure) -> str:
    """The figure as a div; the page includes plotly itself once."""
    config = {
        "displaylogo": False,
        "responsive": True,
        "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"],
    }
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def floor_figure(name: str, problem: Any, floors: list[dict[str, Any]]) -> Figure:
    """Byte floors at several TP sizes on several GPUs."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for tp, colour in zip(dict.fromkeys(item["tp"] for item in floors), (BLUE, ORANGE, GREEN, GREY), strict=False):
        own = [item for item in floors if item["tp"] == tp]
        figure.add_bar(
            x=[f"{item['gpu']} ({item['bandwidth']})" for item in own], y=[item["floor_us"] for item in own], name=f"TP{tp}",
            marker={"color": colour}, hovertemplate="%{x}<br>%{y:.2f} us<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(title="us")
    return plain(figure, f"{name}, {problem.rows} rows: byte floor (bytes over read bandwidth)")
