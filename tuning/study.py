"""A study on disk: trials as they were started and as they ended, in Optuna's own tables.

A trial is created running, with its params, in one transaction; its outcome is stored as one attribute
before Optuna is told. Whatever moment a process dies at, the next one can finish the trial.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..kernels.errors import InputError
from ..kernels.space import Config, Space, config_digest
from .identity import StudyIdentity, check_schema
from .locks import ProcessLock
from .outcome import Outcome, Status
from .storage import (
    BUSY_S,
    check_database,
    check_place,
    connect,
    created_whole,
    lock_study,
    open_storage,
    reading,
    writing,
)

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage

IDENTITY = "k3lab:identity"
OUTCOME = "k3lab:outcome"
NOTES: Mapping[str, tuple[str, ...]] = {
    "environment": ("gpu",),
    "finals": (),
    "contest": ("id", "entries", "trials", "alternatives", "floor_us", "environment", "policy"),
    "done": ("trials", "best"),
    "choice": (
        "config", "digest", "trial", "value_us", "evidence", "reason", "default_us", "default_status", "margin_over_default", "finalists",
    ),
}  # fmt: skip
"""Notes that are objects, and what readers take from them."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial."""

    number: int
    config: Config
    digest: str
    outcome: Outcome | None
    """None while it runs, or if its process died before the end."""
    finished: bool
    """Whether Optuna was told."""

    @property
    def ok(self) -> bool:
        """It ended with a value."""
        return self.outcome is not None and self.outcome.status is Status.OK

    @property
    def value(self) -> float:
        """The objective in microseconds; infinite unless the trial is ok."""
        return self.outcome.value if self.ok and self.outcome and self.outcome.value is not None else float("inf")

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "trial": self.number,
            "config": dict(self.config),
            "digest": self.digest,
            **(self.outcome.to_json() if self.outcome else {"status": "running", "reason": "", "value": None}),
        }


