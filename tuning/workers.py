"""The processes of a run: some that compile ahead of those that measure, one a GPU, or some that predict.

Jobs are submitted as soon as they are known to come, and their outcomes taken in whatever order the search
wants: so the order of trials, and with it the result, does not depend on how many processes there are.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..kernels.errors import InputError
from .gpus import GpuLock, take
from .jobs import DEFAULT_EVALUATOR, Job
from .outcome import Outcome, Status
from .supervisor import REAP_S, Aborted, Limits, Supervisor

MOST_JOBS = 16
LOOK_S = 1.0
"""How often a wait looks whether there is still something to wait for."""

Role = Literal["prepare", "gpu", "finals"]
"""``gpu``: any GPU of the run; ``finals``: the first of them, which alone times what is compared to the last percent."""


def default_jobs() -> int:
    """One process a CPU, but for the one that measures; at least 1, at most :data:`MOST_JOBS`."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cpus - 1))


def check_jobs(jobs: int) -> None:
    """Make sure that so many processes can be asked for.

    Raises:
        InputError: fewer than one, or more than :data:`MOST_JOBS`.
    """
    if not 1 <= jobs <= MOST_JOBS:
        raise InputError(f"jobs is {jobs}, must be 1 to {MOST_JOBS}")


@dataclass(order=True)
class _Ticket:
    """One job on its way; the smallest goes first."""

    order: tuple[int, int]
    job: Job = field(compare=False)
    compiled: Outcome | None = field(default=None, compare=False)
    outcome: Outcome | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.error is not None


class Workers:
    """Worker processes, each started when first needed and served by a thread of its own.

    A worker asks the system to be killed when the thread that started it ends: that thread lives as long as
    this object is open.

    Args:
        limits: wall limits of every stage.
        measured: whether one of them has the GPU, and the others compile for it; else all predict.
        evaluator: module with the functions of :class:`k3lab.tuning.jobs.Evaluator`.
        jobs: processes beside those that have a GPU.
        gpus: GPUs of this host to measure on, a process each; they are locked against other tuners until the end.
        locks: GPUs that are locked already, in place of ``gpus``.

    Raises:
        InputError: wrong numbers, or GPUs that are not there or another tuner's.
    """

    def __init__(
        self, limits: Limits | None = None, *, measured: bool, evaluator: str = DEFAULT_EVALUATOR, jobs: int = 1, gpus: int = 1,
        locks: Sequence[GpuLock] | None = None,
    ) -> None:  # fmt: skip
        check_jobs(jobs)
        if locks is None:  # other evaluators, of tests and other back ends, may have no GPU at all
            locks = take(gpus) if measured and evaluator == DEFAULT_EVALUATOR else []
        self._locks = list(locks)
        self.measured = measured
        self.depth = 1 if jobs == 1 and not measured else 2 * (jobs + max(len(self._locks), 1) - 1) + 2
        """Jobs that a search submits beyond the one it waits for, that one included."""
        self._changed = threading.Condition()
        self._counter = itertools.count()
        self._tickets: dict[str, _Ticket] = {}
        self._queues: dict[Role, list[_Ticket]] = {"prepare": [], "gpu": [], "finals": []}
        self._closed = False
        roles: list[Role] = ["prepare" for _ in range(jobs)]
        self._supervisors = [Supervisor(limits, gpu=False, evaluator=evaluator) for _ in roles]
        if measured:
            pins: list[str | None] = [lock.gpu.uuid for lock in self._locks] or [None]
            roles.append("finals")
            roles += ["gpu"] * (len(pins) - 1)
            self._supervisors += [Supervisor(limits, gpu=True, evaluator=evaluator, pinned=pin) for pin in pins]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, daemon=True)
            for pair in zip(self._supervisors, roles, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, job: Job, *, later: int = 0) -> None:
        """See to a job; of one that was submitted before nothing is done twice.

        Args:
            job: what is to be done.
            later: jobs with less of it go first.
        """
        with self._changed:
            ticket = self._tickets.get(job.key)
            if ticket is None:
                ticket = self._tickets[job.key] = _Ticket((later, next(self._counter)), job)
                heapq.heappush(self._queues[self._first(job)], ticket)
                self._changed.notify_all()
            elif later < ticket.order[0]:
                ticket.order = (later, next(self._counter))
                for queue in self._queues.values():
                    heapq.heapify(queue)

    def result(self, job: Job) -> Outcome:
        """The outcome of a job, which is submitted if it was not; nothing that a config does raises here.

        Raises:
            InputError: see :meth:`k3lab.tuning.supervisor.Supervisor.run`.
        """
        self.submit(job)
        with self._changed:
            ticket = self._tickets[job.key]
            while not ticket.done:
                if self._closed or not any(thread.is_alive() for thread in self._threads):
                    raise InputError("the workers of this run have ended")
                self._changed.wait(LOOK_S)
            del self._tickets[job.key]
        if ticket.error is not None:
            raise ticket.error
        assert ticket.outcome is not None
        return ticket.outcome

    def forget(self) -> None:
        """Drop all jobs that no worker has begun."""
        with self._changed:
            for queue in self._queues.values():
                for ticket in queue:
                    self._tickets.pop(ticket.job.key, None)
                queue.clear()

    def close(self) -> None:
        """End the workers; none outlives this call."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for supervisor in self._supervisors:
            supervisor.abort()
        for thread in self._threads:
            thread.join(2 * REAP_S)
        for lock in self._locks:
            lock.release()

    def _first(self, job: Job) -> Role:
        return "finals" if self.measured and job.kind in ("retime", "contest", "chain") else "prepare"

    def _serve(self, supervisor: Supervisor, role: Role) -> None:
        """A thread's life: jobs of its role, until the end."""
        try:
            while (ticket := self._next(role)) is not None:
                self._run(supervisor, role, ticket)
        except Aborted:
            pass
        finally:
            supervisor.close()

    def _next(self, role: Role) -> _Ticket | None:
        with self._changed:
            while not self._closed:
                for queue in self._queues_of(role):
                    if queue:
                        return heapq.heappop(queue)
                self._changed.wait(LOOK_S)
        return None

    def _queues_of(self, role: Role) -> list[list[_Ticket]]:
        """Where a worker of that role looks for work, in this order."""
        return [self._queues["finals"], self._queues["gpu"]] if role == "finals" else [self._queues[role]]

    def _run(self, supervisor: Supervisor, role: Role, ticket: _Ticket) -> None:
        ahead = role == "prepare" and ticket.job.kind == "measure"
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            outcome = supervisor.run(replace(ticket.job, kind="compile") if ahead else ticket.job)
        except Aborted:
            raise
        except BaseException as raised:  # whoever waits for the job hears of it
            error = raised
        with self._changed:
            if ahead and outcome is not None and outcome.status is Status.OK:
                ticket.compiled = outcome
                heapq.heappush(self._queues["gpu"], ticket)
            else:
                ticket.outcome, ticket.error = _whole(outcome, ticket.compiled), error
            self._changed.notify_all()


def _whole(outcome: Outcome | None, compiled: Outcome | None) -> Outcome | None:
    """The outcome with the seconds that the compiler took in its own process."""
    if outcome is None or compiled is None:
        return outcome
    return replace(outcome, seconds={**outcome.seconds, **compiled.seconds})
