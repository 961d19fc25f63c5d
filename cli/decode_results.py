"""What results/ knows of the whole decode path, as Markdown: layers and steps of a rank, presets apart, and what nothing can be said of.

``<gpu>/decode_bars*.json`` come from ``k3lab decode bars --out``, ``<gpu>/decode_<name>/<backend>.json`` from
``k3lab decode bench --out``. Where there is none the tables say so, with the command that would make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels import InputError
from .decode_bench_view import FEW, any_marked, figure, samples_of, times_better
from .recorded import load_result

Data = dict[str, Any]
NONE = "no result yet"
BARS = "k3lab decode bars --rank 0 --of 16 --bundle out/bundle --out results/h200/decode_bars.json"
HEAD = (
    "rank", "rows", "context", "what", "backend", "time", "launches", "of the byte floor", "times as fast as auto",
)  # fmt: skip
SHOWN = ("headline", "plain-1")
"""Presets that have a table, filled or not: with drafts and without."""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows)])


def _loaded(path: Path) -> Data | None:
    """A measured result.

    Raises:
        InputError: no object, or one without an evidence word.
    """
    data = load_result(path)
    if data is None or data.get("evidence") != "measured":
        raise InputError(f"{path} is no measured result: it is no JSON object, or its evidence is not 'measured'")
    return data


def bars(results: Path) -> list[Data]:
    """Measured bars, in the order of their files."""
    return [data for path in sorted(results.glob("*/decode_bars*.json")) if (data := _loaded(path))]


@dataclass(frozen=True)
class Bench:
    """Reports of one run of ``decode bench``, by backend."""

    folder: str
    reports: dict[str, Data]

    @property
    def point(self) -> Data | None:
        """Its preset, and what of it was changed."""
        found: Data | None = next(iter(self.reports.values()))["preset"]
        return found

    @property
    def preset(self) -> str | None:
        """Name of its preset."""
        return self.point["name"] if self.point else None

    @property
    def conditions(self) -> Data:
        """Of all its reports."""
        found: Data = next(iter(self.reports.values()))["conditions"]
        return found


def benches(results: Path) -> list[Bench]:
    """Measured benches, in the order of their folders."""
    found: dict[Path, dict[str, Data]] = {}
    for path in sorted(results.glob("*/decode_*/*.json")):
        if data := _loaded(path):
            found.setdefault(path.parent, {})[path.stem] = data
    return [Bench(folder.relative_to(results).as_posix(), reports) for folder, reports in found.items()]


def layers(results: Path) -> str:
    """Layers by kind: time, launches, share of the byte floor, both backends."""
    rows: list[Sequence[Any]] = []
    for data in bars(results):
        for one in data["rows"]:
            for name, own in one["backends"].items():
                for kind, layer in own["layers"].items():
                    launches, share = layer["launches"], layer["share_of_floor"]
                    ratio = one["ratios"].get(f"{kind} layer") if name != "auto" else None
                    rows.append((
                        _where(data), one["rows"], one["context"], f"{kind} MoE layer", f"`{name}`", f"{layer['us']:.1f} us",
                        "not told" if launches is None else f"{launches:.2f}", "not told" if share is None else f"{share:.0%}",
                        f"{ratio:.2f}" if ratio else "",
                    ))  # fmt: skip
    if not rows:
        rows = [_nothing(count, kind, 9) for count in (1, 8) for kind in ("kda MoE layer", "mla MoE layer")]
    return _with_notes(table(HEAD, rows), bars(results))


def steps(results: Path) -> str:
    """Whole steps: time, launches, share of the byte floor, both backends."""
    rows: list[Sequence[Any]] = []
    for data in bars(results):
        for one in data["rows"]:
            for name, own in one["backends"].items():
                ratio = one["ratios"].get("step") if name != "auto" else None
                rows.append((
                    _where(data), one["rows"], one["context"], "whole step", f"`{name}`", f"{own['step_us']:.0f} us",
                    own["step_launches"] or "not told", f"{own['step_floor_us'] / own['step_us']:.0%}", f"{ratio:.2f}" if ratio else "",
                ))  # fmt: skip
    if not rows:
        rows = [_nothing(count, "whole step", 9) for count in (1, 8)]
    return table(HEAD, rows)


def _where(data: Data) -> str:
    return f"{data['gpu']}, rank {data['rank']} of {data['tp']}, {data['model']}"


def _nothing(rows: int, what: str, columns: int) -> list[str]:
    return ["H200, rank 0 of 16", str(rows), "", what, "", NONE, *[""] * (columns - 6)]


def _with_notes(text: str, found: Sequence[Data]) -> str:
    if not found:
        return f"{text}\n\n{NONE[0].upper()}{NONE[1:]} of a rank's layers and steps: `{BARS}` on that GPU makes one."
    notes = dict.fromkeys(note for data in found for note in data["notes"])
    faults = [f"{_where(data)}: {fault}" for data in found for fault in data["faults"]]
    missed = "".join(f"\n- missed: {line}" for line in faults)
    return f"{text}\n\n" + "\n".join(f"- {note}" for note in notes) + missed


def presets(results: Path) -> str:
    """A section a preset: what was measured, its conditions, and published figures beside them, compared with nothing."""
    from ..decode.bench.presets import PRESETS

    found = benches(results)
    names = dict.fromkeys((*SHOWN, *(one.preset for one in found if one.preset)))
    parts = []
    for name in names:
        preset = PRESETS[name]
        own = [one for one in found if one.preset == name]
        kind = f"speculative, {preset.drafts} drafts" if preset.drafts else "non-speculative"
        lines = [f"### {name}: {kind}", ""]
        for one in own:
            lines += [_bench_table(one), ""]
        if not own:
            command = f"k3lab decode bench --preset {name} --rank 0 --of 16 --bundle out/bundle --out results/h200/decode_{name}"
            lines += [
                table(
                    ("measure", "`auto`", "`latency_specialized`"), [("decode throughput without prefill", NONE, NONE)]
                ),
                "",
            ]
            lines += [f"{NONE[0].upper()}{NONE[1:]}: `{command}` on an H200 makes one, of one rank alone.", ""]
        lines += [f"- {line.line}; compared with nothing" for line in preset.published]
        parts.append("\n".join(lines))
    parts += [f"### {one.folder}: no preset\n\n{_bench_table(one)}" for one in found if not one.preset]
    return "\n\n".join(parts)


def _bench_table(one: Bench) -> str:
    from ..decode.bench.reports import between

    told = between(one.reports)
    ratios: Mapping[str, Data] = told["ratios"] if told and told["comparable"] else {}
    measures = [report["measures"] for report in one.reports.values()]
    units = {measure: own["unit"] for every in measures for measure, own in every.items()}
    rows = []
    for measure, unit in units.items():
        found = [every.get(measure) for every in measures]
        cells = ["not measured" if own is None else f"{figure(own)} {unit}" for own in found]
        rows.append((measure, *cells, times_better(ratios.get(measure), 2), samples_of(found)))
    head = ("measure", *(f"`{name}`" for name in one.reports), "times better", "samples")
    where = ", ".join(f"{name} {value}" for name, value in one.conditions.items())
    missing = {what: why for report in one.reports.values() for what, why in report["absent"].items()}
    lines = [table(head, rows), "", f"Measured (`results/{one.folder}`): {where}."]
    lines += ["", *([f"- \\{FEW}"] if any_marked(measures) else [])]
    if one.point and one.point["changed"]:
        lines.append(f"- changed from the preset: {', '.join(one.point['changed'])}")
    lines += [f"- not measured: {what}: {why}" for what, why in missing.items()]
    return "\n".join(lines)


def stock_launches() -> tuple[int, int]:
    """Fewest and most of a stock engine's KDA MoE layer, with the reductions of split-K GEMMs."""
    from ..decode.stock import SPLIT_K_REDUCES, stock_layer

    counts = [len(stock_layer("kda", dense=False, rows=rows)) for rows in (1, 64)]
    return min(counts), max(counts) + SPLIT_K_REDUCES


