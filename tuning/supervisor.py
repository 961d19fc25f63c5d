"""The parent's side of a worker process: wall limits, kill as a process group, respawn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import IO, Any

from ..kernels.errors import InputError
from .jobs import DEFAULT_EVALUATOR, Job
from .outcome import Outcome, SetupError, Status, failure, one_line

LONGEST_S = 86_400.0
"""Longest wall limit: every wait ends."""
REAP_S = 10.0
"""How long a killed worker may take to go."""
LOG_TAIL = 4000
"""Bytes of a dead worker's log that are searched for a reason."""


@dataclass(frozen=True)
class Limits:
    """Wall limits in seconds; a stage that passes its limit costs the config, and the worker."""

    start_s: float = 180.0
    """Starting the process and its imports."""
    compile_s: float = 120.0
    measure_s: float = 90.0
    """The check, and the timing, each."""

    def __post_init__(self) -> None:
        for limit in (self.start_s, self.compile_s, self.measure_s):
            if not 0 < limit <= LONGEST_S:  # NaN neither
                raise InputError(f"a wall limit is {limit:g} s, must be more than 0 and at most {LONGEST_S:g} s")

    def of(self, stage: str) -> float:
        """The limit of a stage."""
        return {"start": self.start_s, "compile": self.compile_s}.get(stage, self.measure_s)


class _Died(Exception):
    pass


class _Late(Exception):
    pass


class Aborted(Exception):
    """The worker was ended from another thread; its job has no outcome."""


class Supervisor:
    """One worker process, started when first needed and replaced when it dies.

    Args:
        limits: wall limits.
        gpu: False hides every GPU from the worker: what predicts must not depend on the GPU at hand.
        evaluator: module with the functions of :class:`k3lab.tuning.jobs.Evaluator`.
        pinned: UUID of the one GPU that the worker sees; None leaves it all that this process sees.
    """

    def __init__(
        self, limits: Limits | None = None, *, gpu: bool, evaluator: str = DEFAULT_EVALUATOR, pinned: str | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.gpu = gpu
        self.pinned = pinned
        self.evaluator = evaluator
        self.started = 0
        """Workers started so far."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._used = False
        self._aborted = False

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job) -> Outcome:
        """The outcome of one job. Nothing a config does raises here.

        A worker that served other jobs may die of what they left behind, so a death counts against a
        config only when it was the first thing its worker did: otherwise it is run again, once.

        Raises:
            InputError: no worker can be started at all, or it lacks something that no config can help: a
                broken installation or a full disk, not a bad config.
            Aborted: see :meth:`abort`.
        """
        if self._process is None or self._process.poll() is not None:
            self._spawn()
        used, self._used = self._used, True
        outcome, died = self._run(job)
        if died and used and not self._aborted:
            self._spawn()
            self._used = True
            outcome, _ = self._run(job)
        if self._aborted:
            raise Aborted
        return outcome

    def abort(self) -> None:
        """End the worker from another thread than the one that runs jobs on it; for good, and at once."""
        self._aborted = True
        if (process := self._process) is not None:
            _end_group(process)

    def _run(self, job: Job) -> tuple[Outcome, bool]:
        """The outcome of a job on the running worker, and whether the worker died of itself."""
        stage = "start"
        try:
            self._send(job.to_json())
            while True:
                message = self._read(self.limits.of(stage))
                if message["event"] == "stage":
                    stage = message["stage"]
                    continue
                if message["event"] == "setup":
                    self._kill()
                    raise SetupError(message["reason"])
                if message["poisoned"]:
                    self._kill()
                return Outcome.from_json(message["outcome"]), False
        except _Late:
            self._kill()
            status = Status.COMPILE_TIMEOUT if stage in ("start", "compile") else Status.TIMEOUT
            return failure(status, f"{_doing(stage)} took longer than {self.limits.of(stage):g} s"), False
        except _Died:
            how, last = self._autopsy()
            return failure(Status.CRASHED, f"{how} while {_doing(stage)}" + (f": {last}" if last else "")), True

    def close(self) -> None:
        """End the worker; it does not outlive this call."""
        self._kill()

    def _spawn(self) -> None:
        self._kill()
        environment = {**os.environ, "PYTHONPATH": module_path()}
        if not self.gpu:
            # told an architecture, CuTe DSL does not ask the driver for one to fall back on; every compilation names its
            # own
            environment = {"CUTE_DSL_ARCH": "sm_100a", **environment, "CUDA_VISIBLE_DEVICES": "", "K3LAB_NO_GPU": "1"}
        elif self.pinned is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.pinned
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _kill
        self._lines.clear()
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "k3lab.tuning.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # its own process group: compilers it started die with it, Ctrl-C passes it by
        )
        self.started += 1
        self._used = False
        if self._aborted:  # between its start and here: whoever aborted did not see it
            self._kill()
            raise Aborted
        try:
            self._send({"parent": os.getpid(), "evaluator": self.evaluator})
            self._read(self.limits.start_s)
        except _Late:
            self._kill()
            raise InputError(f"the tuning worker did not start within {self.limits.start_s:g} s") from None
        except _Died:
            how, last = self._autopsy()
            if self._aborted:
                raise Aborted from None
            raise InputError(f"the tuning worker does not start ({how}): {last or 'it left no message'}") from None

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _Died from None

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not self._lines:
                left = deadline - monotonic()
                if left <= 0:
                    raise _Late
                if not selector.select(left):
                    continue
                chunk = os.read(pipe, 1 << 20)
                if not chunk:
                    raise _Died
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                self._lines.extend(whole)
        return json.loads(self._lines.popleft())

    def _kill(self) -> None:
        """Kill the worker's process group and reap it."""
        process, self._process = self._process, None
        if process is None:
            return
        _end_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver call: killed, and reaped some day
            process.wait(timeout=REAP_S)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _autopsy(self) -> tuple[str, str]:
        """How the worker died, and the last line of its log that says something."""
        assert self._process is not None and self._log is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its pipe and lives on
            code = 0
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL))
        log = self._log.read().decode(errors="replace")
        self._kill()
        if code < 0:
            return f"worker died with {signal.Signals(-code).name}", ""  # the log ends in a stack dump
        lines = [line for line in log.splitlines() if line.strip()]
        return f"worker exited with code {code}", one_line(lines[-1]) if lines else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def module_path() -> str:
    """``PYTHONPATH`` for a child process: a family that is only on this process's path is found there, too."""
    try:
        here = os.getcwd()
    except OSError:  # the working folder was removed
        here = "/"
    return os.pathsep.join(dict.fromkeys(os.path.join(here, path) if path else here for path in sys.path))


def _doing(stage: str) -> str:
    return {"start": "loading the family", "compile": "compiling", "check": "checking", "time": "timing"}.get(
        stage, stage
    )
