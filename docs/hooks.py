"""What of the site is made from the code and the results when it is built (hooks of MkDocs).

A line ``<!-- generated: NAME -->`` of a page becomes the section of that name. Links to files of the repository beyond the
pages become their paths, which must be there.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |")
    return "\n".join(lines)


def engines() -> str:
    """Every family with its engines, architectures and evidence."""
    from k3lab.cli.kernels import family_rows
    from k3lab.kernels.registry import FAMILIES

    rows = []
    for row in family_rows(ROOT / "results"):
        if row["family"] not in FAMILIES:
            continue
        known = ", ".join(dict.fromkeys(f"{entry['evidence']}: {entry['gpu']}" for entry in row["evidence"])) or "none"
        for engine in row["engines"] or [None]:
            name = f"`{engine['name']}`{' (default)' if engine['default'] else ''}" if engine else "twin only"
            archs = ", ".join(f"`{arch}`" for arch in engine["archs"]) if engine else ""
            rows.append((f"`{row['family']}`", row["title"], name, engine["compiler"] if engine else "", archs, known))
    return table(("family", "what it computes", "engine", "compiler", "architectures", "evidence of the family"), rows)


def policy() -> str:
    """Constants of the timing policy."""
    from k3lab.tuning.policy import FULL, QUICK

    fields = [field.name for field in dataclasses.fields(FULL)]
    return table(
        ("constant", "full", "in a search"),
        [(f"`{name}`", getattr(FULL, name), getattr(QUICK, name)) for name in fields],
    )


def terms() -> str:
    """Terms of the cost model."""
    from k3lab.tuning.cost_model import TERM_MEANINGS

    return table(("term", "what it is"), [(f"`{name}`", text) for name, text in TERM_MEANINGS.items()])


def error() -> str:
    """The validations on record."""
    from k3lab.tuning.model_error import validations

    rows = []
    for key, one in validations().items():
        name = "an engine never calibrated, by the constants of the others" if key == "*" else f"`{key}`"
        name += ", shapes in turn" if one.get("way") else ""
        for label, what in (
            (name, one),
            ("bytes over bandwidth alone", one.get("bytes_alone")),
            ("of these, fair samples of a space", one.get("fair_samples")),
        ):
            if what:
                lost = "-" if what["regret"] is None else f"{what['regret']:.1%} ({what['worst_regret']:.0%})"
                rows.append(
                    (
                        label,
                        what["shapes"],
                        what["configs"],
                        f"{what['median_error']:.1%}",
                        "-" if what["spearman"] is None else f"{what['spearman']:.2f}",
                        f"{what['pooled_spearman']:.2f}",
                        lost,
                    )
                )
    head = (
        "family, engine, GPU",
        "shapes",
        "configs",
        "median error",
        "rank correlation (mean of shapes)",
        "of all configs",
        "its pick is slower than the best by: median (worst)",
    )
    return table(head, rows)


def constants() -> str:
    """The fitted constants, engine by engine."""
    from k3lab.tuning.cost_model import FITTED, NEVER_FITTED, fitted

    found = fitted()
    rows = [
        (f"`{name}`", *(f"{getattr(one, name):.3g}" for one in found.values())) for name in (*FITTED, *NEVER_FITTED)
    ]
    return table(("constant", *("all engines together" if name == "*" else f"`{name}`" for name in found)), rows)


def replay() -> str:
    """How samplers did on the recorded spaces."""
    import json

    data = json.loads((ROOT / "results" / "replay.json").read_text())
    rows = [
        (f"`{row['space']}`", row["configs"], row["sampler"], f"{row['evaluations']:g} ({row['most_evaluations']})", f"{row['share']:.1%}", f"{row['regret']:.1%}")
        for row in data["rows"]
    ]  # fmt: skip
    head = (
        "recorded space",
        "configs",
        "sampler",
        f"evaluations to within {data['within']:.0%} of the best: median (most)",
        "of the space",
        f"regret after {data['bar_share']:.0%}",
    )
    return table(head, rows)


def changed() -> str:
    """Winners that the newest cost model changed."""
    import json

    parts = []
    for path in sorted((ROOT / "results").glob("*/*_changed.json")):
        data = json.loads(path.read_text())
        rows = [
            (f"`{one['problem']}`", f"`{one['was']}`", f"{one['was_us']:.2f} us", f"`{one['now']}`", f"{one['now_us']:.2f} us")
            for one in data["other_engine"]
        ]  # fmt: skip
        head = f"`{data['family']}` on {data['gpu']}: of {data['compared']} problems {len(rows)} have another engine, {len(data['other_config'])} another config of theirs."
        parts.append(f"{head}\n\n{table(('problem', 'was', 'by the model then', 'is', 'by the model now'), rows)}")
    return "\n\n".join(parts)


def cards() -> str:
    """The target's card."""
    from k3lab.kernels.gpu_cards import GB300

    return table(
        ("number", "value", "source"),
        [(f"`{name}`", getattr(GB300, name), source) for name, source in GB300.sources.items()],
    )


