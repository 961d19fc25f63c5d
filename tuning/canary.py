"""The canary: one config that every worker times again, so that a GPU that runs slower than the others is known."""

from __future__ import annotations

import statistics
from time import monotonic
from typing import TYPE_CHECKING, Any

from .choose import LEAST_BAND
from .shared_study import SharedStudy
from .workers import Workers

if TYPE_CHECKING:
    from .tune import TuneRequest

ROUNDS = 3
"""Timings of one look: their median counts, their range is its noise."""


def time_canary(request: TuneRequest, workers: Workers) -> dict[str, Any]:
    """Time the default config: ``us`` and ``band`` (relative), or ``failed``, why it has none."""
    values, spreads = [], [LEAST_BAND]
    for turn in range(ROUNDS):
        kind: Any = "retime" if request.objective == "measured" else "predict"
        outcome = workers.result(request.job(kind, request.space.default, seed=request.seed + turn)).checked()
        if outcome.value is None:
            return {"us": None, "band": None, "failed": f"{outcome.status}: {outcome.reason}"}
        values.append(outcome.value)
        spreads.append(float((outcome.timing or {}).get("spread", 0.0)))
    middle = statistics.median(values)
    return {"us": round(middle, 4), "band": round(max((max(values) - min(values)) / middle, *spreads), 5), "failed": ""}


def drift(canary: dict[str, Any], reference: dict[str, Any]) -> str | None:
    """Why a canary does not agree with the study's, or None where their bands meet."""
    if canary["us"] is None:
        return f"the canary fails here ({canary['failed']}) and takes {reference['us']:.2f} us elsewhere"
    off = canary["us"] / reference["us"] - 1
    noise = canary["band"] + reference["band"]
    if abs(off) <= noise:
        return None
    return f"the canary takes {canary['us']:.2f} us here, {reference['us']:.2f} us at {reference['worker']}: {off:+.1%}, noise {noise:.1%}"


class Watch:
    """Times a worker's canary when it joins, and again as time goes by.

    Args:
        every_s: seconds between two.
    """

    def __init__(self, study: SharedStudy, request: TuneRequest, workers: Workers, every_s: float) -> None:
        self._study, self._request, self._workers, self._every_s = study, request, workers, every_s
        self._last: float | None = None

    def look(self) -> str | None:
        """Time the canary if it is time; why this worker must leave, or None.

        A canary that drifted sets aside what this worker ran since the one before. The first that a study has is its
        reference; a default config that nobody can run is no canary.
        """
        if self._last is not None and monotonic() - self._last < self._every_s:
            return None
        canary = time_canary(self._request, self._workers)
        reference = self._study.note("canary")
        if reference is None:
            if canary["us"] is None:
                self._last = monotonic()
                return None
            reference = self._study.note_once("canary", {**canary, "worker": self._study.worker})
        why = drift(canary, reference)
        self._study.facts["canaries"].append({**canary, "drift": why is not None})
        self._study.facts["ended"] = f"set aside: {why}" if why else None
        self._study.tell_facts()
        self._last = monotonic()
        return why
