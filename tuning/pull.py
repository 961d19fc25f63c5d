"""Studies of a database as files, for everything that reads a study: show, export, tables, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..kernels.contract import Family
from ..kernels.errors import InputError
from ..kernels.gpu_cards import gpu_card
from .choose import choose
from .claims import Claims
from .counted import aside_of, counted
from .identity import StudyIdentity, check_schema
from .jobs import find_family
from .shared_storage import Rhythm, open_database, shown
from .study import IDENTITY, TuningStudy, best_of, quiet_optuna


def pull(
    address: str, folder: Path, name: str | None = None, *, fresh: bool = False, family: Family | None = None
) -> list[dict[str, Any]]:
    """Copy the studies of a database, or the named one, into files of a folder; running trials are left out.

    Args:
        address: the database.
        folder: gets a file a study, named as the study is.
        name: of the only study that is wanted.
        fresh: a file that is there is renamed first; without it such a study is refused.
        family: of the studies, if it is not registered.

    Returns:
        A study's name, file, number of trials and whether it is whole, each.

    Raises:
        InputError: no such database or study; a file is there; or it cannot be written.
    """
    import optuna

    storage = open_database(address, Rhythm())
    done = []
    try:
        with quiet_optuna():
            names = [one for one in optuna.get_all_study_names(storage) if name in (None, one)]
        if not names:
            raise InputError(f"there is no study {name or ''} in {shown(address)}".replace("  ", " "))
        for one in names:
            path = folder / f"{one}.sqlite3"
            if path.exists() and not fresh:
                raise InputError(
                    f"{path} is there: --fresh keeps it under another name, --studies names another folder"
                )
        for one in names:
            with quiet_optuna():
                study = optuna.load_study(study_name=one, storage=storage)
            rows = Claims(storage.engine, storage.get_study_id_from_name(one), "").workers()
            trials = counted(study.get_trials(deepcopy=False), {row.worker: aside_of(row.facts) for row in rows})
            attrs = study.user_attrs
            check_schema(attrs.get(IDENTITY) or {}, Path(one))
            identity = StudyIdentity(**attrs[IDENTITY])
            owner = (
                family if family is not None and family.name == identity.family else find_family(identity.family, None)
            )
            problem = owner.problem_from_json(identity.problem)
            space = owner.engine(identity.engine).space(problem, gpu_card(identity.gpu)).restricted(identity.fixed)
            path = folder / f"{one}.sqlite3"
            ended = [trial for trial in trials if trial.outcome is not None]
            with TuningStudy.for_tuning(path, identity, fresh=fresh) as copy:
                for trial in ended:
                    assert trial.outcome is not None
                    copy.finish(copy.start(trial.config, space), trial.outcome)
                for note in ("environment", "finals", "canary"):
                    copy.set_note(note, attrs.get(f"k3lab:{note}"))
                copy.set_note("pulled", {"from": shown(address), "study": one, "workers": len(rows)})
                choice = choose(copy, space)
                copy.set_note("choice", choice.to_json() if choice else None)
                whole = attrs.get("k3lab:whole") == len(trials) == len(ended)
                if whole:
                    best = best_of(copy.trials())
                    told = {"us": best.value, "config": dict(best.config)} if best else None
                    copy.set_note("done", {"trials": attrs.get("k3lab:wanted"), "best": told})
            done.append({"study": one, "file": str(path), "trials": len(ended), "whole": whole})
    finally:
        storage.remove_session()
        storage.engine.dispose()
    return done
