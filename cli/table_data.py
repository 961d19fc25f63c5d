"""What the tables of results/ know of families: each problem's time beside its floor and its alternatives, with the evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import Family, InputError, Problem, family
from ..tuning.stale import word_of
from .figures import BLUE, GREEN, GREY, ORANGE, plain
from .page_data import load_table
from .shown import Shown

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

KEPT = ("engine", "config", "us", "floor_us", "chain_us", "hidden_us", "alternatives", "engines", "notes")


def shape_of(label: str) -> str:
    """A problem's label without its rows, such as ``kda-tp16``."""
    return re.sub(r"-?rows\d+", "", label)


def recorded_rows(results: Path, name: str | None = None) -> list[dict[str, Any]]:
    """One entry a problem of every ``<gpu>/*_table.json``, measured ones first: family, GPU, evidence, problem and figures.

    Args:
        results: the folder; without it there are none.
        name: of this family alone.

    Raises:
        InputError: a table is damaged, or of a family that is not here.
    """
    found = []
    for path in sorted(results.glob("*/*_table.json")):
        table = load_table(path)
        if name not in (None, table["family"]):
            continue
        owner = family(table["family"])
        for row in table["rows"]:
            label = owner.problem_from_json(row["problem"]).label
            found.append({
                "family": owner.name, "gpu": table["gpu"], "evidence": word_of(table, row["engine"]), "file": path.relative_to(results).as_posix(),
                "problem": row["problem"], "label": label, "shape": shape_of(label), "rows": row["problem"]["rows"],
                **{key: row.get(key) for key in KEPT},
            })  # fmt: skip
    return sorted(found, key=lambda row: row["evidence"] != "measured")


def by_shape(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Shape to its entries, ascending in token rows; shapes in the order in which they come."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["shape"], []).append(row)
    return {shape: sorted(own, key=lambda row: row["rows"]) for shape, own in found.items()}


def rows_figure(title: str, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Microseconds against token rows of one shape: the winner, the alternatives, the byte floor."""
    import plotly.graph_objects as go

    figure = go.Figure()
    x = [row["rows"] for row in rows]
    texts = [f"{row['engine']}<br>{row['us'] / row['floor_us']:.2f} times the floor" for row in rows]
    figure.add_scatter(
        x=x, y=[row["us"] for row in rows], name=f"winner, {rows[0]['evidence']}", mode="lines+markers", text=texts,
        line={"color": BLUE}, hovertemplate="%{x} rows: %{y:.2f} us<br>%{text}<extra></extra>",
    )  # fmt: skip
    names = dict.fromkeys(name for row in rows for name in row["alternatives"] or {})
    for name, colour in zip(names, (ORANGE, GREY), strict=False):
        own = [(row["rows"], row["alternatives"][name]) for row in rows if name in (row["alternatives"] or {})]
        figure.add_scatter(
            x=[a for a, _ in own], y=[b for _, b in own], name=name, mode="lines+markers", line={"color": colour}
        )
    figure.add_scatter(
        x=x, y=[row["floor_us"] for row in rows], name="byte floor", mode="lines", line={"color": GREEN, "dash": "dash"}
    )
    figure.update_xaxes(title="token rows", type="log", tickvals=[1, 2, 4, 8, 16, 32, 64])
    figure.update_yaxes(title="us", rangemode="tozero")
    return plain(figure, title)


def shown_record(owner: Family, problem: Problem, results: Path) -> Shown:
    """What the tables hold of a problem, on every GPU, with a figure of all its row counts a GPU.

    Raises:
        InputError: they hold nothing of its shape.
    """
    shape = shape_of(problem.label)
    known = [row for row in recorded_rows(results, owner.name) if row["shape"] == shape]
    if not known:
        raise InputError(f"{results} has no table of {owner.name} {shape}; `k3lab tune-table --results` makes one")
    told: list[tuple[str, Any]] = []
    figures = {}
    for gpu in dict.fromkeys(row["gpu"] for row in known):
        own = by_shape([row for row in known if row["gpu"] == gpu])[shape]
        word = own[0]["evidence"]
        for row in own:
            if row["rows"] != problem.rows:
                continue
            told += [
                (f"{gpu}, {word}", f"{row['us']:.2f} us, {row['engine']}, {row['us'] / row['floor_us']:.2f} times the byte floor of {row['floor_us']:.2f} us"),
                *((f"{gpu}, {name}", f"{us:.2f} us") for name, us in (row["alternatives"] or {}).items()),
            ]  # fmt: skip
            if row["chain_us"] is not None:
                told.append((f"{gpu}, in a chain", f"adds {row['chain_us']:.2f} us, {row['hidden_us']:.2f} us hidden"))
            told += [(f"{gpu}, note", note) for note in row["notes"] or ()]
        title = f"{owner.name} {shape} on {gpu}: {word}"
        figures[gpu] = lambda own=own, title=title: rows_figure(title, own)  # type: ignore[misc]
    if not told:
        others = sorted({row["rows"] for row in known})
        told = [("not recorded", f"{problem.rows} rows; recorded are {', '.join(map(str, others))}")]
    return Shown(f"on record: {owner.name} {problem.label}", {"rows": known}, told, figures)
