"""What goes on in a database of shared studies: workers, rate, best, time left."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.errors import InputError
from .claims import Claims, WorkerRow
from .counted import WORKER, aside_of, counted
from .identity import check_schema
from .shared_storage import DatabaseLost, Rhythm, is_lost, open_database, reason_of, shown
from .study import IDENTITY, best_of, quiet_optuna

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage

WINDOW = timedelta(hours=1)
"""Trials that ended within it make the rate."""


def _alive(row: WorkerRow, rhythm: Rhythm) -> bool:
    return row.facts.get("ended") is None and row.seen_s <= rhythm.grace_s


def snapshot(address: str, name: str | None = None, rhythm: Rhythm | None = None) -> dict[str, Any]:
    """All studies of a database, or the named one, as they are now; JSON-able.

    ``rate`` is ended trials an hour over the last hour of work; ``left_s`` the seconds that the missing trials take at it.

    Raises:
        InputError: no such database or study.
        DatabaseLost: it went away meanwhile.
    """
    import optuna

    rhythm = rhythm or Rhythm()
    storage = open_database(address, rhythm)
    try:
        with quiet_optuna():
            names = [one for one in optuna.get_all_study_names(storage) if name in (None, one)]
            if not names:
                raise InputError(f"there is no study {name or ''} in {shown(address)}".replace("  ", " "))
            studies = [_study(storage, optuna.load_study(study_name=one, storage=storage), rhythm) for one in names]
    except Exception as error:
        if not is_lost(error):
            raise
        raise DatabaseLost(f"the database {shown(address)} went away: {reason_of(error)}") from error
    finally:
        storage.remove_session()
        storage.engine.dispose()
    left = [one["left_s"] for one in studies]
    return {
        "storage": shown(address),
        "studies": studies,
        "workers": sum(row["alive"] for one in studies for row in one["workers"]),
        "left_s": None if any(one is None for one in left) else sum(left),
    }


def _study(storage: RDBStorage, study: optuna.Study, rhythm: Rhythm) -> dict[str, Any]:
    attrs = study.user_attrs
    check_schema(attrs.get(IDENTITY) or {}, Path(study.study_name))
    rows = Claims(storage.engine, storage.get_study_id_from_name(study.study_name), "").workers()
    frozen = study.get_trials(deepcopy=False)
    aside = {row.worker: aside_of(row.facts) for row in rows}
    trials = counted(frozen, aside)
    ended = [trial for trial in trials if trial.finished]
    best = best_of(trials)
    wanted = attrs.get("k3lab:wanted") or len(trials)
    times = sorted(one.datetime_complete for one in frozen if one.datetime_complete is not None)
    rate = _rate(times)
    missing = 0 if attrs.get("k3lab:whole") == len(trials) else max(0, wanted - len(ended))
    by_worker = Counter(one.user_attrs.get(WORKER) for one in frozen if one.state.is_finished())
    return {
        "study": study.study_name,
        "evidence": attrs[IDENTITY]["objective"],
        "trials": len(ended),
        "running": sum(not trial.finished for trial in trials),
        "wanted": wanted,
        "lost": sum(one.state.is_finished() for one in frozen) - len(ended),
        "rate": rate,
        "best_us": best.value if best else None,
        "best": dict(best.config) if best else None,
        "left_s": 0.0 if not missing else None if not rate else missing / rate * 3600,
        "canary": attrs.get("k3lab:canary"),
        "workers": [
            {
                "worker": row.worker, "host": row.facts.get("host"), "gpu": row.facts.get("gpu"), "alive": _alive(row, rhythm),
                "seen_s": round(row.seen_s, 1), "trials": by_worker.get(row.worker, 0), "ended": row.facts.get("ended"),
                "canary_us": row.facts["canaries"][-1]["us"] if row.facts.get("canaries") else None,
            }
            for row in rows
        ],
    }  # fmt: skip


def _rate(times: list[datetime]) -> float | None:
    """Trials an hour among those of the last hour before the last one; None of fewer than two."""
    recent = [one for one in times if times[-1] - one <= WINDOW]
    spent = (recent[-1] - recent[0]).total_seconds() if recent else 0.0
    return (len(recent) - 1) / spent * 3600 if spent > 0 else None
