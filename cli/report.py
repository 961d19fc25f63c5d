"""``k3lab report``: one HTML file that shows what is known, with nothing to load from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..kernels.errors import InputError
from ..kernels.whole_file import write_whole
from .output import Json, emit
from .select import GPU_NAMES

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATES = Path(__file__).parent / "templates"
STUDIES = Path("studies")
TARGET = "GB300"
"""The layer of this GPU is always on the page."""


def find_studies(given: Sequence[Path] | None) -> list[Path]:
    """The study files named, or those below ``studies/``; a folder stands for the files in it."""
    paths = list(given) if given else [STUDIES] if STUDIES.is_dir() else []
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("*.sqlite3")) if path.is_dir() else [path]
    return found


def winner_rows(studies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a study that has a winner."""
    rows = []
    for study in studies:
        if study["choice"]:
            shared = {key: study[key] for key in ("family", "engine", "label", "gpu", "evidence", "floor_us")}
            rows.append({**shared, "config": study["choice"]["config"], "value_us": study["choice"]["value_us"]})
    return rows


def with_studies(families: list[dict[str, Any]], winners: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The families with the studies shown on the page added to the evidence on record.

    One entry a GPU, evidence word and problem; the page's own study stands before the record of the same problem,
    and an entry without a number is left out where there is one with a number.
    """
    rows = []
    for row in families:
        own = [win for win in winners if win["family"] == row["family"]]
        entries: dict[tuple[str, str], dict[str | None, float | None]] = {}
        for entry in [*own, *row["evidence"]]:
            known = entries.setdefault((entry["gpu"], entry["evidence"]), {})
            known.setdefault(entry.get("label"), entry.get("value_us"))
        listed = [
            {"gpu": gpu, "evidence": word, "label": label, "value_us": value}
            for (gpu, word), known in entries.items()
            for label, value in known.items()
            if value is not None or not any(known.values())
        ]
        rows.append({**row, "evidence": listed})
    return rows


def other_gpu(verdict: dict[str, Any], gpu: str) -> str | None:
    """A sentence where the trace was not recorded on the GPU that the page is about."""
    others = [name for name in verdict["gpus"] if gpu.upper() not in name.upper().replace("-", " ").split()]
    if not others:
        return None
    made = "is a synthetic one for" if verdict["synthetic"] else "was recorded on"
    return f"The trace {made} {', '.join(others)}; the layer above is for {gpu}."


def model_error(study: dict[str, Any]) -> str | None:
    """What the cost model says of its own error, from the winner's prediction."""
    if not study["choice"]:
        return None
    winner = next((trial for trial in study["trials"] if trial["trial"] == study["choice"]["trial"]), None)
    return str(winner["prediction"]["error"]) if winner and winner.get("prediction") else None


def collect(
    *,
    studies: Sequence[Path],
    bundles: Sequence[Path],
    trace: Path | None,
    budget: str,
    results: Path,
    tp: int,
    rows: int,
    kind: str,
    gpu: str,
) -> dict[str, Any]:
    """Everything the page shows, as JSON-able data.

    Raises:
        InputError: a study, bundle or trace that is not one, or a problem out of range.
    """
    from ..kernels import K3
    from ..kernels.bundle.reader import Bundle, describe
    from ..kernels.gpu_cards import gpu_card
    from ..tuning.environment import package_versions, source_commit
    from .kernels import family_rows
    from .report_data import drawn_layer, known_points, recorded_families, roofline
    from .study_data import layer_data, study_data
    from .verdict_data import budget_us, verdict_data

    card = gpu_card(gpu)
    verdict = verdict_data(trace, budget) if trace else None
    if verdict:
        verdict["other_gpu"] = other_gpu(verdict, card.name)
    found = [study_data(path) for path in studies]
    for study in found:
        study["error"] = model_error(study)
        study["failures"] = dict(Counter(trial["status"] for trial in study["trials"] if trial["value"] is None))
    records = recorded_families(results, tp)
    rows_known = [row for record in records for row in record["rows"]]
    cards = [card] if card.name == TARGET else [card, gpu_card(TARGET)]
    layers = [layer_data(K3, tp, rows, kind, one, found, rows_known) for one in cards]
    return {
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": package_versions()["k3lab"],
        "commit": source_commit(),
        "model": K3.name,
        "families": with_studies(family_rows(results), winner_rows(found)),
        "studies": found,
        "winners": winner_rows(found),
        "bundles": [describe(Bundle.load(path, accept_predicted=True)) for path in bundles],
        "records": records,
        "roofline": roofline(known_points(records, found), card.name),
        "layer": layers[0],
        "layers": layers,
        "drawn": drawn_layer(trace, budget) if trace else "",
        "budget_us": budget_us(budget, kind, gpu, tp),
        "verdict": verdict,
    }


def page(data: dict[str, Any]) -> str:
    """The HTML text; plotly is included once."""
    import jinja2
    from plotly.offline import get_plotlyjs

    from .figures import config_text, figure_html, layer_figure, study_figure
    from .lab_figures import importance_figure, roofline_figure
    from .table_data import rows_figure

    loader = jinja2.FileSystemLoader(TEMPLATES)
    templates = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True)
    templates.filters["config"] = config_text
    trusted = jinja2.utils.markupsafe.Markup

    def drawn(figure: Any) -> Any:
        return trusted(figure_html(figure))

    studies = [
        {**study, "figure": drawn(study_figure(study)),
         "decided": drawn(importance_figure("what decided the time", study["importance"])) if study["importance"] else ""}
        for study in data["studies"]
    ]  # fmt: skip
    records = [
        {**record, "figures": [
            drawn(rows_figure(f"{record['family']}<br>{one['shape']} on {one['gpu']}: {one['rows'][0]['evidence']}", one["rows"]))
            for one in record["drawn"]
        ]}
        for record in data["records"]
    ]  # fmt: skip
    budgets = [data["budget_us"], *(None for _ in data["layers"][1:])]
    layers = [drawn(layer_figure(layer, budget)) for layer, budget in zip(data["layers"], budgets, strict=True)]
    told = dict.fromkeys(point["evidence"] for point in data["roofline"]["points"])
    words = ", ".join(sorted(told)) or "no times yet"
    roofs = roofline_figure(f"times on record and of the studies: {words}", **data["roofline"])
    template = templates.get_template("report.html.j2")
    values = {
        **data, "studies": studies, "records": records, "layer_figures": layers, "roofline_figure": drawn(roofs),
        "drawn": trusted(data["drawn"]),
    }  # fmt: skip
    return template.render(data=values, plotlyjs=trusted(get_plotlyjs()))


