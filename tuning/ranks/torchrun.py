"""The same where torchrun started the ranks: each process is one, and rank 0 has what all found."""

from __future__ import annotations

import json
import os
from typing import Any

from ...kernels.collectives import CollectiveError
from ...kernels.env import Place
from ...kernels.errors import InputError
from .request import RanksError, RanksRequest
from .start import key, settings


def run(request: RanksRequest, place: Place) -> list[dict[str, Any]] | None:
    """What each rank found, on rank 0; None on the others.

    Raises:
        InputError: torchrun started another number of ranks than asked for.
        RanksError: a rank was late, is gone or failed.
    """
    if place.size != request.size:
        raise InputError(f"torchrun started {place.size} ranks, {request.size} were asked for; they must be equal")
    os.environ.update(settings(request))
    from .group import join
    from .run import run_rank

    try:
        group = join(place.rank, request, None)
        group.store.set(key(group.rank), json.dumps(run_rank(request, group)))
        group.meet()
        if group.rank:
            return None
        return [json.loads(group.store.get(key(rank))) for rank in range(group.size)]
    except CollectiveError as error:
        raise RanksError(f"rank {place.rank}: {error}") from error