def results() -> str:
    """Each table on record, a line a shape; and the layer that they add up to."""
    from k3lab.cli.table_data import by_shape, recorded_rows

    rows = []
    for (family, gpu, word), own in _grouped(recorded_rows(ROOT / "results")).items():
        for shape, here in by_shape(own).items():
            ratios = [row["us"] / row["floor_us"] for row in here]
            beside = [
                row["alternatives"]["PyTorch"] / row["us"] for row in here if "PyTorch" in (row["alternatives"] or {})
            ]
            best, worst = min(row["us"] for row in here), max(row["us"] for row in here)
            rows.append((
                f"`{family}`", gpu, word, shape, f"{here[0]['rows']} to {here[-1]['rows']} ({len(here)})", f"{best:.2f} to {worst:.2f} us",
                f"{statistics.geometric_mean(ratios):.2f}", f"{statistics.geometric_mean(beside):.2f}" if beside else "not timed",
                f"`results/{here[0]['file']}`",
            ))  # fmt: skip
    head = (
        "family",
        "GPU",
        "evidence",
        "shape",
        "rows",
        "time",
        "times the floor (mean)",
        "PyTorch over it (mean)",
        "file",
    )
    return table(head, rows)


def decode_layers() -> str:
    """Layers of the decode path on a rank of its own."""
    from k3lab.cli.decode_results import layers

    return layers(ROOT / "results")


def decode_steps() -> str:
    """Its whole steps."""
    from k3lab.cli.decode_results import steps

    return steps(ROOT / "results")


def decode_presets() -> str:
    """Its benches, preset by preset."""
    from k3lab.cli.decode_results import presets

    return presets(ROOT / "results")


def decode_limits() -> str:
    """What its results do not say."""
    from k3lab.cli.decode_results import limits

    return limits(ROOT / "results")


def _grouped(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["family"], row["gpu"], row["evidence"]), []).append(row)
    return found


def commands() -> str:
    """Every command: its help and its options."""
    import typer
    from k3lab.cli.main import build_app

    parts: list[str] = []

    def walk(command: Any, path: tuple[str, ...]) -> None:
        children = getattr(command, "commands", None)
        if children is not None:
            for name, child in children.items():
                walk(child, (*path, name))
            return
        rows = []
        for parameter in command.params:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            given = (
                (parameter.metavar or str(parameter.name).upper()) if parameter.param_type_name == "argument" else names
            )
            default = (
                ""
                if parameter.default in (None, False, ()) or callable(parameter.default)
                else f"`{parameter.default}`"
            )
            rows.append((given, getattr(parameter, "help", "") or "", "needed" if parameter.required else default))
        parts.append(
            f"## k3lab {' '.join(path)}\n\n{command.help}\n\n{table(('option', 'what it does', 'default'), rows)}"
        )

    walk(typer.main.get_command(build_app()), ())
    return "\n\n".join(parts)


SECTIONS: dict[str, Callable[[], str]] = {
    "engines": engines, "policy": policy, "terms": terms, "error": error, "constants": constants, "replay": replay, "changed": changed, "cards": cards, "results": results, "commands": commands,
    "decode_layers": decode_layers, "decode_steps": decode_steps, "decode_presets": decode_presets, "decode_limits": decode_limits,
}  # fmt: skip


def filled(text: str) -> str:
    """The page with its generated sections."""
    return re.sub(r"^<!-- generated: (\w+) -->$", lambda found: SECTIONS[found[1]](), text, flags=re.MULTILINE)


def without_repository_links(text: str, page: str) -> str:
    """Links to files outside of the pages as their paths.

    Raises:
        ValueError: such a file is not there.
    """

    def path_of(found: re.Match[str]) -> str:
        words, target = found[1], found[2].split("#")[0]
        if not (ROOT / "docs" / target).resolve().exists():
            raise ValueError(f"{page} links to {target}, which is not there")
        return f"{words} (`{target.removeprefix('../')}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)", path_of, text)


def on_config(config: Any) -> Any:
    """Called by MkDocs first: pages that the navigation does not name are put where they belong."""
    named = str(config["nav"])
    sections = {name: pages for entry in config["nav"] if isinstance(entry, dict) for name, pages in entry.items()}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in named:
            sections["Kernels" if (ROOT / "kernels" / path.stem).is_dir() else "How it works"].append(path.name)
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return without_repository_links(filled(markdown), page.file.src_uri)
