"""What the report shows beyond studies: records of tables as figures and rows, the roofline, the drawn layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels import family
from ..kernels.gpu_cards import gpu_card
from .roofline_data import point, roof
from .table_data import by_shape, recorded_rows


def recorded_families(results: Path, tp: int) -> list[dict[str, Any]]:
    """Families with a table on record: its rows, and the shapes of one TP size whose figures are shown open.

    Args:
        results: folder of results.
        tp: shapes of this size are drawn; all are listed.
    """
    rows = recorded_rows(results)
    found = []
    for name in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == name]
        drawn = []
        for gpu in dict.fromkeys(row["gpu"] for row in own):
            here = [row for row in own if row["gpu"] == gpu and row["problem"]["tp"] == tp]
            drawn += [{"gpu": gpu, "shape": shape, "rows": rows} for shape, rows in by_shape(here).items()]
        found.append(
            {"family": name, "rows": own, "drawn": drawn, "files": list(dict.fromkeys(row["file"] for row in own))}
        )
    return found


def known_points(records: Sequence[Mapping[str, Any]], studies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every time that a table or a study of the page knows, as a point of the roofline."""
    known = [(row["family"], row["gpu"], row["problem"], row["us"], row["evidence"])
             for record in records for row in record["rows"]]  # fmt: skip
    known += [
        (study["family"], study["gpu"], study["problem"], study["choice"]["value_us"], study["evidence"])
        for study in studies
        if study["choice"]
    ]
    found = []
    for name, gpu, problem, us, evidence in known:
        owner = family(name)
        one = owner.problem_from_json(problem)
        found.append(point(f"{name} {one.label}", gpu, owner.traffic(one), us, evidence))
    return found


def roofline(points: Sequence[Mapping[str, Any]], gpu: str) -> dict[str, Any]:
    """Roofs of the page's GPU and of those that have points, and the points."""
    names = dict.fromkeys([gpu, *(item["gpu"] for item in points)])
    return {"roofs": [roof(gpu_card(name)) for name in names], "points": list(points)}


def drawn_layer(trace: Path, budget: str) -> str:
    """The layer of a trace that is furthest over its budget, by stream, as SVG; empty where none can be drawn."""
    from ..traces.errors import TraceError
    from ..traces.figure import layer_figure
    from .trace_layout import lay_out
    from .trace_svg import inline_svg

    try:
        return inline_svg(lay_out(layer_figure(trace, budget=budget)))
    except TraceError:  # the verdict beside it says what the trace lacks
        return ""
