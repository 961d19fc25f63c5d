"""A kernel's page as data: the table of results it tells, the bars it is held to, and each section's text.

The table is ``results/<gpu>/<family>_table.json`` (:mod:`k3lab.tuning.table_rows`); the bars are
``kernels/<family>/bars.json``: most microseconds of the problems that have the named fields and range of rows. ``shape`` is
the field that tells shapes apart where ``tp`` and ``kind`` are not to be told; ``mean``, the least over the alternative by
``shape``, and ``aims`` are optional.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels.errors import InputError
from ..tuning.alternatives import PYTORCH
from ..tuning.stale import word_of
from ..tuning.table_rows import FORMAT, SCHEMA

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

Row = Mapping[str, Any]


def load_table(path: Path) -> dict[str, Any]:
    """A table, each row's ``problem`` whole.

    Raises:
        InputError: the file is not there, or is no table.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"no table at {path} ({error.strerror}); `k3lab tune-table --results {path}` makes it") from error  # fmt: skip
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or (data.get("format"), data.get("schema")) != (FORMAT, SCHEMA):
        raise InputError(f"{path} is no table of `k3lab tune-table`, version {SCHEMA}")
    return {**data, "rows": [{**row, "problem": {**data["problem"], **row["problem"]}} for row in data["rows"]]}


def load_bars(family: str) -> dict[str, Any]:
    """The bars of a family, by shape and rows.

    Raises:
        InputError: it has none.
    """
    path = KERNELS / family / "bars.json"
    if not path.is_file():
        raise InputError(f"family {family} has no bars: kernels/{family}/bars.json is not there")
    return json.loads(path.read_text())


