"""A study that many workers share: each config is tried once, whoever dies.

To readers it is a :class:`TuningStudy`; what differs is how a trial begins and ends. Of a config whose worker died
Optuna keeps a failed trial and queues another: :meth:`SharedStudy.trials` tells the one that counts. Whoever decides
who has a trial does it alone in the database (``alone``), from what is stored there: a claim may be lost, and a worker
that was taken for dead may wake up, between any two looks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..kernels.space import Config, Space, config_digest
from .claims import DUTIES, Claims
from .counted import CANARY, WORKER, aside_of, counted, set_aside
from .heart import Heart
from .identity import StudyIdentity
from .outcome import Outcome, Status
from .shared_open import alone, load_or_create, require_fit
from .shared_storage import DatabaseLost, Patience, Rhythm, is_lost, open_database
from .spool import Spool
from .study import OUTCOME, TrialRecord, TuningStudy, record_of

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

SETTLES = 5
"""Looks at a trial that others may be ending."""
OFFLINE = -1
"""Number of a trial that the database does not know yet."""


@dataclass(frozen=True)
class Shared:
    """Where a study is shared, and how."""

    address: str
    name: str | None = None
    """Name of the study in the database; by default made of what it is a study of."""
    rhythm: Rhythm = field(default_factory=Rhythm)
    canary_s: float = 3600.0
    """Between two timings of the canary."""
    spool: Path = Path("studies/spool")
    """Folder of outcomes that wait for a lost database."""


def worker_name() -> str:
    """A name that no other worker has: host, process, chance."""
    host = "".join(
        letter if letter.isalnum() or letter == "-" else "-" for letter in socket.gethostname().split(".")[0]
    )
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


class SharedStudy(TuningStudy):
    """An open study of many workers; see :meth:`join`."""

    def __init__(
        self, name: str, storage: RDBStorage, study: optuna.Study, shared: Shared, worker: str, patience: Patience
    ) -> None:
        super().__init__(Path(name), storage, study, None)
        self.worker = worker
        self._patience, self._rhythm = patience, shared.rhythm
        self._id = storage.get_study_id_from_name(study.study_name)
        self.claims = Claims(storage.engine, self._id, worker)
        self._spool = Spool(shared.spool, name, worker)
        self.facts: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "canaries": [], "ended": None}
        self._current: int | None = None
        self._heart: Heart | None = None
        self._reaped = float("-inf")
        self._values: dict[str, list[Any]] = {}
        self.lost = False
        """Whether the database was away when a trial began or ended: outcomes wait on this machine's disk."""

    @classmethod
    def join(
        cls, name: str, identity: StudyIdentity, fleet: Mapping[str, Any], shared: Shared,
        say: Callable[[str], None] | None = None, stopped: Callable[[], bool] | None = None,
    ) -> SharedStudy:  # fmt: skip
        """Take part in the study of that name, which is made if it is not there.

        Args:
            name: of the study.
            identity: what it must be a study of.
            fleet: what all workers must have alike beside it: GPU, driver, versions.
            shared: where it lies.
            say: hears what is worth a line.
            stopped: whether the run was asked to end.

        Raises:
            InputError: no database; or this worker differs from the study in a field, which is named.
        """
        patience = Patience(shared.rhythm, say, stopped)
        storage = open_database(shared.address, shared.rhythm, patience)
        try:
            study = patience(lambda: load_or_create(storage, name, identity, fleet))
            worker = worker_name()
            made = cls(name, storage, study, shared, worker, patience)
            require_fit(name, identity, fleet, patience(lambda: dict(study.user_attrs)))
            made.facts["gpu"] = fleet.get("gpu.name")
            patience(lambda: made.claims.tell(made.facts))
            made._heart = Heart(made._beat, shared.rhythm.beat_s)
            return made
        except BaseException:
            storage.engine.dispose()
            raise

    def close(self) -> None:
        """Leave the study; what this worker claimed and did not try is free again."""
        if self._heart is not None:
            self._heart.close()
        with contextlib.suppress(Exception):  # a lost database frees it all in time
            tried = {trial.digest for trial in self._counted()}
            for claim in self.claims.all().values():
                if claim.worker == self.worker and claim.digest not in tried:
                    self.claims.release(claim.digest)
            self.facts["ended"] = self.facts["ended"] or "left"
            self.claims.tell(self.facts)
        super().close()

    def _beat(self) -> None:
        self.claims.beat()
        if (current := self._current) is not None:
            self._storage.record_heartbeat(current)

    def tell_facts(self) -> None:
        """Store :attr:`facts` with the study."""
        self._patience(lambda: self.claims.tell(self.facts))

    def set_note(self, name: str, value: Any) -> None:
        """See :meth:`TuningStudy.set_note`."""
        self._patience(lambda: super(SharedStudy, self).set_note(name, value))

    def note(self, name: str) -> Any:
        """See :meth:`TuningStudy.note`."""
        return self._patience(lambda: super(SharedStudy, self).note(name))

    def note_once(self, name: str, value: Any) -> Any:
        """Store a note if there is none; the one that is stored now, whoever was first."""

        def once() -> Any:
            with alone(self._storage):
                if (found := super(SharedStudy, self).note(name)) is None:
                    super(SharedStudy, self).set_note(name, value)
                    return value
                return found

        return self._patience(once)

    def trials(self) -> list[TrialRecord]:
        """The trials that count, one a config, in the order they were started: see :func:`k3lab.tuning.counted.counted`."""
        return self._patience(self._counted)

    def _counted(self) -> list[TrialRecord]:
        return counted(self._study.get_trials(deepcopy=False), self._aside())

    def _aside(self) -> dict[str, frozenset[int]]:
        return {row.worker: aside_of(row.facts) for row in self.claims.workers()}

    def _same(self, digest: str) -> list[FrozenTrial]:
        """All trials of a config, dead ones too, but for those of drifting workers."""
        aside = self._aside()
        trials = self._storage.get_all_trials(self._id, deepcopy=False)
        return [one for one in trials if config_digest(one.params) == digest and not set_aside(one, aside)]

    @property
    def grace_s(self) -> int:
        """Seconds after which a silent worker is dead."""
        return self._rhythm.grace_s

    def be_patient(self, patient: bool) -> None:
        """Whether a lost database is waited for: not while there is something to do without it."""
        self._patience.patient = patient

    def claim(self, digest: str, most: int) -> bool:
        """Claim a config, if nobody has it and the study has room for it; see :meth:`Claims.claim`."""
        return self._patience(lambda: self.claims.claim(digest, most))

    def duty(self, name: str, grace_s: float) -> bool:
        """Take on what one worker at a time does; from one that is dead, too."""
        return self._patience(lambda: self.claims.claim(name) or self.claims.take_over(name, grace_s))

    def release(self, digest: str) -> None:
        """Give a claim of this worker back."""
        self._patience(lambda: self.claims.release(digest))

    def wait_until_back(self) -> None:
        """Wait for a lost database.

        Raises:
            DatabaseLost: it does not come back in time; says where the outcomes are.
        """
        try:
            self._patience(self.claims.beat)
        except DatabaseLost as error:
            kept = (
                f"; outcomes wait in {self._spool.path}, the same command stores them"
                if self._spool.path.exists()
                else ""
            )
            raise DatabaseLost(f"{error}{kept}") from error
        self.lost = False

    def begin(self, config: Config, space: Space) -> TrialRecord | None:
        """Start a config that this worker has claimed; None where the claim was lost to another by then.

        While the database is away the trial is begun without it.
        """
        import optuna
        from optuna.distributions import CategoricalDistribution

        digest, running = config_digest(config), optuna.trial.TrialState.RUNNING
        self._values = {param.name: list(param.values) for param in space.params}
        template = optuna.create_trial(
            state=running,
            params=dict(config),
            distributions={param.name: CategoricalDistribution(param.values) for param in space.params},
            user_attrs={WORKER: self.worker, CANARY: len(self.facts["canaries"])},
        )

        def started() -> FrozenTrial | None:
            with alone(self._storage):
                if not self.claims.claim(digest):
                    return None
                for trial in self._same(digest):
                    if trial.state is running and trial.user_attrs.get(WORKER) == self.worker:
                        return trial  # the answer to an earlier attempt was lost
                    if not trial.state.is_finished() or OUTCOME in trial.user_attrs:
                        return None  # the claim was another's for a while
                made = self._storage.create_new_trial(self._id, template_trial=template)
                self._storage.record_heartbeat(made)
                return self._storage.get_trial(made)

        try:
            trial = started()
        except Exception as error:
            if not is_lost(error):
                raise
            self.lost = True
            return TrialRecord(OFFLINE, dict(config), digest, None, finished=False)
        if trial is None:
            return None
        self._current = trial._trial_id
        return record_of(trial)

    def take_waiting(self) -> TrialRecord | None:
        """A trial that a dead worker left, now this worker's; None where there is none."""
        import optuna

        def taken() -> FrozenTrial | None:
            waiting = (optuna.trial.TrialState.WAITING,)
            with alone(self._storage):
                for trial in self._storage.get_all_trials(self._id, deepcopy=False, states=waiting):
                    if self._take(trial._trial_id, config_digest(trial.params)):
                        return self._storage.get_trial(trial._trial_id)
            return None

        trial = self._patience(taken)
        if trial is None:
            return None
        self._current = trial._trial_id
        return record_of(trial)

    def _take(self, trial_id: int, digest: str) -> bool:
        import optuna

        if not self._storage.set_trial_state_values(trial_id, optuna.trial.TrialState.RUNNING):
            return False
        self._storage.set_trial_user_attr(trial_id, WORKER, self.worker)
        self._storage.set_trial_user_attr(trial_id, CANARY, len(self.facts["canaries"]))
        self._storage.record_heartbeat(trial_id)
        if not self.claims.take_over(digest):
            self.claims.claim(digest)
        return True

    def finish(self, trial: TrialRecord, outcome: Outcome) -> None:
        """Store a trial's outcome once; on this machine's disk while the database is away."""
        entry: dict[str, Any] = {
            "worker": self.worker, "canary": len(self.facts["canaries"]), "trial_id": self._current, "config": dict(trial.config),
            "outcome": outcome.to_json(), "values": self._values,
        }  # fmt: skip
        if trial.number == OFFLINE:
            entry["trial_id"] = None
        try:
            if entry["trial_id"] is None:
                raise _Away
            self._end(entry["trial_id"], trial.outcome, outcome)
        except _Away:
            self._spool.add(entry)
        except Exception as error:
            if not is_lost(error):
                raise
            self.lost = True
            self._spool.add(entry)
        finally:
            self._current = None

    def _end(self, trial_id: int, stored: Outcome | None, outcome: Outcome) -> None:
        """Store the outcome and tell Optuna; of a trial that others have ended meanwhile see :meth:`_settle`."""
        import optuna

        try:
            self._store(trial_id, stored, outcome)
        except optuna.exceptions.UpdateFinishedTrialError:  # this worker was taken for dead
            entry = {"worker": self.worker, "outcome": outcome.to_json(), "canary": len(self.facts["canaries"]),
                     "config": dict(self._storage.get_trial(trial_id).params)}  # fmt: skip
            self._settle(entry)

    def _store(self, trial_id: int, stored: Outcome | None, outcome: Outcome) -> None:
        import optuna

        state = optuna.trial.TrialState
        if stored is None:
            self._storage.set_trial_user_attr(trial_id, OUTCOME, outcome.to_json())
        ok = outcome.status is Status.OK and outcome.value is not None
        self._storage.set_trial_state_values(trial_id, state.COMPLETE if ok else state.FAIL, [outcome.value] if ok else None)  # type: ignore[list-item]  # fmt: skip

    def merge_spooled(self) -> tuple[int, int]:
        """Store what waits on this machine's disk, each outcome once: how many were new, and how many were there."""
        return self._spool.merge(lambda entry: self._patience(lambda: self._settle(entry)))

    def _settle(self, entry: Mapping[str, Any]) -> bool:
        """Store an outcome, unless its config has one; whether it was stored."""
        import optuna

        for _ in range(SETTLES):
            try:
                with alone(self._storage):
                    return self._settled(entry)
            except optuna.exceptions.UpdateFinishedTrialError:  # its trial was ended between two looks
                continue
        return False

    def _settled(self, entry: Mapping[str, Any]) -> bool:
        import optuna
        from optuna.distributions import CategoricalDistribution

        outcome, digest = Outcome.from_json(entry["outcome"]), config_digest(entry["config"])
        state = optuna.trial.TrialState
        same = self._same(digest)
        if any(OUTCOME in one.user_attrs and one.state.is_finished() for one in same):
            return False
        for one in same:
            mine = one.state is state.RUNNING and one.user_attrs.get(WORKER) == entry["worker"]
            if mine or (one.state is state.WAITING and self._take(one._trial_id, digest)):
                self._storage.set_trial_user_attr(one._trial_id, CANARY, entry["canary"])
                self._storage.set_trial_user_attr(one._trial_id, WORKER, entry["worker"])
                self._store(one._trial_id, None, outcome)
                return True
        if any(not one.state.is_finished() for one in same):
            return False  # another runs it now
        if not (
            self.claims.take_over(digest, self._rhythm.grace_s)
            or self.claims.claim(digest)
            or self._of(digest, entry["worker"])
        ):
            return False
        attrs = {WORKER: entry["worker"], CANARY: entry["canary"], OUTCOME: entry["outcome"]}
        held: Any = {name: CategoricalDistribution(values) for name, values in entry.get("values", {}).items()}
        ok = outcome.status is Status.OK
        self._storage.create_new_trial(self._id, template_trial=optuna.create_trial(
            state=state.COMPLETE if ok else state.FAIL, value=outcome.value if ok else None, params=dict(entry["config"]),
            distributions=same[0].distributions if same else held, user_attrs=attrs,
        ))  # fmt: skip
        return True

    def _of(self, digest: str, worker: str) -> bool:
        """Whether the claim is still that of the worker who tried it offline."""
        claim = self.claims.all().get(digest)
        return claim is not None and claim.worker == worker

    def reap(self) -> None:
        """Queue the trials of dead workers again and free what they claimed; seldom, however often it is called."""
        import optuna

        if self._heart is not None and self._heart.error is not None:  # the study was deleted, for example
            raise self._heart.error
        if monotonic() - self._reaped < self._rhythm.grace_s / 4:
            return
        self._reaped = monotonic()

        def reaped() -> None:
            self.claims.first_beats()
            # Optuna ends a dead worker's trial first and queues it again later: whoever settles an outcome in between, of
            # a worker that was not dead, would see neither and store a second one
            with alone(self._storage), warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                optuna.storages.fail_stale_trials(self._study)
                tried = {trial.digest for trial in self._counted()}
                idle = [claim.digest for claim in self.claims.all().values() if claim.digest not in tried]
                self.claims.drop_late(
                    (digest for digest in idle if not digest.startswith(DUTIES)), self._rhythm.grace_s
                )

        self._patience(reaped)


class _Away(Exception):
    """The database does not know the trial."""
