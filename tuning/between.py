"""Between engines: which of several studies of one problem wins, by a contest of their finalists in one process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.errors import InputError
from .choose import LEAST_BAND, choose, finalists, pick
from .compiling import digests
from .confirm import Standing, better_in_chain, dropped_because, told, within_reach
from .environment import environment
from .jobs import Job, Kind
from .outcome import SetupError, Status
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
    """Each engine's winner, isolated, the fastest first."""
    chain: Mapping[str, Any] | None = None
    """The winner's figures behind a predecessor; None where there are none."""


def held(paths: Mapping[str, Path]) -> dict[str, Any] | None:
    """The contest that is stored with all studies and younger than all of their trials, or None.

    Args:
        paths: engine to its study.
    """
    glances = {engine: glance(path) for engine, path in paths.items()}
    notes = [one.notes.get("contest") for one in glances.values()]
    first = same_contest(notes)
    counts = {engine: one.trials for engine, one in glances.items()}
    return dict(first) if first is not None and first["trials"] == counts and "chain" in first else None


def hold(requests: Sequence[TuneRequest], workers: Workers) -> dict[str, Any]:
    """Hold the contest of the studies' finalists, alone and in a chain; store it, and what each study chooses by it.

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
            trials[request.engine.name] = study.trials()
            pairs += [(request, trial) for trial in finalists(trials[request.engine.name], request.space)]
        payload, results = _timed("contest", pairs, workers)
        entries = [
            {"engine": request.engine.name, "digest": trial.digest, "config": dict(trial.config), **result}
            for (request, trial), result in zip(pairs, results, strict=True)
        ]
        choices = [
            pick(trials[request.engine.name], request.space, "measured", _finals(request, entries, pairs))
            for request in requests
        ]
        chosen = {(ask.engine.name, one.digest) for ask, one in zip(requests, choices, strict=True) if one is not None}
        chain = _in_chain(pairs, entries, chosen, workers)
        how = {key: value for key, value in payload.items() if key != "results"}
        counts = {engine: len(there) for engine, there in trials.items()}
        note = {**how, "entries": entries, "chain": chain, "trials": counts, "environment": environment(_device(requests[0]))}  # fmt: skip
        note["id"] = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()[:16]
        for request, study in zip(requests, studies, strict=True):
            _store(study, request, note, pairs)
    return note


def _device(request: TuneRequest) -> Any:
    from .tune import require_gpu

    return require_gpu(request.gpu)


def _timed(
    kind: Kind, pairs: Sequence[tuple[TuneRequest, TrialRecord]], workers: Workers
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Payload and results of a contest or its chains; a contestant that ends the process is found, and the others timed again."""
    failed: dict[int, str] = {}
    for _ in range(2):
        running = [place for place in range(len(pairs)) if place not in failed]
        outcome = workers.result(_job(kind, [pairs[place] for place in running]))
        if outcome.status is Status.OK and outcome.payload is not None:
            got = dict(zip(running, outcome.payload["results"], strict=True))
            out = [got.get(place, {"values_us": [], "spreads": [], "failed": failed.get(place, "")}) for place in range(len(pairs))]  # fmt: skip
            return dict(outcome.payload), out
        for place in running:
            alone = workers.result(_job(kind, [pairs[place]]))
            if alone.status is not Status.OK:
                failed[place] = f"{alone.status}: {alone.reason}"
        if len(failed) in (0, len(pairs)):
            break
    raise InputError(f"the {kind} of {pairs[0][0].problem.label} ended as {outcome.status}: {outcome.reason}")