def fields(bars: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem that a bar or an aim names, with those that all bars share (``only``)."""
    return {
        **bars.get("only", {}),
        **{name: value for name, value in entry.items() if name not in ("rows", "us", "share")},
    }


def has(row: Row, named: Mapping[str, Any]) -> bool:
    """Whether a row's problem has these values."""
    return all(row["problem"][name] == value for name, value in named.items())


def at(table: Mapping[str, Any], named: Mapping[str, Any], rows: tuple[int, int]) -> list[Row]:
    """Rows of the table with these values and with token rows in the range, both ends included, ascending."""
    found = [row for row in table["rows"] if has(row, named) and rows[0] <= row["problem"]["rows"] <= rows[1]]
    return sorted(found, key=lambda row: row["problem"]["rows"])


def label(problem: Mapping[str, Any]) -> str:
    """TP size and kind in words: ``TP16, KDA``, or ``TP16`` where a family has no kinds."""
    kind = problem.get("kind", "")
    return f"TP{problem['tp']}{', ' if kind else ''}{kind.upper() if kind in ('kda', 'mla') else kind}"


def lettered(bars: Mapping[str, Any]) -> bool:
    """Whether a field beside ``tp`` and ``kind`` tells shapes apart, by its ``letter``."""
    return bars.get("shape", "tp") != "tp"


def _place(bars: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    return str(entry[bars["shape"]]) if lettered(bars) else label(fields(bars, entry))


def _head(bars: Mapping[str, Any]) -> str:
    return bars["letter"] if lettered(bars) else "problem"


def bar_of(bars: Mapping[str, Any], row: Row) -> float | None:
    """Most microseconds of a row's problem, by every field that a bar names; None where there is no bar."""
    for bar in bars["bars"]:
        first, last = bar["rows"]
        if first <= row["problem"]["rows"] <= last and has(row, fields(bars, bar)):
            return float(bar["us"])
    return None


def beside(row: Row) -> float | None:
    """Microseconds of what a user would run instead, timed in the same contest; None where it was not."""
    return row["alternatives"].get(PYTORCH)


def ratio(row: Row) -> float | None:
    """How many times quicker than the alternative."""
    other = beside(row)
    return None if other is None else other / row["us"]


def counted(rows: int) -> str:
    """So many rows, in words."""
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def record_section(table: Mapping[str, Any], link: str) -> list[str]:
    """What the figures rest on."""
    where, policy = table["environment"], table["policy"] or {}
    gpu = where.get("gpu") or {}
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    device = f" on {gpu['name']}, driver {gpu['driver']}" if gpu else f" for {table['gpu']}"
    lines = [
        f"{word_of(table).capitalize()}{device}; {packages}; commit {where['commit']}: [{len(table['rows'])} problems]({link})."
    ]
    if policy:
        lines.append(
            f"Isolated: a CUDA graph of at least {policy['calls']} calls without programmatic edges, weights cold (copies over "
            f"{policy['rotate_bytes'] / 1e6:.0f} MB in turn), all engines and the alternative in turn in one process."
        )  # fmt: skip
        warm = sum(any("cold figure" in note for note in row.get("notes", ())) for row in table["rows"])
        if warm:
            lines.append(f"Memory held fewer copies for {warm} of them: their cold figures may be hot ones (the record's notes).")  # fmt: skip
    if tried := table.get("trials"):
        lines.append(
            f"Searched with {tried['anchors']} trials a study of the row counts tuned first, {tried['others']} of the others."
        )
    return lines + [f"Missing: {line}" for line in table["missing"]]


def bars_section(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[str]:
    """Each bar, its slowest row count, and whether it is held."""
    body = []
    for bar in bars["bars"]:
        first, last = bar["rows"]
        found = at(table, fields(bars, bar), (first, last))
        if not found:
            body.append([_place(bars, bar), f"{first}-{last}", f"{bar['us']:.1f}", "-", "not measured"])
            continue
        slowest = max(found, key=lambda row: row["us"])
        over = slowest["us"] - bar["us"]
        held = "held" if len(found) > 1 or first == last else "held at the only row count measured"
        body.append([
            _place(bars, bar), f"{first}-{last}", f"{bar['us']:.1f}",
            f"{slowest['us']:.2f} at {counted(slowest['problem']['rows'])}", held if over <= 0 else f"**missed** by {over:.3f} us",
        ])  # fmt: skip
    return _lines((_head(bars), "rows", "at most, us", "slowest, us", ""), body)


def mean_section(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[str]:
    """The geometric mean over the alternative, and the shape that gains least."""
    if "mean" not in bars:
        return [f"No mean over {bars['beside']} is asked for."]
    asked, name = bars["mean"], bars["beside"]
    wanted = [(value, rows) for value in asked[bars["shape"]] for rows in asked["rows"]]
    found = [
        (*place, value)
        for place in wanted
        for row in at(table, fields(bars, {bars["shape"]: place[0]}), (place[1],) * 2)
        if (value := ratio(row))
    ]
    if len(found) < len(wanted):
        return [f"{len(found)} of {len(wanted)} shapes are measured beside {name}: no mean yet."]
    mean = math.exp(sum(math.log(value) for _, _, value in found) / len(found))
    shape, rows, least = min(found, key=lambda one: one[2])
    shapes = (
        f"{bars['letter']} = {', '.join(map(str, asked[bars['shape']]))} and {', '.join(map(str, asked['rows']))} rows"
    )
    return [
        f"Geometric mean over {name} across {shapes}: **{mean:.3f}x**, bar {asked['ratio']}x: {_held(mean >= asked['ratio'])}.",
        f"Least gain: {least:.3f}x at {bars['letter']} = {shape}, {counted(rows)}; none below {asked['least']}x: {_held(least >= asked['least'])}.",
    ]


def _held(yes: bool) -> str:
    return "held" if yes else "**missed**"


def aims_section(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[str]:
    """What lies beyond the bars: shares of the read ceiling, microseconds hidden in a chain, and times of single problems."""
    aims = bars.get("aims", {})
    parts = []
    if aims.get("share_of_ceiling"):
        parts.append(_shares(table, bars, aims))
    elif "hidden_us" in aims:
        hidden = [row["hidden_us"] for row in table["rows"] if bar_of(bars, row) and row["hidden_us"] is not None]
        reached = sum(us >= aims["hidden_us"] for us in hidden)
        spread = f": {min(hidden):.2f} to {max(hidden):.2f} us" if hidden else ""
        parts.append([f"{reached} of {len(hidden)} problems with a bar, timed in a chain, hide {aims['hidden_us']:g} us there{spread}."])  # fmt: skip
    if "us" in aims:
        parts.append(_times(table, bars, aims["us"]))
    others = [f"{name} {value}" for name, value in aims.items() if name not in ("share_of_ceiling", "hidden_us", "us")]
    if others:
        parts.append([f"Aims that this table does not tell: {', '.join(others)}."])
    return [line for part in parts for line in ("", *part)][1:] or ["No aim beyond the bars is set."]


def _times(table: Mapping[str, Any], bars: Mapping[str, Any], aims: Sequence[Mapping[str, Any]]) -> list[str]:
    body = []
    for aim in aims:
        us = next((row["us"] for row in at(table, fields(bars, aim), (aim["rows"],) * 2)), None)
        word = "not measured" if us is None else "reached" if us <= aim["us"] else f"{us - aim['us']:.3f} us above"
        body.append([_place(bars, aim), str(aim["rows"]), f"{aim['us']:.1f}", _number(us), word])
    return _lines((_head(bars), "rows", "aim, us", "us", ""), body)


def _shares(table: Mapping[str, Any], bars: Mapping[str, Any], aims: Mapping[str, Any]) -> list[str]:
    body = []
    for aim in aims["share_of_ceiling"]:
        found = at(table, fields(bars, aim), (1, 64))
        if not found:
            continue
        shares = [(row["floor_us"] / row["us"], row["problem"]["rows"]) for row in found]
        hidden = [(row["hidden_us"], row["problem"]["rows"]) for row in found if row["hidden_us"] is not None]
        body.append([
            _place(bars, aim), f"{aim['share']:.0%}", f"{sum(share >= aim['share'] for share, _ in shares)} of {len(shares)}",
            *(f"{share:.1%} at {counted(rows)}" for share, rows in (min(shares), max(shares))),
            f"{sum(us >= aims['hidden_us'] for us, _ in hidden)} of {len(hidden)}",
            f"{min(hidden)[0]:.2f} to {max(hidden)[0]:.2f}" if hidden else "-",
        ])  # fmt: skip
    head = (_head(bars), "share of the read ceiling", "row counts that reach it", "least", "most",
            f"row counts that hide {aims['hidden_us']:g} us in a chain", "hidden, us")  # fmt: skip
    return _lines(head, body)


def tables_section(table: Mapping[str, Any], bars: Mapping[str, Any]) -> list[str]:
    """One table a shape: the winner of each row count beside its floor and the alternative."""
    shapes: dict[tuple[int, str], list[Row]] = {}
    for row in table["rows"]:
        problem = row["problem"]
        shapes.setdefault((problem["tp"], problem.get("kind", "")), []).append(row)
    head = ("rows", "engine", "us", "floor, us", "share of ceiling", f"{bars['beside']}, us", "ratio", "in a chain, us", "hidden, us")  # fmt: skip
    lines: list[str] = []
    for _, rows in sorted(shapes.items()):
        body = [
            [
                str(row["problem"]["rows"]), f"`{row['engine']}`", f"{row['us']:.2f}", f"{row['floor_us']:.2f}", f"{row['floor_us'] / row['us']:.1%}",
                _number(beside(row)), _number(ratio(row), ".2f"), _number(row["chain_us"]), _number(row["hidden_us"]),
            ]
            for row in sorted(rows, key=lambda one: one["problem"]["rows"])
        ]  # fmt: skip
        problem = rows[0]["problem"]
        value = f": {bars['letter']} = {problem[bars['shape']]}" if lettered(bars) else ""
        lines += [f"### {label(problem)}{value}", "", *_lines(head, body), ""]
    return lines[:-1]


def invariant_section(table: Mapping[str, Any], held: Mapping[str, Any] | None, family: str) -> list[str]:
    """What one order of the sum for all rows and TP sizes costs: the winner with it beside the winner without."""
    if held is None:
        return [f"Not measured: `k3lab tune-table {family} --fix k_order=invariant` with a folder of results does."]
    free = {json.dumps(row["problem"], sort_keys=True): row for row in table["rows"]}
    body = []
    for row in held["rows"]:
        problem, other = row["problem"], free.get(json.dumps(row["problem"], sort_keys=True))
        body.append([
            f"{label(problem)}, {counted(problem['rows'])}", f"`{row['engine']}`", f"{row['us']:.2f}",
            f"`{other['engine']}` {other['us']:.2f}" if other else "-", f"{row['us'] / other['us'] - 1:+.1%}" if other else "-",
        ])  # fmt: skip
    return _lines(("problem", "engine", "us", "winner of any order, us", "cost"), body)


def sections(
    table: Mapping[str, Any], bars: Mapping[str, Any], link: str, held: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Name to text of every section that the page takes from the data.

    Args:
        table: of the family.
        bars: its bars.
        link: from the page to the table.
        held: the table with one order of the sum, where there is one.
    """
    found = {
        "record": record_section(table, link),
        "bars": bars_section(table, bars),
        "mean": mean_section(table, bars),
        "aims": aims_section(table, bars),
        "invariant": invariant_section(table, held, str(table["family"])),
        "tables": tables_section(table, bars),
    }
    return {name: "\n".join(lines) for name, lines in found.items()}
