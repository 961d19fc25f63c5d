"""A study that many workers share: each config is tried once, whoever dies.

To readers it is a :class:`TuningStudy`; what differs is how a trial begins and ends. Of a config whose worker died
Optuna keeps a failed trial and queues another: :meth:`SharedStudy.trials` tells the one that counts. What happens in
the database is in :mod:`.shared_trials`; here is when, and what is done while the database is away.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..kernels.space import Config, Space, config_digest
from .claims import Claims
from .heart import Heart
from .identity import StudyIdentity
from .outcome import Outcome
from .shared_open import alone, load_or_create, require_fit
from .shared_storage import DatabaseLost, Patience, Rhythm, is_lost, open_database
from .shared_trials import SharedTrials
from .spool import Spool
from .study import TrialRecord, TuningStudy, record_of

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

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
        self.claims = Claims(storage.engine, storage.get_study_id_from_name(study.study_name), worker)
        self._trials = SharedTrials(storage, study, self.claims, worker, shared.rhythm.grace_s)
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
            tried = {trial.digest for trial in self._trials.counted()}
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
        return self._patience(self._trials.counted)

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
        self._values = {param.name: list(param.values) for param in space.params}
        try:
            trial = self._trials.begin(config, space.params, self._canary)
        except Exception as error:
            if not is_lost(error):
                raise
            self.lost = True
            return TrialRecord(OFFLINE, dict(config), config_digest(config), None, finished=False)
        return self._begun(trial)

    def take_waiting(self) -> TrialRecord | None:
        """A trial that a dead worker left, now this worker's; None where there is none."""
        return self._begun(self._patience(lambda: self._trials.take_waiting(self._canary)))

    def _begun(self, trial: FrozenTrial | None) -> TrialRecord | None:
        if trial is None:
            return None
        self._current = trial._trial_id
        return record_of(trial)

    @property
    def _canary(self) -> int:
        return len(self.facts["canaries"])

    def finish(self, trial: TrialRecord, outcome: Outcome) -> None:
        """Store a trial's outcome once; on this machine's disk while the database is away."""
        entry: dict[str, Any] = {
            "worker": self.worker, "canary": self._canary, "trial_id": self._current, "config": dict(trial.config),
            "outcome": outcome.to_json(), "values": self._values,
        }  # fmt: skip
        if trial.number == OFFLINE:
            entry["trial_id"] = None
        try:
            if entry["trial_id"] is None:
                self._spool.add(entry)
            else:
                self._trials.end(entry["trial_id"], trial.outcome, outcome, entry)
        except Exception as error:
            if not is_lost(error):
                raise
            self.lost = True
            self._spool.add(entry)
        finally:
            self._current = None

    def merge_spooled(self) -> tuple[int, int]:
        """Store what waits on this machine's disk, each outcome once: how many were new, and how many were there."""
        return self._spool.merge(lambda entry: self._patience(lambda: self._trials.settle(entry)))

    def reap(self) -> None:
        """Queue the trials of dead workers again and free what they claimed; seldom, however often it is called."""
        if self._heart is not None and self._heart.error is not None:  # the study was deleted, for example
            raise self._heart.error
        if monotonic() - self._reaped < self._rhythm.grace_s / 4:
            return
        self._reaped = monotonic()
        self._patience(self._trials.reap)
