"""From studies to the captured layer and back: whose configs are tried there, and where the verdict is kept.

The verdict lies in the contest that the studies of a problem share: a new contest, after new trials, forgets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels import Family, InputError, ModelCard, Problem
from ..kernels.gpu_cards import GpuCard
from .between import decide, figures, held
from .choose import choose, pick
from .identity import default_path
from .in_situ import Candidate, Verdict, holding
from .study import TuningStudy, glance
from .table import TableRequest
from .tune import TuneRequest, identity_of

ProfileTimes = Callable[[Family, Problem, Sequence[Candidate]], Mapping[str, tuple[float, float]]]
"""Times of candidates on a problem: config digest to (microseconds, relative band); those that failed are left out."""


@dataclass(frozen=True)
class Place:
    """A place of the layer whose studies were in one contest."""

    name: str
    kind: str | None
    """Layer kind, where the family has one a kind."""
    family: Family
    problem: Problem
    requests: tuple[TuneRequest, ...]
    chosen: Candidate
    """The isolated winner."""
    candidates: tuple[Candidate, ...]
    """All of the contest with a time, fastest first."""
    profiles: Mapping[str, float] | None = None
    """Where the family has routing profiles: config digest to its largest loss, of those that hold over all of them."""


def place_of(name: str, kind: str | None, family: Family, problem: Problem, gpu: GpuCard, folder: Path) -> Place:
    """The place of a problem, from its measured studies.

    Raises:
        InputError: there are none, they were in no contest or had trials after it, or their kernels have changed.
    """
    engines = [
        engine
        for engine in family.engines
        if engine.refuses(problem, gpu.arch) is None
        and default_path(family, engine, problem, gpu, "measured", folder=folder).exists()
    ]
    if not engines:
        raise InputError(f"{name} {problem.label}: no measured study in {folder}; `k3lab tune-table` makes them")
    table = TableRequest(family, (problem,), tuple(engines), gpu, "measured", 1, folder=folder)
    requests = [table.request(problem, engine, 1) for engine in engines]
    chosen_by = {ask.engine.name: ask for ask in requests if glance(ask.path).notes.get("choice")}
    contest = held({engine: ask.path for engine, ask in chosen_by.items()})
    if contest is None:
        raise InputError(f"{name} {problem.label}: its studies were in no contest since their last trials; `k3lab tune-table` holds one")  # fmt: skip
    contest.pop("in_situ", None)  # asked again, it begins with the isolated winners
    winners = {engine: digest for engine, ask in chosen_by.items() if (digest := _alone(ask)) is not None}
    first = decide(contest, winners, [engine.name for engine in family.engines]).engine
    ranked = []
    for entry in contest["entries"]:
        if (timed := figures(contest, entry["engine"], entry["digest"])) is not None and entry["engine"] in chosen_by:
            ranked.append(Candidate(entry["engine"], entry["config"], timed[0]))
    ranked.sort(key=lambda one: (one.isolated_us, one.digest))
    own = next(one for one in ranked if (one.engine, one.digest) == (first, winners[first]))
    return Place(name, kind, family, problem, tuple(chosen_by.values()), own, tuple(ranked))


def _alone(ask: TuneRequest) -> str | None:
    """Digest of what a study chooses without the layer."""
    with TuningStudy.for_reading(ask.path) as study:
        choice = pick(study.trials(), ask.space, "measured", study.note("finals"))
    return choice.digest if choice else None


def profile_problems(place: Place, card: ModelCard, profiles: Sequence[str]) -> dict[str, Problem]:
    """Routing profile to the place's problem under it; empty for families that know none."""
    told = [kind for kind in place.family.kinds if kind.rsplit("_", 1)[-1] in profiles]
    bases = {kind.rsplit("_", 1)[0] for kind in told if "_" in kind}
    kinds = [kind for kind in place.family.kinds if kind in told or kind in bases]
    if len(kinds) < 2:
        return {}
    return {kind: place.family.problem(card, tp=place.problem.tp, rows=place.problem.rows, kind=kind) for kind in kinds}


def held_over(place: Place, problems: Mapping[str, Problem], times: ProfileTimes) -> Place:
    """The place with only those candidates that hold over the routing profiles; the isolated winner is replaced if it does not.

    Args:
        place: with all candidates.
        problems: of :func:`profile_problems`; without any the place stays as it is.
        times: measures.
    """
    if not problems:
        return place
    found = {profile: times(place.family, problem, place.candidates) for profile, problem in problems.items()}
    kept = holding(found)
    candidates = tuple(one for one in place.candidates if one.digest in kept)
    first = (
        place.chosen
        if place.chosen.digest in kept
        else min(candidates, key=lambda one: (kept[one.digest], one.isolated_us))
    )
    return Place(place.name, place.kind, place.family, place.problem, place.requests, first, candidates, kept)


def store(place: Place, verdict: Verdict) -> dict[str, Any]:
    """Keep a verdict with all studies of the place, and what each chooses by it; what was stored.

    Raises:
        InputError: a study cannot be written, or is another tuner's at the moment.
    """
    told = verdict.to_json() | {"profiles": dict(place.profiles) if place.profiles is not None else None}
    with contextlib.ExitStack() as open_studies:
        for request in place.requests:
            study = open_studies.enter_context(TuningStudy.for_tuning(request.path, identity_of(request)))
            study.set_note("contest", {**study.note("contest"), "in_situ": told})
            choice = choose(study, request.space)
            study.set_note("choice", choice.to_json() if choice else None)
    return told
