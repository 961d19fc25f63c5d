"""What one rank does, from joining to what it found."""

from __future__ import annotations

import importlib
from typing import Any

from ...kernels import family
from ..environment import environment
from .cases import rank_inputs
from .check import SETS, check_case
from .clock import time_together
from .group import RankGroup
from .request import RanksRequest


def player_of(request: RanksRequest, group: RankGroup) -> Any:
    """What launches on this rank; a collective call."""
    module, _, name = request.player.partition(":")
    return getattr(importlib.import_module(module), name)(request, group)


def run_rank(request: RanksRequest, group: RankGroup, player: Any = None) -> dict[str, Any]:
    """Check every case, and time those that are right; every rank calls it.

    Returns:
        JSON-able: ``rank``, ``cases``, ``beside``, ``missing``, ``environment`` and what the player says of itself.

    Raises:
        CollectiveError: a rank was late or is gone.
        InputError: the ranks do not fit the GPUs.
        KernelError: a kernel does not compile.
    """
    player = player or player_of(request, group)
    found, missing = player.cases()
    player.prepare(found)
    entries, faulty = [], False
    for case in found:
        if why := player.unfit(case):
            missing.append({"family": case.family, "engine": case.engine, "rows": case.problem.rows, "why": why})
            continue
        inputs = [rank_inputs(case, group.rank, SETS * request.seed + one, player.device) for one in range(SETS)]
        group.meet()
        played = player.play(case, inputs)
        check = check_case(case, played, inputs, group, request.steps)
        entry = {**case.to_json(), "check": check}
        entry["source_digest"] = family(case.family).engine(case.engine).source_digest() if player.real else None
        faulty |= bool(check["faults"])
        if not (request.time_sliced or check["faults"]):
            for name, calls in player.calls(case, played, inputs[0]):
                entry[name] = timed(request, group, player, calls)
        entries.append(entry)
        group.meet()  # before this rank's mailboxes are given back
        del played
    beside = []
    if not (request.time_sliced or faulty):
        for what, calls in player.beside(found):
            if calls:
                beside.append({**what, **timed(request, group, player, calls)})
            else:
                missing.append(what)
    group.meet()
    where = environment(None)
    return {
        "rank": group.rank, "cases": entries, "beside": beside, "missing": missing, "environment": where,
        **player.describe(),
    }  # fmt: skip


def timed(request: RanksRequest, group: RankGroup, player: Any, calls: list[Any]) -> dict[str, Any]:
    """A series, as JSON."""
    series, stable = time_together(player.clock, calls, request.policy, group)
    return {
        "median_us": round(series.median_us, 3), "spread": round(series.spread, 4), "stable": stable,
        "samples_ns": series.samples_ns, "calls": series.calls, "copies": series.copies,
        "clocks": series.clocks_after,
    }  # fmt: skip