def best_of(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The ok trial with the lowest objective, or None."""
    return min((trial for trial in trials if trial.ok), key=lambda trial: (trial.value, trial.digest), default=None)


@dataclass(frozen=True)
class Glance:
    """What a study says of itself, without its trials."""

    identity: dict[str, Any]
    notes: dict[str, Any]
    """Name to note; see :meth:`TuningStudy.note`."""
    trials: int


def glance(path: Path) -> Glance:
    """Look at a study without Optuna: a table asks hundreds of them.

    The file is not opened read-only: a killed writer may have left a journal, which the next one must roll back.

    Raises:
        InputError: the file is no study.
    """
    with reading(path), contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S)) as file:  # fmt: skip
        try:
            stored = dict(file.execute("SELECT key, value_json FROM study_user_attributes").fetchall())
            count = int(file.execute("SELECT COUNT(*) FROM trials").fetchone()[0])
        except sqlite3.Error as error:
            raise ValueError(str(error)) from error
        notes = {key.removeprefix("k3lab:"): json.loads(value) for key, value in stored.items()}
        identity = notes.pop("identity")
        check_schema(identity, path)
        for name, note in notes.items():
            check_note(path, name, note)
        return Glance(dict(identity), notes, count)


def check_note(path: Path, name: str, note: Any) -> None:
    """Make sure that a note holds what readers take from it.

    Raises:
        InputError: it does not.
    """
    if note is not None and name in NOTES and not (isinstance(note, Mapping) and set(NOTES[name]) <= set(note)):
        raise InputError(f"study {path} is damaged (its note {name!r}): restore a copy, or name another file")


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna's notes about created studies are not the user's news."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def put_aside(place: Path) -> Path:
    """Rename a study to the first free ``<name>-old<n>.sqlite3`` beside it."""
    number = next(n for n in itertools.count(1) if not place.with_name(f"{place.stem}-old{n}{place.suffix}").exists())
    kept = place.with_name(f"{place.stem}-old{number}{place.suffix}")
    place.rename(kept)
    return kept


class TuningStudy:
    """An open study. Use :meth:`for_tuning` to write, :meth:`for_reading` to look."""

    def __init__(self, path: Path, storage: RDBStorage, study: optuna.Study, lock: ProcessLock | None) -> None:
        self.path = path
        self._storage = storage
        self._study = study
        self._lock = lock
        self._started: int | None = None

    @classmethod
    def for_tuning(cls, path: Path, identity: StudyIdentity, *, fresh: bool = False) -> TuningStudy:
        """Open the study to go on with it, or create it; no second process can until it is closed.

        Args:
            path: its file.
            identity: what it must be a study of.
            fresh: begin a new one; a study of that name is renamed, never lost.

        Raises:
            InputError: the path is unusable, the file is no study, it is a study of something else, or
                another tuner is writing it.
        """
        import optuna

        place = check_place(path)
        if place.exists() and place.stat().st_size:
            check_database(path)
        lock = lock_study(place)
        try:
            if fresh and place.exists():
                put_aside(place)
            if not place.exists() or place.stat().st_size == 0:
                with writing(path), created_whole(place) as temporary, quiet_optuna():
                    storage = connect(temporary, path)
                    study = optuna.create_study(storage=storage, study_name=identity.name, direction="minimize")
                    study.set_user_attr(IDENTITY, identity.to_json())
                    storage.engine.dispose()
            opened = cls._open(path, lock)
            identity.require(opened.identity, path)
            return opened
        except BaseException:
            lock.release()
            raise

    @classmethod
    def for_reading(cls, path: Path) -> TuningStudy:
        """Open an existing study to look at it; a tuner may be writing it meanwhile.

        Raises:
            InputError: there is none at the path, or the file is no study of this schema.
        """
        if path.is_dir():
            raise InputError(f"study {path} is a folder; name one of the files in it")
        if not path.exists():
            raise InputError(f"there is no study {path}; `k3lab tune` makes one")
        return cls._open(path, None)

    @classmethod
    def _open(cls, path: Path, lock: ProcessLock | None) -> TuningStudy:
        import optuna

        storage = open_storage(path)
        with reading(path), quiet_optuna():
            names = optuna.get_all_study_names(storage)
            if len(names) != 1:
                raise InputError(f"{path} holds {len(names)} Optuna studies; a k3lab study is one a file")
            study = optuna.load_study(study_name=names[0], storage=storage)
            identity = study.user_attrs.get(IDENTITY)
        if not isinstance(identity, Mapping):
            raise InputError(f"{path} is an Optuna database, but not a study of k3lab: it has no identity")
        check_schema(identity, path)
        return cls(path, storage, study, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and free the lock."""
        self._storage.remove_session()
        self._storage.engine.dispose()
        if self._lock is not None:
            self._lock.release()

    @property
    def identity(self) -> dict[str, Any]:
        """The stored identity."""
        return dict(self._study.user_attrs[IDENTITY])

    def note(self, name: str) -> Any:
        """A stored note of the study (environment, finals, choice), or None.

        Raises:
            InputError: it lacks what such a note holds.
        """
        found = self._study.user_attrs.get(f"k3lab:{name}")
        check_note(self.path, name, found)
        return found

    def set_note(self, name: str, value: Any) -> None:
        """Store a JSON-able note."""
        with writing(self.path):
            self._study.set_user_attr(f"k3lab:{name}", value)

    def trials(self) -> list[TrialRecord]:
        """All trials, in the order they were started."""
        with reading(self.path):
            return [record_of(trial) for trial in self._study.get_trials(deepcopy=False)]

    def unfinished(self) -> list[TrialRecord]:
        """Trials a dead process left running."""
        return [trial for trial in self.trials() if not trial.finished]

    def start(self, config: Config, space: Space) -> TrialRecord:
        """Store a new running trial, whole, in one transaction."""
        import optuna
        from optuna.distributions import CategoricalDistribution

        trial = optuna.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=dict(config),
            distributions={param.name: CategoricalDistribution(param.values) for param in space.params},
        )
        if self._started is None:
            self._started = len(self.trials())
        with writing(self.path):
            self._study.add_trial(trial)
        self._started += 1  # the lock keeps other writers off
        return TrialRecord(self._started - 1, dict(config), config_digest(config), None, finished=False)

    def finish(self, trial: TrialRecord, outcome: Outcome) -> None:
        """Store a trial's outcome, then tell Optuna. Of a trial that has an outcome only the second is left."""
        import optuna

        with writing(self.path):
            if trial.outcome is None:
                study_id = self._storage.get_study_id_from_name(self._study.study_name)
                trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
                self._storage.set_trial_user_attr(trial_id, OUTCOME, outcome.to_json())
            if outcome.status is Status.OK:
                self._study.tell(trial.number, outcome.value)
            else:
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def record_of(trial: optuna.trial.FrozenTrial) -> TrialRecord:
    """A trial as Optuna keeps it."""
    stored: Mapping[str, Any] | None = trial.user_attrs.get(OUTCOME)
    return TrialRecord(
        number=trial.number,
        config=dict(trial.params),
        digest=config_digest(trial.params),
        outcome=Outcome.from_json(stored) if stored else None,
        finished=trial.state.is_finished(),
    )
