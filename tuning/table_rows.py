"""Rows of a table, and its compact form as a result file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.contract import Family, Problem
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GpuCard
from ..kernels.space import Config
from ..kernels.whole_file import write_whole
from .between import Decision, figures

if TYPE_CHECKING:
    from .table import TableResult

FORMAT = "k3lab-table"
SCHEMA = 1
CHAIN = ("chain_us", "plain_us", "hidden_us")
"""Figures of a row beside the isolated one: added to a predecessor with a programmatic edge, without, and their difference."""


@dataclass(frozen=True)
class Row:
    """The winner of one problem."""

    problem: Problem
    engine: str
    config: Config
    us: float
    band: float
    """Relative difference within which another config is as good: measured spread, or the model's error."""
    floor_us: float
    """Bytes over the read ceiling of the contest's process, or over the GPU card's bandwidth where nothing was measured."""
    alternatives: Mapping[str, float]
    """What a user would run instead, in microseconds, timed in the same contest."""
    reason: str
    """Why this engine."""
    config_reason: str
    """Why this config of it."""
    engines: Mapping[str, float]
    """Microseconds of each engine's winner, the fastest first."""
    environment: Mapping[str, Any] | None
    policy: Mapping[str, Any] | None
    chain: Mapping[str, Any] | None = None
    """What the winner adds to a predecessor, and how much of it the programmatic edge hides; None where it was not timed so."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "problem": self.problem.to_json(),
            "engine": self.engine,
            "config": dict(self.config),
            "us": round(self.us, 3),
            "band": round(self.band, 4),
            **{name: round(self.chain[name], 3) if self.chain else None for name in CHAIN},
            "floor_us": round(self.floor_us, 3),
            "alternatives": dict(self.alternatives),
            "engines": {name: round(value, 3) for name, value in self.engines.items()},
            "reason": self.reason,
            "config_reason": self.config_reason,
            **({"notes": list(self.notes)} if self.notes else {}),
        }


def row_of(
    family: Family, problem: Problem, gpu: GpuCard, choice: Mapping[str, Any], decision: Decision, contest: Mapping[str, Any] | None
) -> Row:  # fmt: skip
    """The row of a problem whose engine is decided: ``choice`` is its study's note, ``contest`` None where it was predicted."""
    found = figures(contest, decision.engine, choice["digest"]) if contest else None
    us, band = found or (choice["value_us"], choice["tie_band"])
    floor = contest["floor_us"] if contest else family.traffic(problem).bytes / gpu.read_bandwidth * 1e6
    notes = list(contest.get("notes", ())) if contest else []
    if contest and (why := contest.get("chain", {}).get("failed")):
        notes.append(f"not confirmed in a chain: {why}")
    return Row(
        problem, decision.engine, choice["config"], us, band, floor, dict(contest["alternatives"]) if contest else {},
        decision.reason, choice["reason"], decision.times_us, contest["environment"] if contest else None,
        contest["policy"] if contest else None, decision.chain, tuple(notes),
    )  # fmt: skip


@dataclass(frozen=True)
class Winner:
    """A config that won somewhere: where another search may begin."""

    problem: Problem
    engine: str
    config: Config


