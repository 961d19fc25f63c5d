"""A table's result file: what it may replace or be added to, known before the work as far as it can be, and how it is written."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels.contract import Family
from ..kernels.errors import InputError
from ..kernels.whole_file import write_whole
from .between import held
from .jobs import DEFAULT_EVALUATOR
from .record import check_writable
from .study import glance
from .table import TableRequest, TableResult, in_order
from .table_rows import FORMAT, as_result, result_text, said_once, table_in, winners_of
from .tune import TuneRequest, identity_of

OTHER = "name another --results file"
KINDS = {
    "environment": dict,
    "sources": dict,
    "compilers": dict,
    "trials": dict,
    "problem": dict,
    "missing": list,
    "skipped": dict,
}
"""Fields of a table that one which is added to it goes on with."""


def _without_commit(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in environment.items() if key != "commit"}


def readable(path: Path, family: Family) -> dict[str, Any]:
    """A result file that can be added to.

    Raises:
        InputError: it is damaged, no table, or one of another family.
    """
    data = table_in(path)
    winners_of(path, family)
    for name, kind in KINDS.items():
        if not isinstance(data.get(name), kind):
            raise InputError(f"{path} is a damaged table, its {name} cannot be read: {OTHER}")
    if not isinstance(data["environment"].get("commit"), str) or not all(
        isinstance(row.get("engines"), dict) for row in data["rows"]
    ):
        raise InputError(f"{path} is a damaged table, its commit or engines cannot be read: {OTHER}")
    return data


def same_place(new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Make sure that rows may stand beside each other; of the new table only what is known is compared.

    Raises:
        InputError: they were measured on another GPU, with other versions, kernels or another policy.
    """
    for name in ("family", "gpu", "evidence", "policy", "fixed"):
        if name in new and (new[name] or None) != (old.get(name) or None):
            raise InputError(f"the table that is there has another {name}: {OTHER}")
    if "environment" in new and _without_commit(new["environment"]) != _without_commit(old["environment"]):
        raise InputError(f"the table that is there was made in another environment: {OTHER}")
    for name in ("sources", "compilers"):
        for key in new[name].keys() & old[name].keys():
            if new[name][key] != old[name][key]:
                raise InputError(f"the table that is there has another {name.removesuffix('s')} of {key}: {OTHER}")


def joined(
    new: Mapping[str, Any], old: Mapping[str, Any], family: Family, asked: Collection[str] = ()
) -> dict[str, Any]:
    """The new table, and the old one's rows of other problems, whatever they were tuned with.

    Args:
        new: as :func:`k3lab.tuning.table_rows.as_result` gives it.
        old: as :func:`readable` does.
        family: of both.
        asked: labels of the problems that the new one was to have: what the old one says of their absence is past.

    Raises:
        InputError: see :func:`same_place`.
    """
    same_place({"policy": None, "fixed": None, **new}, old)
    whole = [[{**row, "problem": {**data["problem"], **row["problem"]}} for row in data["rows"]] for data in (new, old)]
    fresh = [row["problem"] for row in whole[0]]
    kept = [row for row in whole[1] if row["problem"] not in fresh]
    same, rows = said_once(whole[0] + kept)
    there = {family.problem_from_json(row["problem"]).label for row in whole[0] + kept}
    past = [line for line in old["missing"] if line.split(": ")[0] not in asked]
    skipped = {reason: list(labels) for reason, labels in new["skipped"].items()}
    for reason, labels in old["skipped"].items():
        if left := [label for label in labels if label not in asked]:
            skipped[reason] = list(dict.fromkeys([*skipped.get(reason, ()), *left]))
    used = {engine for row in whole[0] + kept for engine in row["engines"]}
    commits = {one for data in (new, old) for one in data["environment"]["commit"].split(", ")}
    return {
        **new,
        "environment": {**new["environment"], "commit": ", ".join(sorted(commits))},
        "trials": _trials(new["trials"], old["trials"]),
        "sources": {
            engine: digests for engine, digests in {**old["sources"], **new["sources"]}.items() if engine in used
        },
        "compilers": {**old["compilers"], **new["compilers"]},
        "problem": same,
        "rows": sorted(rows, key=_place) if kept else rows,
        "missing": [line for line in dict.fromkeys([*past, *new["missing"]]) if line.split(": ")[0] not in there],
        "skipped": skipped,
    }


