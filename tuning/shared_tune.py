"""The search of one worker among many on one study: claim, evaluate, store; whoever dies, each config is tried once."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any

from ..kernels.errors import InputError
from ..kernels.space import Config, Space, config_digest
from . import propose
from .canary import Watch
from .choose import choose
from .claims import DUTIES
from .compiling import digests
from .environment import environment
from .finals import run_finals
from .identity import default_path
from .jobs import location_of
from .outcome import Outcome, Status, failure
from .progress import Progress, Silent
from .shared_storage import DatabaseLost
from .shared_study import Shared, SharedStudy
from .stop import Stop
from .study import TrialRecord, best_of
from .tune import TuneRequest, TuneResult, check_request, identity_of, require_gpu
from .workers import Workers

PAUSE_S = 0.5
"""Between two looks for something to do."""
AHEAD = 4
"""Most configs that a worker claims before it measures them."""
FINALS = f"{DUTIES}finals"


class Aside(InputError):
    """This worker's GPU drifted: it has left the study."""


def study_name(request: TuneRequest) -> str:
    """Name of the study in a database: that of its file, had it one."""
    return default_path(
        request.family, request.engine, request.problem, request.gpu, request.objective, request.fixed
    ).stem


def fleet_of(environment: dict[str, Any]) -> dict[str, Any]:
    """What all workers of a study must have alike beside its identity, field by field."""
    gpu = environment["gpu"] or {}
    fields = {f"gpu.{name}": gpu[name] for name in ("name", "sms", "memory_bytes", "driver") if name in gpu}
    return fields | {f"packages.{name}": version for name, version in environment["packages"].items()}


def tune_shared(
    request: TuneRequest, shared: Shared, progress: Progress | None = None, *, stop: Stop | None = None, workers: Workers | None = None
) -> TuneResult:  # fmt: skip
    """Work on a study in a database until it holds the trials asked for, its configs are exhausted, or the run is stopped.

    Any number of these may run at once, on any machines. SIGINT and SIGTERM end it after the running trial.

    Args:
        request: what to tune; its study file is not used.
        shared: the database.
        progress: who watches.
        stop: of a run over several studies; by default signals alone end it.
        workers: of such a run; by default the study has its own.

    Raises:
        InputError: a wrong request; a worker that does not fit the study, the field named; no database.
        Aside: this worker's canary drifted.
    """
    progress = progress or Silent()
    space = check_request(request)
    location_of(request.family)
    digests(request.engine)
    measured = request.objective == "measured"
    here = environment(require_gpu(request.gpu) if measured else None)
    name = shared.name or study_name(request)
    with contextlib.ExitStack() as open_things:
        if stop is None:
            stop = Stop()
            open_things.enter_context(stop.listening())
        asked = stop

        def stopped() -> bool:
            return asked.asked

        study = open_things.enter_context(
            SharedStudy.join(name, identity_of(request), fleet_of(here), shared, progress.message, stopped)
        )
        if workers is None:
            workers = open_things.enter_context(
                Workers(
                    request.limits, measured=measured, evaluator=request.evaluator, jobs=request.jobs, gpus=request.gpus
                )
            )
        study.note_once("environment", here)
        study.set_note("wanted", request.trials)
        proposer = request.proposer or propose.for_search(space, request.trials, request.seed)
        run = _Run(request, space, study, workers, proposer, progress, stopped)
        return run.whole(shared.canary_s, stop)


