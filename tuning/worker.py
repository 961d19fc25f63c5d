"""The worker process: ``python -P -m k3lab.tuning.worker``. Reads jobs, answers outcomes, one JSON object a line.

Whatever a config does to this process (crash, hang, poisoned CUDA context) costs that config only: the
parent (:mod:`k3lab.tuning.supervisor`) holds the clock and starts another worker. The pipe of the
protocol is taken away from standard output first, so that prints of a library or a compiler land in
the log.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import importlib
import json
import os
import signal
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE)
"""Errors of this machine, whatever the config."""


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request
            os._exit(0)


def _take_pipes() -> tuple[TextIO, TextIO]:
    """The protocol's pipes; afterwards fd 0 reads nothing and fd 1 is the log."""
    jobs = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return jobs, answers


def _full(error: BaseException | None) -> OSError | None:
    """The error of this machine that another one was raised from, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def _evaluate(request: dict[str, Any], evaluator: Any, send: Any) -> tuple[dict[str, Any], bool]:
    """The outcome of one job as JSON, and whether the process must not be used again."""
    from .jobs import Job, resolve
    from .outcome import SetupError, Status, describe, failure

    current = ""
    started: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def stage(name: str) -> None:
        nonlocal current
        now = perf_counter()
        if current:
            seconds[current] = round(seconds.get(current, 0.0) + now - started[current], 4)
        current = name
        started[name] = now
        if name:
            send({"event": "stage", "stage": name})

    poisoned = False
    payload = None
    try:
        task = resolve(Job(**request))
        outcome = getattr(evaluator, task.job.kind)(task, stage).checked()
        payload = outcome.payload
    except SetupError as error:
        return {"setup": str(error)}, False
    except MemoryError as error:
        outcome, poisoned = failure(Status.OOM, describe(error)), True
    except Exception as error:
        if full := _full(error):
            return {
                "setup": f"{full.strerror} while {current or 'starting'}: {full.filename or 'no file named'}"
            }, False
        if type(error).__name__ == "OutOfMemoryError":
            outcome, poisoned = failure(Status.OOM, describe(error)), True
        elif current in ("", "compile"):
            outcome = failure(Status.COMPILE_ERROR, describe(error))
        else:  # a failed launch leaves the CUDA context unusable: nothing after it could be believed
            outcome, poisoned = failure(Status.CRASHED, f"{describe(error)} in {current}"), True
    stage("")
    return replace(outcome, seconds=seconds).to_json() | {"payload": payload}, poisoned


def main() -> None:
    """Serve jobs until the parent closes the pipe."""
    jobs, answers = _take_pipes()
    faulthandler.enable()
    hello = json.loads(jobs.readline())
    _die_with(hello["parent"])

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    evaluator = importlib.import_module(hello["evaluator"])
    send({"event": "ready"})
    for line in jobs:
        outcome, poisoned = _evaluate(json.loads(line), evaluator, send)
        if "setup" in outcome:
            send({"event": "setup", "reason": outcome["setup"]})
        else:
            send({"event": "done", "outcome": outcome, "poisoned": poisoned})


if __name__ == "__main__":
    main()