def write_report(data: dict[str, Any], folder: Path) -> Path:
    """Write ``index.html`` into the folder, whole or not at all.

    Raises:
        InputError: the folder cannot be written.
    """
    text = page(data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "index.html", text)
    except OSError as error:
        raise InputError(f"cannot write the report to {folder}: {error.strerror}; name another --out folder") from error
    return folder / "index.html"


def render(console: Console, data: dict[str, Any]) -> None:
    """Say where it is and what it holds."""
    console.print(f"report: {data['report']}", soft_wrap=True)
    console.print(
        f"studies: {len(data['studies'])}, bundles: {len(data['bundles'])}, trace verdict: {data['verdict_shown'] or 'no trace'}"
    )


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("report")
    def report(
        out: Annotated[Path, typer.Option(help="Folder that gets index.html.")] = Path("out/report"),
        study: Annotated[
            list[Path] | None, typer.Option(help="Study file or folder of them; default: studies/.")
        ] = None,
        bundle: Annotated[list[Path] | None, typer.Option(help="Folder that `k3lab export` wrote.")] = None,
        trace: Annotated[Path | None, typer.Option(help="A trace to judge against the budget.")] = None,
        budget: Annotated[str, typer.Option(help="Budget by name, or its JSON file.")] = "gb300-tp16",
        results: Annotated[Path, typer.Option(help="Folder of recorded results.")] = Path("results"),
        tp: Annotated[int, typer.Option(help="Tensor-parallel size of the layer shown.")] = 16,
        rows: Annotated[int, typer.Option(help="Rows of the layer shown.")] = 8,
        kind: Annotated[str, typer.Option(help="Kind of the layer shown: kda or mla.")] = "kda",
        gpu: Annotated[str, typer.Option(help=f"GPU of the layer shown: {GPU_NAMES}.")] = "GB300",
        as_json: Json = False,
    ) -> None:
        """Write one HTML page: families, times against floors, roofline, studies, winners, the layer and its budget."""
        data = collect(
            studies=find_studies(study), bundles=bundle or [], trace=trace, budget=budget, results=results,
            tp=tp, rows=rows, kind=kind, gpu=gpu,
        )  # fmt: skip
        written = write_report(data, out)
        summary = {
            "report": str(written),
            "studies": [item["path"] for item in data["studies"]],
            "bundles": [item["path"] for item in data["bundles"]],
            "verdict": data["verdict"]["status"] if data["verdict"] else None,
            "verdict_shown": data["verdict"]["word"] if data["verdict"] else None,
        }
        emit(summary, as_json, render)