class _Run:
    """One worker's part of the search."""

    def __init__(
        self, request: TuneRequest, space: Space, study: SharedStudy, workers: Workers, proposer: propose.Proposer,
        progress: Progress, stopped: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.request, self.space, self.study, self.workers = request, space, study, workers
        self.proposer, self.progress, self.stopped = proposer, progress, stopped
        self.claimed: deque[Config] = deque()
        self.done = 0

    def whole(self, canary_s: float, stop: Stop) -> TuneResult:
        """Merge what waits, then search, then hold the finals; what the study holds then."""
        self.merge()
        before = self.study.trials()
        total = self.request.trials if self.proposer.total is None else min(self.request.trials, self.proposer.total)
        self.progress.begin(f"study {self.study.path} as worker {self.study.worker}", before, total)
        try:
            watch = Watch(self.study, self.request, self.workers, canary_s)
            ended = self.search(watch)
            if ended in ("trials", "exhausted"):
                self.finals()
            ended = ended if ended in ("trials", "exhausted") else stop.word
        finally:
            self.progress.end()
        statuses = Counter(str(trial.outcome.status) for trial in self.study.trials() if trial.outcome)
        choice = choose(self.study, self.space)
        return TuneResult(
            self.study.path, self.study.identity, ended, self.done, dict(sorted(statuses.items())), choice
        )

    def merge(self) -> None:
        stored, known = self.study.merge_spooled()
        if stored or known:
            self.progress.message(
                f"{stored} outcomes that waited for the database are stored, {known} were there already"
            )

    def search(self, watch: Watch) -> str:
        """Evaluate until nothing is left to do; says why it ended."""
        while True:
            if self.stopped():
                return "stopped"
            if self.study.lost and not self.claimed:
                self.study.wait_until_back()
                self.merge()
            try:
                self.study.be_patient(not self.claimed)
                if not self.study.lost and (ended := self.look(watch)) is not None:
                    return ended
            except DatabaseLost:
                if not self.claimed:
                    raise
                self.progress.message(f"the database is away: {len(self.claimed)} claimed configs are tried without it")
                self.study.lost = True
            finally:
                self.study.be_patient(True)
            if self.claimed:
                config = self.claimed.popleft()
                if (trial := self.study.begin(config, self.space)) is not None:
                    self.evaluate(trial)
            else:
                sleep(PAUSE_S)

    def look(self, watch: Watch) -> str | None:
        """What the database has to say: a canary that is due, dead workers' trials, new claims. Why the search is at its end, or None."""
        if why := watch.look():
            raise Aside(f"{why}; what this worker ran since its last canary is set aside")
        self.study.reap()
        while not self.stopped() and (left := self.study.take_waiting()) is not None:
            self.progress.message(f"trial {left.number} was left by a worker that died: it is tried again")
            self.evaluate(left)
        return self.claim()

    def claim(self) -> str | None:
        """Claim what comes next; why the search is at its end, or None."""
        trials = self.study.trials()
        room = self.request.trials - len(trials)
        depth = min(AHEAD, self.workers.depth)
        own = {config_digest(config) for config in self.claimed}
        more = self.proposer.ahead(trials, room) if room > 0 else []
        for config in more:
            if len(self.claimed) >= depth:
                break
            digest = config_digest(config)
            if digest not in own and self.study.claim(digest, self.request.trials):
                self.claimed.append(config)
                self.workers.submit(self.request.trial_job(config, self.seed_of(config)))
        if self.claimed or any(not trial.finished for trial in trials):
            return None
        if room > 0 and more:  # all of it is claimed by others, who may die
            return None
        return "trials" if room <= 0 else "exhausted"

    def seed_of(self, config: Config) -> int:
        """What stands for a trial's number in its seed: it has none before it is begun."""
        return int(config_digest(config)[:4], 16)

    def evaluate(self, trial: TrialRecord) -> None:
        outcome = trial.outcome or self.outcome(trial)
        self.study.finish(trial, outcome)
        self.done += 1
        if self.study.lost:
            self.progress.message("the database is away: outcomes wait on this machine's disk")
            return
        try:
            self.study.be_patient(False)
            trials = self.study.trials()
        except DatabaseLost:
            self.study.lost = True
        else:
            self.progress.trial(replace(trial, outcome=outcome, finished=True, number=len(trials) - 1), best_of(trials))
        finally:
            self.study.be_patient(True)

    def outcome(self, trial: TrialRecord) -> Outcome:
        if reason := self.space.illegal(trial.config):
            return failure(Status.ILLEGAL, reason)
        return self.workers.result(self.request.trial_job(trial.config, self.seed_of(trial.config))).checked()

    def finals(self) -> None:
        """Time the finalists in one process: this worker's, if no other does; else wait until that one has, or dies."""
        grace_s = self.study.grace_s
        while not self.stopped():
            if self.study.duty(FINALS, grace_s):
                if self.request.objective == "measured":
                    run_finals(self.study, self.request, self.space, self.workers, self.stopped)
                choice = choose(self.study, self.space)
                if not self.stopped():
                    self.study.set_note("choice", choice.to_json() if choice else None)
                    self.study.set_note("whole", len(self.study.trials()))
                self.study.release(FINALS)
                return
            if self.study.note("whole") == len(self.study.trials()):
                return
            sleep(PAUSE_S)
