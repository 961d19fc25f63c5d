"""How ``k3lab decode bench`` prints: notes, a line a measure with both backends, what is absent, published figures beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .words import counted

if TYPE_CHECKING:
    from rich.console import Console

Data = dict[str, Any]

FEW = "* of too few samples: none lies beyond this percentile (P90 takes 10, a median 2)"


def marked(text: str, covered: bool) -> str:
    """With the mark that :data:`FEW` explains, unless the tail is covered."""
    return text if covered else f"{text}*"


def figure(measure: Data) -> str:
    """Of a report's measure, without its unit."""
    return marked(f"{measure['value']:.4g}", measure.get("tail_covered", True))


def times_better(ratio: Data | None, digits: int = 3) -> str:
    """Of ``decode compare``; empty where there is none. That of a marked figure is marked."""
    times = ratio and ratio["times_better"]
    return marked(f"{times:.{digits}f}", all(ratio["tail_covered"])) if ratio and times else ""


def behind(samples: Iterable[int | None]) -> str:
    """How many samples stand behind a line's percentiles: one number where they are alike; empty of what is no percentile."""
    return ", ".join(dict.fromkeys(str(one) for one in samples if one is not None))


def samples_of(measures: Iterable[Data | None]) -> str:
    """As :func:`behind`, of one measure in several reports."""
    return behind(one.get("samples") for one in measures if one)


def any_marked(measures: Iterable[Mapping[str, Data]]) -> bool:
    """Whether :data:`FEW` must be said under a table of reports' measures."""
    return not all(one.get("tail_covered", True) for own in measures for one in own.values())


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def render_presets(console: Console, data: Data) -> None:
    """A line a preset, and its published figures under it."""
    for one in data["presets"]:
        accepted = f", SYNTHETIC acceptance length {one['acceptance_length']:g}" if one["acceptance_length"] else ""
        drafts = counted(one["drafts"], "draft") if one["drafts"] else "no drafts"
        lengths = f"input {one['prompt']}, output {one['tokens']}" if one["tokens"] > 1 else "sessions of a file"
        _say(console, f"{one['name']}: TP{one['tp']}, batch {one['rows']}, {lengths}, {drafts}{accepted}")
        for line in one["published"]:
            _say(console, f"  {line['line']}")


def render_bench(console: Console, data: Data) -> None:
    """Notes, conditions, measures, what is absent, fallbacks, and the preset's published figures."""
    for line in data["notes"]:
        _say(console, f"note: {line}")
    reports = data["reports"]
    names = list(reports)
    first = reports[names[0]]
    _say(console, "; ".join(f"{name} {value}" for name, value in first["conditions"].items()))
    _table(console, data, names)
    for what, why in first["absent"].items():
        _say(console, f"not measured: {what}: {why}")
    if data["between"] and not data["between"]["comparable"]:
        for one in data["between"]["different"]:
            _say(console, f"no ratio: {one['field']}: {one['why']}")
    for name in names:
        _backend(console, name, reports[name])
    if data["preset"]:
        _published(console, data, first)
    if data["out"]:
        _say(console, f"kept in {data['out']}")


def _table(console: Console, data: Data, names: list[str]) -> None:
    from rich.table import Table

    reports, between = data["reports"], data["between"]
    ratios = between["ratios"] if between and between["comparable"] else None
    table = Table("measure", *names, "unit", *(["times better"] if ratios is not None else []), "samples")
    measures = [reports[name]["measures"] for name in names]
    for measure, unit in {measure: one["unit"] for own in measures for measure, one in own.items()}.items():
        found = [own.get(measure) for own in measures]
        cells = ["-" if one is None else figure(one) for one in found]
        times = [] if ratios is None else [times_better(ratios.get(measure)) or "-"]
        table.add_row(measure, *cells, unit, *times, samples_of(found))
    console.print(table)
    if any_marked(measures):
        _say(console, FEW)


def _backend(console: Console, name: str, report: Data) -> None:
    seen = report["seen"]
    if "turns" in seen:
        share = f"{seen['reused_share']:.0%}" if seen["reused_share"] is not None else "none"
        gone = counted(seen["contexts_given_up"], "context")
        told = f"{counted(seen['turns'], 'turn')}, {share} of the context tokens were put back, {gone} given up"
    else:
        told = f"{counted(seen['requests'], 'request')}, {counted(seen['steps'], 'step')}"
    if report["dspark"] and seen["mean_tokens_a_step"]:
        told += f", {seen['mean_tokens_a_step']:.2f} tokens a step"
    _say(console, f"{name}: {told}, {counted(seen['output_tokens'], 'token')} put out by {report['operators']}")
    for line in (report.get("launches") or {}).get("differences", []):
        _say(console, f"  against the plan: {line}")
    for one in (report["steps"] or {}).get("fallbacks", []):
        _say(console, f"  {counted(one['count'], 'step')} left to auto: {one['reason']}")


def _published(console: Console, data: Data, report: Data) -> None:
    preset, own = data["preset"], report["conditions"]
    if preset["changed"]:
        _say(console, f"changed from preset {preset['name']}: {', '.join(preset['changed'])}")
    if not preset["published"]:
        return
    _say(
        console,
        f"preset {preset['name']}; figures of other hardware stand here for the record and are compared with nothing:",
    )
    hardware = f"{own['gpus']} x {own['gpu']}, TP{own['tp']}, transport {own['transport']}"
    for one in preset["published"]:
        _say(console, f"  {one['line']}")
        for name, ours in data["reports"].items():
            got = ours["measures"].get(one["beside"])
            value = f"{figure(got)} {got['unit']}" if got else "not measured here"
            if got and got.get("samples"):
                value += f" of {counted(got['samples'], 'sample')}"
            _say(console, f"    here ({name}): {one['beside']} {value}; {hardware}")
    _say(
        console,
        f"  here: {own['model']}, weights {own['weights']}; acceptance {own['acceptance']}; workload {own['workload']}",
    )
