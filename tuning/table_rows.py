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
from .between import Decision, figures
from .in_situ import both_numbers

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
    in_situ: Mapping[str, Any] | None = None
    """Each candidate alone and in the captured layer (:func:`k3lab.tuning.in_situ.both_numbers`); None where none was asked."""

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
            **({"in_situ": dict(self.in_situ)} if self.in_situ else {}),
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
    told = (contest or {}).get("in_situ")
    return Row(
        problem, decision.engine, choice["config"], us, band, floor, dict(contest["alternatives"]) if contest else {},
        decision.reason, choice["reason"], decision.times_us, contest["environment"] if contest else None,
        contest["policy"] if contest else None, decision.chain, tuple(notes),
        both_numbers(told) if told else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Winner:
    """A config that won somewhere: where another search may begin."""

    problem: Problem
    engine: str
    config: Config


def table_in(path: Path) -> dict[str, Any]:
    """What a result file holds: a table of this schema, whose rows and head are not looked at yet.

    Raises:
        InputError: it cannot be read, or is no table.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a table: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("rows"), list):
        raise InputError(f"{path} is no table of `k3lab tune-table`")
    if data.get("schema") != SCHEMA:
        raise InputError(f"{path} has schema {data.get('schema')}, this version reads {SCHEMA}")
    return data


def winners_of(path: Path, family: Family) -> tuple[Winner, ...]:
    """The winners that a result file holds.

    Raises:
        InputError: it cannot be read, is no table, or is one of another family.
    """
    data = table_in(path)
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
    except (AttributeError, KeyError, TypeError, ValueError) as error:
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
        raise InputError("the rows were measured in different environments: begin the table anew in one (another --studies)")  # fmt: skip
    used = [engine for engine in request.engines if any(engine.name in row.engines for row in table.rows)]
    same, rows = said_once([row.to_json() for row in table.rows])
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


def said_once(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Fields that the problems of all rows share, and the rows without them."""
    problems = [row["problem"] for row in rows]
    same = {
        name: value
        for name, value in sorted(problems[0].items())
        if all(name in one and json.dumps(one[name]) == json.dumps(value) for one in problems)
    }
    own = [{name: value for name, value in one.items() if name not in same} for one in problems]
    return same, [{**row, "problem": problem} for row, problem in zip(rows, own, strict=True)]


def result_text(data: Mapping[str, Any]) -> str:
    """JSON with one line a row: a diff shows which problem changed."""
    rows = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in data["rows"])
    head = {key: value for key, value in data.items() if key != "rows"}
    text = json.dumps(head, indent=1)
    return text.removesuffix("\n}") + ',\n "rows": [\n' + rows + "\n ]\n}\n"