def stand_in(measured: Sequence[Data], found: Sequence[Bench]) -> float | None:
    """The most launches of a KDA layer under ``auto``, where they are more than a stock engine's."""
    layers = [row["backends"].get("auto", {}).get("layers", {}).get("kda") for data in measured for row in data["rows"]]
    told = [layer["launches"] for layer in layers if layer]
    for one in found:
        own = one.reports.get("auto", {}).get("measures", {}).get("kda MoE layer, launches")
        told += [own["value"]] if own else []
    most = max((launches for launches in told if launches), default=0)
    return most if most > stock_launches()[1] else None


def limits(results: Path) -> str:
    """What these results do not say, and why: it follows from what there is."""
    measured, found = bars(results), benches(results)
    gpus = {data["gpu"] for data in measured} | {one.conditions["gpu"].removeprefix("NVIDIA ") for one in found}
    groups = [one for one in found if one.conditions["gpus"] > 1]
    synthetic = [one for one in found if "SYNTHETIC" in one.conditions["acceptance"]]
    standard = [one for one in found if one.conditions["drafts"] and one not in synthetic]
    random = not found or all(one.conditions["weights"].startswith("random") for one in found)
    traffic = [one for one in found if "turns" in next(iter(one.reports.values()))["seen"]]
    rows: list[tuple[str, str]] = []
    if not measured and not found:
        rows.append(("anything of the whole path on a GPU", "no bars and no bench are on record"))
    if not any("GB300" in gpu for gpu in gpus):
        rows.append(
            (
                "anything on a GB300",
                "nothing ran on one; the published figures are of 16, and ours stand beside no ratio to them",
            )
        )
    if launches := stand_in(measured, found):
        low, high = stock_launches()
        why = (
            f"`auto` stands in for one by PyTorch operators: up to {launches:.0f} launches a KDA layer, where a stock engine's"
            f" sequence has {low} to {high}. A ratio to it is none to a stock engine"
        )
        rows.append(("the path against a stock engine", why))
    if not groups:
        rows.append(
            (
                "a group's throughput, its waits and links",
                "no run of a group is on record: a rank alone over loopback has no link cost",
            )
        )
    if not standard:
        why = (
            "synthetic acceptance fixes what one's own traffic would measure"
            if synthetic
            else "no run with drafts is on record"
        )
        rows.append(("acceptance, and the rate that users of drafts would see", why))
    if random:
        rows.append(("quality, and routing of real text", "weights are random and routing is uniform: `k3lab decode eval` takes a checkpoint and problems" if found or measured else "no run with a checkpoint is on record"))  # fmt: skip
    if not traffic:
        rows.append(("agents' traffic: pauses, turns, contexts that come back", "no replay of sessions is on record"))
    rows.append(("with drafts against without", "they share no ratio and no per-user claim, whatever is on record"))
    return table(("nothing can be concluded of", "because"), rows)