def winners_of(path: Path, family: Family) -> tuple[Winner, ...]:
    """The winners that a result file holds.

    Raises:
        InputError: it cannot be read, is no table, or is one of another family.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a table: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("rows"), list):
        raise InputError(f"{path} is no table of `k3lab tune-table`")
    if data.get("schema") != SCHEMA:
        raise InputError(f"{path} has schema {data.get('schema')}, this version reads {SCHEMA}")
    if data.get("family") != family.name:
        raise InputError(f"{path} is a table of {data.get('family')}, not of {family.name}")
    try:
        return tuple(
            Winner(
                family.problem_from_json({**data["problem"], **row["problem"]}),
                family.engine(row["engine"]).name,
                dict(row["config"]),
            )
            for row in data["rows"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} has a row that cannot be read: {type(error).__name__}: {error}") from error


def as_result(table: TableResult) -> dict[str, Any]:
    """The table as facts to keep: what all rows share is said once.

    Raises:
        InputError: there is no row, or the rows were measured in environments that differ in more than the commit.
    """
    from .compiling import compiler_versions, glue_digest
    from .environment import environment

    request = table.request
    if not table.rows:
        raise InputError("the table has no row to keep: " + "; ".join(table.missing[:1]))
    places = [row.environment for row in table.rows if row.environment is not None]
    commits = sorted({str(place["commit"]) for place in places})
    shared = [{key: value for key, value in place.items() if key != "commit"} for place in places]
    if any(place != shared[0] for place in shared):
        raise InputError("the rows were measured in different environments: begin the table anew in one (--fresh, or another --studies)")  # fmt: skip
    used = [engine for engine in request.engines if any(engine.name in row.engines for row in table.rows)]
    same, rows = _shared([row.to_json() for row in table.rows])
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "family": request.family.name,
        "gpu": request.gpu.name,
        "evidence": request.objective,
        "made_by": "k3lab tune-table",
        "environment": {**shared[0], "commit": ", ".join(commits)} if shared else environment(None),
        "policy": table.rows[0].policy,
        "trials": {"anchors": request.trials, "others": request.later_trials or request.trials, "seed": request.seed},
        "sources": {engine.name: {"source": engine.source_digest(), "glue": glue_digest(engine)} for engine in used},
        "compilers": {name: version for engine in used for name, version in compiler_versions(engine).items()},
        "problem": same,
        **({"fixed": dict(request.fixed)} if request.fixed else {}),
        "rows": rows,
        "missing": list(table.missing),
        "skipped": table.skipped,
    }


def _shared(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fields that the problems of all rows share, and the rows without them."""
    problems = [row["problem"] for row in rows]
    same = {
        name: value
        for name, value in sorted(problems[0].items())
        if all(name in one and json.dumps(one[name]) == json.dumps(value) for one in problems)
    }
    own = [{name: value for name, value in one.items() if name not in same} for one in problems]
    return same, [{**row, "problem": problem} for row, problem in zip(rows, own, strict=True)]


def _place(row: Mapping[str, Any]) -> tuple[str, int]:
    """Sorts rows shape by shape."""
    shape = {name: value for name, value in row["problem"].items() if name != "rows"}
    return json.dumps(shape, sort_keys=True), row["problem"].get("rows", 0)


def joined(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The new table, and the old one's rows of other problems, whatever they were tuned with.

    Raises:
        InputError: the old one was measured on another GPU, with other versions, kernels or another policy: its rows may not
            stand beside the new ones.
    """

    def place(data: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data["environment"].items() if key != "commit"}

    for name in ("family", "gpu", "evidence", "policy", "fixed"):
        if new.get(name) != old.get(name):
            raise InputError(f"the table that is there has another {name}: name another --results file")
    if place(new) != place(old):
        raise InputError("the table that is there was made in another environment: name another --results file")
    for name in ("sources", "compilers"):
        for key in new[name].keys() & old[name].keys():
            if new[name][key] != old[name][key]:
                raise InputError(f"the table that is there has another {name.removesuffix('s')} of {key}: name another --results file")  # fmt: skip
    whole = [[{**row, "problem": {**data["problem"], **row["problem"]}} for row in data["rows"]] for data in (new, old)]
    fresh = [row["problem"] for row in whole[0]]
    kept = [row for row in whole[1] if row["problem"] not in fresh]
    same, rows = _shared(whole[0] + kept)
    commits = {one for data in (new, old) for one in data["environment"]["commit"].split(", ")}
    return {
        **new,
        "environment": {**new["environment"], "commit": ", ".join(sorted(commits))},
        "trials": {name: min(value, old["trials"].get(name, value)) for name, value in new["trials"].items()},
        "sources": {**old["sources"], **new["sources"]},
        "compilers": {**old["compilers"], **new["compilers"]},
        "problem": same,
        "rows": sorted(rows, key=_place) if kept else rows,
    }


def result_text(data: Mapping[str, Any]) -> str:
    """JSON with one line a row: a diff shows which problem changed."""
    rows = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in data["rows"])
    head = {key: value for key, value in data.items() if key != "rows"}
    text = json.dumps(head, indent=1)
    return text.removesuffix("\n}") + ',\n "rows": [\n' + rows + "\n ]\n}\n"


def check_results(path: Path) -> None:
    """Make sure, before hours of work, that a result file can be written and replaces nothing but one of its kind.

    Raises:
        InputError: it cannot, or it would.
    """
    from .record import check_writable

    if path.suffix != ".json":
        raise InputError(f"a result file is a .json file, {path} is not named so")
    check_writable(path)
    if path.exists() and path.stat().st_size:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InputError(f"{path} is there and is no table of `k3lab tune-table`: name another --results file")


def write_result(path: Path, table: TableResult, *, add: bool = False) -> None:
    """Write the result file, whole or not at all; ``add`` keeps rows that it has of other problems.

    Raises:
        InputError: see :func:`as_result` and :func:`joined`; or the file cannot be written.
    """
    data = as_result(table)
    if add and path.exists():
        data = joined(data, json.loads(path.read_text()))
    text = result_text(data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); the studies hold it all") from error