def _trials(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest of both; seeds are no less or more, so both are named where they differ."""
    found = {name: min(value, old.get(name, value)) for name, value in new.items() if name != "seed"}
    seeds: list[Any] = []
    for one in (old.get("seed", new["seed"]), new["seed"]):
        seeds += [seed for seed in (one if isinstance(one, list) else [one]) if seed not in seeds]
    return {**found, "seed": seeds[0] if len(seeds) == 1 else seeds}


def _place(row: Mapping[str, Any]) -> tuple[str, int]:
    """Sorts rows shape by shape."""
    shape = {name: value for name, value in row["problem"].items() if name != "rows"}
    return json.dumps(shape, sort_keys=True), row["problem"].get("rows", 0)


def check_results(path: Path, request: TableRequest, *, add: bool = False) -> None:
    """Make sure, before hours of work, that a result file can be written, replaces nothing but one of its kind, and can be added to.

    Raises:
        InputError: it cannot, or it would; or studies that are there were compared elsewhere than the others will be.
    """
    from .compiling import compiler_versions, glue_digest

    if path.suffix != ".json":
        raise InputError(f"a result file is a .json file, {path} is not named so")
    places = _places(request)
    if any(_without_commit(place) != _without_commit(places[0]) for place in places):
        raise InputError("studies that are there were compared in another environment, and one file holds one: another --studies, or no --results")  # fmt: skip
    check_writable(path)
    if not path.exists() or not path.stat().st_size:
        return
    try:
        there = json.loads(path.read_text())
    except (OSError, ValueError):
        there = None
    if not isinstance(there, dict) or there.get("format") != FORMAT:
        raise InputError(f"{path} is there and is no table of `k3lab tune-table`: {OTHER}")
    known: dict[str, Any] = {
        "family": request.family.name, "gpu": request.gpu.name, "evidence": request.objective, "fixed": dict(request.fixed),
        "sources": {}, "compilers": {},
    }  # fmt: skip
    if not add:
        same_place(known, {**there, "sources": {}, "compilers": {}})
        return
    old = readable(path, request.family)
    tuned = [
        engine
        for engine in request.engines
        if any(not request.refuses(problem, engine) for problem in request.problems)
    ]
    known["sources"] = {
        engine.name: {"source": engine.source_digest(), "glue": glue_digest(engine)} for engine in tuned
    }
    known["compilers"] = {name: version for engine in tuned for name, version in compiler_versions(engine).items()}
    if places:
        known["environment"] = places[0]
    same_place({**known, **_policy(request)}, old)


def _policy(request: TableRequest) -> dict[str, Any]:
    """What the contests are timed by, as far as it is known."""
    from .policy import CONTEST

    if request.objective != "measured":
        return {"policy": None}
    return {"policy": CONTEST.to_json()} if request.evaluator == DEFAULT_EVALUATOR else {}


def _places(request: TableRequest) -> list[dict[str, Any]]:
    """Environments of the rows to come: of contests that stand, and the one here where one is to be held."""
    from .environment import environment
    from .tune import require_gpu

    if request.objective != "measured":
        return [environment(None)]
    here, found = False, []
    for problem, anchor in in_order(request.problems):
        engines = [engine for engine in request.engines if not request.refuses(problem, engine)]
        count = request.trials if anchor else request.later_trials or request.trials
        contest = _standing([request.request(problem, engine, count) for engine in engines])
        if contest is not None:
            found.append(dict(contest["environment"]))
        here = here or (bool(engines) and contest is None)
    return [environment(require_gpu(request.gpu)), *found] if here else found


def _standing(asks: Sequence[TuneRequest]) -> dict[str, Any] | None:
    """The contest of a problem's studies, where all of them are whole and of the kernels as they are."""
    paths = {}
    for ask in asks:
        if not ask.path.exists():
            return None
        found = glance(ask.path)
        try:
            identity_of(ask).require(found.identity, ask.path)
        except InputError:
            return None
        done = found.notes.get("done")
        if not done or done["trials"] < ask.trials:
            return None
        if done["best"]:
            paths[ask.engine.name] = ask.path
    return held(paths) if paths else None


def write_result(path: Path, table: TableResult, *, add: bool = False) -> None:
    """Write the result file, whole or not at all; ``add`` keeps rows that it has of other problems.

    Raises:
        InputError: see :func:`k3lab.tuning.table_rows.as_result`, :func:`readable` and :func:`joined`; or the file cannot be written.
    """
    data = as_result(table)
    if add and path.exists() and path.stat().st_size:
        family = table.request.family
        data = joined(data, readable(path, family), family, {problem.label for problem in table.request.problems})
    text = result_text(data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); the studies hold it all") from error
