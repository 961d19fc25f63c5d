"""Who has which config, and who is alive: the two tables beside Optuna's.

A config is claimed by its digest, which is unique in a study; the server's clock alone says how old anything is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .shared_storage import LOCK

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

DUTIES = "k3lab:"
"""First letters of claims that are no config's: of the finals, for example."""


@dataclass(frozen=True)
class Claim:
    """One claim."""

    digest: str
    worker: str
    age_s: float
    """Since its worker was last heard of."""


@dataclass(frozen=True)
class WorkerRow:
    """One worker of a study."""

    worker: str
    joined_s: float
    """Seconds since it joined."""
    seen_s: float
    """Seconds since it was last heard of."""
    facts: Mapping[str, Any]
    """Host, process, GPU, canaries, and how it ended."""


class Claims:
    """The tables, as one worker of one study uses them. What the database refuses is raised as SQLAlchemy does."""

    def __init__(self, engine: Engine, study_id: int, worker: str) -> None:
        self._engine = engine
        self._of = {"study": study_id, "worker": worker}

    def _run(self, connection: Connection, statement: str, **values: Any) -> Any:
        import sqlalchemy

        return connection.execute(sqlalchemy.text(statement), {**self._of, **values})

    def _one(self, statement: str, **values: Any) -> Any:
        with self._engine.begin() as connection:
            return self._run(connection, statement, **values).scalar()

    def claim(self, digest: str, most: int | None = None) -> bool:
        """Claim a config, if nobody else has it; what this worker has, it gets again.

        Args:
            digest: the config's.
            most: claims of configs there may be in the study then.
        """
        with self._engine.begin() as connection:
            if most is not None:  # counted and inserted by one worker at a time
                self._run(connection, "SELECT pg_advisory_xact_lock(:key, :study)", key=LOCK)
            holder = self._run(
                connection, "SELECT worker FROM k3lab_claims WHERE study_id = :study AND digest = :digest", digest=digest
            ).scalar()  # fmt: skip
            if holder is not None:
                return bool(holder == self._of["worker"])
            if most is not None and self._count(connection) >= most:
                return False
            made = self._run(
                connection,
                "INSERT INTO k3lab_claims (study_id, digest, worker) VALUES (:study, :digest, :worker) ON CONFLICT DO NOTHING RETURNING digest",
                digest=digest,
            )
            return made.scalar() is not None

    def _count(self, connection: Connection) -> int:
        found = self._run(
            connection, "SELECT count(*) FROM k3lab_claims WHERE study_id = :study AND digest NOT LIKE :duties", duties=f"{DUTIES}%"
        )  # fmt: skip
        return int(found.scalar() or 0)

    def take_over(self, digest: str, grace_s: float | None = None) -> bool:
        """Make a claim this worker's; with a grace only one whose worker was not heard of for so long."""
        late = "" if grace_s is None else " AND (worker = :worker OR at < now() - make_interval(secs => :grace))"
        return self._one(
            f"UPDATE k3lab_claims SET worker = :worker, at = now() WHERE study_id = :study AND digest = :digest{late} RETURNING digest",
            digest=digest, grace=grace_s,
        ) is not None  # fmt: skip

    def release(self, digest: str) -> None:
        """Give a claim of this worker back."""
        with self._engine.begin() as connection:
            self._run(
                connection, "DELETE FROM k3lab_claims WHERE study_id = :study AND digest = :digest AND worker = :worker", digest=digest
            )  # fmt: skip

    def drop_late(self, digests: Iterable[str], grace_s: float) -> None:
        """Free claims whose worker was not heard of for so long."""
        with self._engine.begin() as connection:
            for digest in digests:
                self._run(
                    connection,
                    "DELETE FROM k3lab_claims WHERE study_id = :study AND digest = :digest AND at < now() - make_interval(secs => :grace)",
                    digest=digest, grace=grace_s,
                )  # fmt: skip

    def all(self) -> dict[str, Claim]:
        """Every claim of the study by its digest."""
        with self._engine.begin() as connection:
            rows = self._run(
                connection, "SELECT digest, worker, extract(epoch FROM now() - at) FROM k3lab_claims WHERE study_id = :study"
            ).all()  # fmt: skip
        return {digest: Claim(digest, worker, float(age)) for digest, worker, age in rows}

    def beat(self) -> None:
        """This worker is alive, and so are its claims."""
        with self._engine.begin() as connection:
            self._run(connection, "UPDATE k3lab_workers SET seen = now() WHERE study_id = :study AND worker = :worker")
            self._run(connection, "UPDATE k3lab_claims SET at = now() WHERE study_id = :study AND worker = :worker")

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Store what there is to know of this worker."""
        with self._engine.begin() as connection:
            self._run(
                connection,
                "INSERT INTO k3lab_workers (study_id, worker, facts) VALUES (:study, :worker, :facts) "
                "ON CONFLICT (study_id, worker) DO UPDATE SET facts = EXCLUDED.facts, seen = now()",
                facts=json.dumps(facts),
            )

    def workers(self) -> list[WorkerRow]:
        """Every worker that ever joined the study, in that order."""
        with self._engine.begin() as connection:
            rows = self._run(
                connection,
                "SELECT worker, extract(epoch FROM now() - joined), extract(epoch FROM now() - seen), facts "
                "FROM k3lab_workers WHERE study_id = :study ORDER BY joined, worker",
            ).all()
        return [
            WorkerRow(worker, float(joined), float(seen), json.loads(facts)) for worker, joined, seen, facts in rows
        ]

    def first_beats(self) -> None:
        """Give running trials that have no heartbeat yet one: a worker may die between a trial's start and its first."""
        with self._engine.begin() as connection:
            self._run(
                connection,
                "INSERT INTO trial_heartbeats (trial_id, heartbeat) SELECT trial_id, now() FROM trials AS t WHERE study_id = :study "
                "AND state = 'RUNNING' AND NOT EXISTS (SELECT 1 FROM trial_heartbeats AS h WHERE h.trial_id = t.trial_id) "
                "ON CONFLICT DO NOTHING",
            )
