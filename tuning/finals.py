"""The finals of a measured study: the fastest configs and the default, timed again in turn.

The best of many noisy numbers is biased low, and clocks drift within a search. Timing the finalists
round by round, each round in another order, lets drift hit all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..kernels.space import Space
from .choose import finalists
from .study import TuningStudy
from .workers import Workers

if TYPE_CHECKING:
    from .tune import TuneRequest

ROUNDS = 3


def run_finals(
    study: TuningStudy, request: TuneRequest, space: Space, workers: Workers, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Time the finalists again and store it with the study; finalists of an earlier run keep their rounds.

    Returns:
        Config digest to ``values_us`` and ``spreads`` (one a round) and ``failed`` (a reason, or empty).
    """
    candidates = finalists(study.trials(), space)
    stored = study.note("finals") or {}
    if all(
        len(stored.get(one.digest, {}).get("values_us", ())) >= ROUNDS or stored.get(one.digest, {}).get("failed")
        for one in candidates
    ):
        return stored
    results: dict[str, Any] = {
        one.digest: {"trial": one.number, "values_us": [], "spreads": [], "failed": ""} for one in candidates
    }
    for turn in range(ROUNDS):
        for one in candidates[turn % len(candidates) :] + candidates[: turn % len(candidates)]:
            if stopped():
                return stored
            result = results[one.digest]
            if result["failed"]:
                continue
            outcome = workers.result(request.job("retime", one.config, seed=request.seed + turn)).checked()
            if outcome.value is None:
                result["failed"] = f"{outcome.status}: {outcome.reason}"
                continue
            result["values_us"].append(outcome.value)
            result["spreads"].append(float((outcome.timing or {}).get("spread", 0.0)))
    study.set_note("finals", results)
    return results