def _in_chain(
    pairs: Sequence[tuple[TuneRequest, TrialRecord]], entries: Sequence[dict[str, Any]], chosen: Collection[tuple[str, str]], workers: Workers,
) -> dict[str, Any]:  # fmt: skip
    """Time those within reach behind a predecessor; their entries get the figures, or the reason why they are out.

    Where none of them can be timed so, the isolated figures stand, and the contest says why.
    """
    us = [found[0] if (found := _figures(entry)) else None for entry in entries]
    places = within_reach(
        us, [place for place, entry in enumerate(entries) if (entry["engine"], entry["digest"]) in chosen]
    )
    if not places:
        return {"failed": "no contestant has a time"}
    try:
        payload, results = _timed("chain", [pairs[place] for place in places], workers)
    except SetupError:
        raise
    except InputError as error:
        return {"failed": str(error)}
    for place, result in zip(places, results, strict=True):
        if result["failed"]:
            entries[place]["failed"] = f"in a chain: {result['failed']}"
        else:
            entries[place]["chain"] = {name: value for name, value in result.items() if name != "failed"}
    return {**{name: value for name, value in payload.items() if name != "results"}, "failed": ""}


def _job(kind: Kind, pairs: Sequence[tuple[TuneRequest, TrialRecord]]) -> Job:
    request, trial = pairs[0]
    contestants = [
        {"engine": one.engine.name, "config": dict(entrant.config), "digests": list(digests(one.engine))}
        for one, entrant in pairs
    ]
    return replace(request.job(kind, trial.config), contestants=contestants)


def _finals(
    request: TuneRequest, entries: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[TuneRequest, TrialRecord]]
) -> dict[str, Any]:
    """A study's finals: its own finalists' part of the contest is what it chooses by."""
    keys = ("values_us", "spreads", "failed", "chain")
    return {
        trial.digest: {"trial": trial.number} | {key: entry[key] for key in keys if key in entry}
        for (one, trial), entry in zip(pairs, entries, strict=True)
        if one is request
    }


def _store(
    study: TuningStudy, request: TuneRequest, note: Mapping[str, Any], pairs: Sequence[tuple[TuneRequest, TrialRecord]]
) -> None:
    study.set_note("finals", _finals(request, note["entries"], pairs))
    choice = choose(study, request.space)
    study.set_note("choice", choice.to_json() if choice else None)
    study.set_note("contest", dict(note))  # last: what dies before it is held again


def _figures(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """(microseconds, band) of a contestant, isolated; None where it is out."""
    values = entry["values_us"]
    if not values or entry["failed"]:
        return None
    middle = statistics.median(values)
    return middle, max((max(values) - min(values)) / middle, *entry["spreads"], LEAST_BAND)


def figures(contest: Mapping[str, Any], engine: str, digest: str) -> tuple[float, float] | None:
    """(microseconds, band) of a contestant; None where the contest has none of it."""
    entry = _entry(contest, engine, digest)
    return _figures(entry) if entry is not None else None


def _entry(contest: Mapping[str, Any], engine: str, digest: str) -> Mapping[str, Any] | None:
    return next((one for one in contest["entries"] if (one["engine"], one["digest"]) == (engine, digest)), None)


def decide(contest: Mapping[str, Any], winners: Mapping[str, str], order: Sequence[str]) -> Decision:
    """The engine whose winner is the fastest; of those within the measured spread the one the family lists first.

    One that wins alone but not in the chain is dropped (:func:`k3lab.tuning.confirm.better_in_chain`). Where the contestants
    were tried in the captured layer (:mod:`k3lab.tuning.in_situ`), that has the last word.

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
    standings = {engine: _standing(contest, engine, winners[engine], timed[engine]) for engine in ranked}
    taker = better_in_chain(standings[winner], [standings[engine] for engine in others])
    if taker is not None:
        reason = f"{dropped_because(standings[winner], taker)}, {rounds}"
        winner = taker.name
    verdict = contest.get("in_situ")
    if verdict and verdict["engine"] in timed and winners[verdict["engine"]] == verdict["digest"]:
        reason = f"in the captured layer: {verdict['reason']}; alone: {reason}"
        winner = str(verdict["engine"])
    chain, times = standings[winner].chain, {engine: round(timed[engine][0], 4) for engine in ranked}
    return Decision(winner, f"{reason}; {told(chain)}", times, chain)


def _standing(contest: Mapping[str, Any], engine: str, digest: str, isolated: tuple[float, float]) -> Standing:
    us, band = isolated
    return Standing(engine, us, us * band, (_entry(contest, engine, digest) or {}).get("chain"))


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
