"""The first moments of a worker in a shared study: one process makes it, the others must fit it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.errors import InputError
from .identity import StudyIdentity, check_schema, first_difference
from .shared_storage import LOCK
from .study import IDENTITY, quiet_optuna

if TYPE_CHECKING:
    import optuna
    from optuna.storages import RDBStorage


@contextlib.contextmanager
def alone(storage: RDBStorage) -> Iterator[None]:
    """One process at a time in the database."""
    import sqlalchemy

    with storage.engine.begin() as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
        yield


def load_or_create(storage: RDBStorage, name: str, identity: StudyIdentity, fleet: Mapping[str, Any]) -> optuna.Study:
    """The study, whole: nobody sees one without its identity."""
    import optuna

    with alone(storage), quiet_optuna():
        study = optuna.create_study(storage=storage, study_name=name, direction="minimize", load_if_exists=True)
        if IDENTITY not in study.user_attrs:
            study.set_user_attr("k3lab:fleet", dict(fleet))
            study.set_user_attr(IDENTITY, identity.to_json())  # last: what has an identity is whole
        return study


def require_fit(name: str, identity: StudyIdentity, fleet: Mapping[str, Any], attrs: Mapping[str, Any]) -> None:
    """Make sure that a worker is like the study: ``attrs`` are the study's.

    Raises:
        InputError: it differs; the first field that does is named.
    """
    stored = attrs[IDENTITY]
    check_schema(stored, Path(name))
    there = json.loads(json.dumps(attrs.get("k3lab:fleet") or {}))
    differs = first_difference(stored, identity.to_json()) or first_difference({"fleet": there}, {"fleet": dict(fleet)})
    if differs:
        what, was, now = differs
        raise InputError(
            f"this worker does not fit study {name}: its {what.removeprefix('fleet.')} is {now!r}, the study's {was!r}; "
            "make them alike, or begin another study with --study NAME"
        )
