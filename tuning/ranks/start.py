"""Starts a process a rank, sees to it that all of them end, and says who died or was late."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...kernels.errors import InputError
from .group import OVERLAPPING, SETTINGS
from .request import RanksError, RanksRequest

HOST = "127.0.0.1"
LOOK_S = 0.05
REAP_S = 10.0
WALL_S = 3600.0
"""That all of it may take."""
TAIL = 2000
"""Characters of a dead rank's log that are searched for its last words."""


def key(rank: int) -> str:
    """Where in the store a rank leaves what it found."""
    return f"k3lab-ranks-found-{rank}"


def grace_s(request: RanksRequest) -> float:
    """How long the others may go on once one has failed: by then they have noticed and said whom they missed."""
    return 3 * request.limit_s + REAP_S


def settings(request: RanksRequest) -> dict[str, str]:
    """What every rank's environment must hold."""
    return {**SETTINGS, **(OVERLAPPING if request.time_sliced else {})}


def start(request: RanksRequest, *, wall_s: float = WALL_S, logs: Path | None = None) -> list[dict[str, Any]]:
    """Run all ranks as children of this process; what each found, in rank order.

    Args:
        request: the same for all.
        wall_s: that all of it may take.
        logs: folder where what the ranks print is kept, ``RANK.log`` each; None keeps nothing.

    Raises:
        RanksError: a rank died, was late or failed; one line that names it.
        InputError: what the ranks say of their input.
    """
    import torch.distributed as dist

    # served here, so that no rank's death takes it away
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=REAP_S))
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as open_:
        folder = Path(own) if logs is None else logs
        children = []
        for rank in range(request.size):
            log = open_.enter_context(open(folder / f"{rank}.log", "wb"))
            command = [sys.executable, "-m", "k3lab.tuning.ranks.worker", str(store.port), str(rank), request.to_text()]
            environment = {"OMP_NUM_THREADS": "8", **os.environ, **settings(request)}
            children.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        try:
            return _watch(store, children, request, time.monotonic() + wall_s, folder)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(REAP_S)


def _watch(
    store: Any, children: list[subprocess.Popen[bytes]], request: RanksRequest, deadline: float, logs: Path
) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    failed: dict[int, str] = {}
    wrong_input = False
    open_ = set(range(request.size))
    while open_ and time.monotonic() < deadline:
        for rank in sorted(open_):
            ended = children[rank].poll()
            if store.check([key(rank)]):
                said = json.loads(store.get(key(rank)))
                open_.discard(rank)
                if "found" in said:
                    found[rank] = said["found"]
                else:
                    wrong_input |= said["input"] and not failed
                    failed[rank] = said["error"]
            elif ended is not None:
                open_.discard(rank)
                failed = {rank: _last_words(rank, ended, logs), **failed}  # a death is the cause of what others say
            if rank in failed:
                deadline = min(deadline, time.monotonic() + grace_s(request))
        time.sleep(LOOK_S)
    if not failed and not open_:
        return [found[rank] for rank in range(request.size)]
    lines = [f"rank {rank}: {text}" if "rank" not in text[:5] else text for rank, text in failed.items()]
    if open_:
        lines.append(f"rank {', '.join(map(str, sorted(open_)))} did not end and had to be killed")
    message = "; ".join(dict.fromkeys(lines))
    raise (InputError if wrong_input else RanksError)(next(iter(failed.values())) if wrong_input else message)


def _last_words(rank: int, code: int, logs: Path) -> str:
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    text = Path(logs, f"{rank}.log").read_text(errors="replace")[-TAIL:].strip()
    last = text.splitlines()[-1] if text else "without a word"
    return f"rank {rank} ended with code {code}: {last}"
