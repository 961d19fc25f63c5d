"""One rank's process: ``python -m k3lab.tuning.ranks.worker PORT RANK REQUEST`` says in the store on PORT what it found."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ...kernels.errors import InputError
from .request import PREPARE_S, RanksRequest
from .start import HOST, key


def told(rank: int, store: Any, body: Callable[[], dict[str, Any]]) -> bool:
    """Leave what the body returns in the store, or in one line what went wrong; whether it went well."""
    try:
        found: dict[str, Any] = {"found": body()}
    except BaseException as error:
        traceback.print_exc()
        line = " ".join(str(error).split()) or type(error).__name__
        known = isinstance(error, RuntimeError | InputError)
        found = {"error": line if known else f"{type(error).__name__}: {line}", "input": isinstance(error, InputError)}
    store.set(key(rank), json.dumps(found))
    return "found" in found


def main(argv: list[str]) -> None:
    """Entry point; ends at once, whatever a peer's death left open."""
    port, rank, request = int(argv[0]), int(argv[1]), RanksRequest.from_text(argv[2])
    import torch.distributed as dist

    from .group import join
    from .run import run_rank

    store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=PREPARE_S))
    well = told(rank, store, lambda: run_rank(request, join(rank, request, store)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if well else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
