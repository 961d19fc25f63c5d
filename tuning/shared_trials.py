"""How trials of a shared study begin, change hands and end: each step one transaction, alone in the database.

Whoever decides who has a trial looks at what is stored there and at nothing else: a claim may be lost, and a worker
that was taken for dead may wake up, between any two looks. Callers retry where the database is away.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels.space import Config, Param, config_digest
from .claims import DUTIES, Claims
from .counted import CANARY, WORKER, aside_of, counted, set_aside
from .outcome import Outcome, Status
from .shared_open import alone
from .study import OUTCOME, TrialRecord

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

SETTLES = 5
"""Looks at a trial that others may be ending."""


class SharedTrials:
    """The trials of a study in a shared database, as one worker handles them.

    Args:
        storage: where the study lies.
        study: the study.
        claims: of this worker.
        worker: its name.
        grace_s: seconds after which a silent worker is dead.
    """

    def __init__(self, storage: RDBStorage, study: optuna.Study, claims: Claims, worker: str, grace_s: int) -> None:
        self._storage, self._study, self._claims, self._worker = storage, study, claims, worker
        self._grace_s = grace_s
        self._id = storage.get_study_id_from_name(study.study_name)

    def counted(self) -> list[TrialRecord]:
        """The trials that count; see :func:`k3lab.tuning.counted.counted`."""
        return counted(self._study.get_trials(deepcopy=False), self._aside())

    def _aside(self) -> dict[str, frozenset[int]]:
        return {row.worker: aside_of(row.facts) for row in self._claims.workers()}

    def _same(self, digest: str) -> list[FrozenTrial]:
        """All trials of a config, dead ones too, but for those of drifting workers."""
        aside = self._aside()
        trials = self._storage.get_all_trials(self._id, deepcopy=False)
        return [one for one in trials if config_digest(one.params) == digest and not set_aside(one, aside)]

    def begin(self, config: Config, params: Sequence[Param], canary: int) -> FrozenTrial | None:
        """Start a config that this worker has claimed; None where the claim was lost to another by then.

        Args:
            config: what to try.
            params: of the space that it is of.
            canary: how many canaries this worker has timed.
        """
        import optuna
        from optuna.distributions import CategoricalDistribution

        digest, running = config_digest(config), optuna.trial.TrialState.RUNNING
        template = optuna.create_trial(
            state=running,
            params=dict(config),
            distributions={param.name: CategoricalDistribution(param.values) for param in params},
            user_attrs={WORKER: self._worker, CANARY: canary},
        )
        with alone(self._storage):
            if not self._claims.claim(digest):
                return None
            for trial in self._same(digest):
                if trial.state is running and trial.user_attrs.get(WORKER) == self._worker:
                    return trial  # the answer to an earlier attempt was lost
                if not trial.state.is_finished() or OUTCOME in trial.user_attrs:
                    return None  # the claim was another's for a while
            made = self._storage.create_new_trial(self._id, template_trial=template)
            self._storage.record_heartbeat(made)
            return self._storage.get_trial(made)

    def take_waiting(self, canary: int) -> FrozenTrial | None:
        """A trial that a dead worker left, now this worker's; None where there is none."""
        import optuna

        waiting = (optuna.trial.TrialState.WAITING,)
        with alone(self._storage):
            for trial in self._storage.get_all_trials(self._id, deepcopy=False, states=waiting):
                if self._take(trial._trial_id, config_digest(trial.params), self._worker, canary):
                    return self._storage.get_trial(trial._trial_id)
        return None

    def _take(self, trial_id: int, digest: str, worker: str, canary: int) -> bool:
        import optuna

        if not self._storage.set_trial_state_values(trial_id, optuna.trial.TrialState.RUNNING):
            return False
        self._sign(trial_id, worker, canary)
        self._storage.record_heartbeat(trial_id)
        if not self._claims.take_over(digest):
            self._claims.claim(digest)
        return True

    def _sign(self, trial_id: int, worker: str, canary: int) -> None:
        self._storage.set_trial_user_attr(trial_id, WORKER, worker)
        self._storage.set_trial_user_attr(trial_id, CANARY, canary)

    def end(self, trial_id: int, stored: Outcome | None, outcome: Outcome, entry: Mapping[str, Any]) -> None:
        """Store the outcome of a running trial and tell Optuna.

        Args:
            trial_id: Optuna's.
            stored: the outcome that the trial has already.
            outcome: what came of it.
            entry: what is settled where others ended the trial meanwhile; see :meth:`settle`.
        """
        import optuna

        try:
            self._store(trial_id, stored, outcome)
        except optuna.exceptions.UpdateFinishedTrialError:  # this worker was taken for dead
            self.settle(entry)

    def _store(self, trial_id: int, stored: Outcome | None, outcome: Outcome) -> None:
        import optuna

        state = optuna.trial.TrialState
        if stored is None:
            self._storage.set_trial_user_attr(trial_id, OUTCOME, outcome.to_json())
        ok = outcome.status is Status.OK and outcome.value is not None
        self._storage.set_trial_state_values(trial_id, state.COMPLETE if ok else state.FAIL, [outcome.value] if ok else None)  # type: ignore[list-item]  # fmt: skip

    def settle(self, entry: Mapping[str, Any]) -> bool:
        """Store an outcome, unless its config has one.

        Args:
            entry: ``worker``, ``canary``, ``config``, ``outcome`` as JSON, and ``values``: those of each parameter.

        Returns:
            Whether it was stored.
        """
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
        worker, canary = entry["worker"], entry["canary"]
        state = optuna.trial.TrialState
        same = self._same(digest)
        if any(OUTCOME in one.user_attrs and one.state.is_finished() for one in same):
            return False
        for one in same:
            mine = one.state is state.RUNNING and one.user_attrs.get(WORKER) == worker
            if mine or (one.state is state.WAITING and self._take(one._trial_id, digest, worker, canary)):
                self._sign(one._trial_id, worker, canary)
                self._store(one._trial_id, None, outcome)
                return True
        if any(not one.state.is_finished() for one in same):
            return False  # another runs it now
        if not (
            self._claims.take_over(digest, self._grace_s) or self._claims.claim(digest) or self._of(digest, worker)
        ):
            return False
        held: Any = {name: CategoricalDistribution(values) for name, values in entry.get("values", {}).items()}
        ok = outcome.status is Status.OK
        self._storage.create_new_trial(self._id, template_trial=optuna.create_trial(
            state=state.COMPLETE if ok else state.FAIL, value=outcome.value if ok else None, params=dict(entry["config"]),
            distributions=same[0].distributions if same else held,
            user_attrs={WORKER: worker, CANARY: canary, OUTCOME: entry["outcome"]},
        ))  # fmt: skip
        return True

    def _of(self, digest: str, worker: str) -> bool:
        """Whether the claim is still that of the worker who tried it offline."""
        claim = self._claims.all().get(digest)
        return claim is not None and claim.worker == worker

    def reap(self) -> None:
        """Queue the trials of dead workers again and free what they claimed."""
        import optuna

        self._claims.first_beats()
        # Optuna ends a dead worker's trial first and queues it again later: whoever settles an outcome in between, of
        # a worker that was not dead, would see neither and store a second one
        with alone(self._storage), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study)
            tried = {trial.digest for trial in self.counted()}
            idle = [claim.digest for claim in self._claims.all().values() if claim.digest not in tried]
            self._claims.drop_late((digest for digest in idle if not digest.startswith(DUTIES)), self._grace_s)
