"""Between engines: which of several studies of one problem wins, by a contest of their finalists in one process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.errors import InputError
from .choose import LEAST_BAND, choose, finalists
from .compiling import digests
from .environment import environment
from .jobs import Job
from .outcome import Status
from .study import TrialRecord, TuningStudy, glance
from .workers import Workers

if TYPE_CHECKING:
    from .tune import TuneRequest


@dataclass(frozen=True)
class Decision:
    """The engine that wins, and why."""

    engine: str
    reason: str
    times_us: Mapping[str, float]
    """Each engine's winner, the fastest first."""


def held(paths: Mapping[str, Path]) -> dict[str, Any] | None:
    """The contest that is stored with all studies and younger than all of their trials, or None.

    Args:
        paths: engine to its study.
    """
    glances = {engine: glance(path) for engine, path in paths.items()}
    notes = [one.notes.get("contest") for one in glances.values()]
    first = same_contest(notes)
    counts = {engine: one.trials for engine, one in glances.items()}
    return dict(first) if first is not None and first["trials"] == counts else None


def hold(requests: Sequence[TuneRequest], workers: Workers) -> dict[str, Any]:
    """Hold the contest of the studies' finalists; store it, and what each study chooses by it.

    Args:
        requests: one an engine, of the same problem, GPU and objective, each with trials that ended ok.
        workers: that measure.

    Raises:
        InputError: a study cannot be read or written, or the contest cannot be held.
    """
    from .tune import identity_of

    with contextlib.ExitStack() as open_studies:
        studies = [
            open_studies.enter_context(TuningStudy.for_tuning(request.path, identity_of(request)))
            for request in requests
        ]
        pairs, trials = [], {}
        for request, study in zip(requests, studies, strict=True):
            there = study.trials()
            trials[request.engine.name] = len(there)
            pairs += [(request, trial) for trial in finalists(there, request.space)]
        payload, results = _timed(pairs, workers)
        entries = [
            {"engine": request.engine.name, "digest": trial.digest, "config": dict(trial.config), **result}
            for (request, trial), result in zip(pairs, results, strict=True)
        ]
        how = {key: value for key, value in payload.items() if key != "results"}
        note = {**how, "entries": entries, "trials": trials, "environment": environment(_device(requests[0]))}
        note["id"] = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()[:16]
        for request, study in zip(requests, studies, strict=True):
            _store(study, request, note, [trial for one, trial in pairs if one is request])
    return note


def _device(request: TuneRequest) -> Any:
    from .tune import require_gpu

    return require_gpu(request.gpu)


def _timed(
    pairs: Sequence[tuple[TuneRequest, TrialRecord]], workers: Workers
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Payload and results of a contest; a contestant that ends the process is found, and the others timed again."""
    failed: dict[int, str] = {}
    for _ in range(2):
        running = [place for place in range(len(pairs)) if place not in failed]
        outcome = workers.result(_job([pairs[place] for place in running]))
        if outcome.status is Status.OK and outcome.payload is not None:
            got = dict(zip(running, outcome.payload["results"], strict=True))
            out = [got.get(place, {"values_us": [], "spreads": [], "failed": failed.get(place, "")}) for place in range(len(pairs))]  # fmt: skip
            return dict(outcome.payload), out
        for place in running:
            alone = workers.result(_job([pairs[place]]))
            if alone.status is not Status.OK:
                failed[place] = f"{alone.status}: {alone.reason}"
        if len(failed) in (0, len(pairs)):
            break
    raise InputError(f"the contest of {pairs[0][0].problem.label} ended as {outcome.status}: {outcome.reason}")


def _job(pairs: Sequence[tuple[TuneRequest, TrialRecord]]) -> Job:
    request, trial = pairs[0]
    contestants = [
        {"engine": one.engine.name, "config": dict(entrant.config), "digests": list(digests(one.engine))}
        for one, entrant in pairs
    ]
    return replace(request.job("contest", trial.config), contestants=contestants)


def _store(study: TuningStudy, request: TuneRequest, note: Mapping[str, Any], entrants: Sequence[TrialRecord]) -> None:
    """The contest is a study's finals: its own finalists' part of it is what it chooses by."""
    own = {one["digest"]: one for one in note["entries"] if one["engine"] == request.engine.name}
    finals = {
        trial.digest: {"trial": trial.number}
        | {key: own[trial.digest][key] for key in ("values_us", "spreads", "failed")}
        for trial in entrants
    }
    study.set_note("finals", finals)
    choice = choose(study, request.space)
    study.set_note("choice", choice.to_json() if choice else None)
    study.set_note("contest", dict(note))  # last: what dies before it is held again


def figures(contest: Mapping[str, Any], engine: str, digest: str) -> tuple[float, float] | None:
    """(microseconds, band) of a contestant; None where the contest has none of it."""
    for one in contest["entries"]:
        if (one["engine"], one["digest"]) == (engine, digest) and one["values_us"] and not one["failed"]:
            values = one["values_us"]
            middle = statistics.median(values)
            return middle, max((max(values) - min(values)) / middle, *one["spreads"], LEAST_BAND)
    return None


def decide(contest: Mapping[str, Any], winners: Mapping[str, str], order: Sequence[str]) -> Decision:
    """The engine whose winner is the fastest; of those within the measured spread the one the family lists first.

    Args:
        contest: as :func:`hold` returns it.
        winners: engine to the digest of its study's choice.
        order: engines as the family lists them.

    Raises:
        InputError: no engine has a time.
    """
    timed = {engine: found for engine, digest in winners.items() if (found := figures(contest, engine, digest))}
    if not timed:
        raise InputError("no engine of this contest has a time")
    ranked = sorted(timed, key=lambda engine: (timed[engine][0], engine))
    fastest = ranked[0]
    best, band = timed[fastest]
    tied = [engine for engine in ranked if timed[engine][0] <= best * (1 + max(band, timed[engine][1]))]
    winner = min(tied, key=lambda engine: (order.index(engine), engine))
    others = [engine for engine in ranked if engine != winner]
    rounds = f"{contest.get('rounds', 'interleaved')} rounds in turn in one process"
    if not others:
        reason = f"{winner} is the only engine with a time"
    elif len(tied) == 1:
        second = others[0]
        reason = (
            f"{winner} is {timed[second][0] / best - 1:.1%} ahead of {second} ({timed[second][0]:.2f} us), {rounds}"
        )
    else:
        names = ", ".join(f"{engine} {timed[engine][0]:.2f} us" for engine in tied)
        reason = f"{names} are a tie ({rounds}): {winner} is the first of them in the family's list"
    return Decision(winner, reason, {engine: round(timed[engine][0], 4) for engine in ranked})


def decide_predicted(winners: Mapping[str, float], order: Sequence[str]) -> Decision:
    """The engine whose winner the model thinks the fastest.

    Args:
        winners: engine to the microseconds of its study's choice.
        order: engines as the family lists them; of two with one time the first.
    """
    ranked = sorted(winners, key=lambda engine: (winners[engine], order.index(engine)))
    reason = f"{ranked[0]} is the only engine with a time"
    if len(ranked) > 1:
        second = ranked[1]
        reason = f"{ranked[0]} is predicted {winners[second] / winners[ranked[0]] - 1:.1%} ahead of {second} ({winners[second]:.2f} us)"
    return Decision(ranked[0], reason, {engine: round(winners[engine], 4) for engine in ranked})


def same_contest(notes: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """The contest that all these studies were in, or None."""
    first = notes[0] if notes else None
    return (
        first if first is not None and all(note is not None and note["id"] == first["id"] for note in notes) else None
    )
