"""A PostgreSQL database that many machines tune in: its address, how it is opened, and what happens while it is away.

Trials, heartbeats and retries are Optuna's. It knows no workers and lets two of them try one config: two small tables
of ours stand beside its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from ..kernels.errors import InputError
from .outcome import one_line

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from sqlalchemy import URL

T = TypeVar("T")
LOCK = 0x6B336C62
"""Key of the advisory locks: "k3lb"."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS k3lab_claims (study_id INTEGER NOT NULL REFERENCES studies (study_id) ON DELETE CASCADE, "
    "digest VARCHAR(64) NOT NULL, worker VARCHAR(200) NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now(), PRIMARY KEY (study_id, digest))",
    "CREATE TABLE IF NOT EXISTS k3lab_workers (study_id INTEGER NOT NULL REFERENCES studies (study_id) ON DELETE CASCADE, "
    "worker VARCHAR(200) NOT NULL, joined TIMESTAMPTZ NOT NULL DEFAULT now(), seen TIMESTAMPTZ NOT NULL DEFAULT now(), "
    "facts TEXT NOT NULL, PRIMARY KEY (study_id, worker))",
)  # fmt: skip
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
CONNECT_S = 10
"""How long one attempt to reach the server may take."""


@dataclass(frozen=True)
class Rhythm:
    """How often a worker is heard of, and how long it is missed."""

    beat_s: int = 20
    """Between two heartbeats."""
    grace_s: int = 120
    """Without one for so long, a worker is dead: its trial is tried again, its claims are free."""
    lost_s: float = 3600.0
    """How long a database that is away is tried again."""
    retries: int = 2
    """Times that a trial whose worker died is tried again."""


class DatabaseLost(InputError):
    """The database did not come back in time."""


def is_address(text: str) -> bool:
    """Whether a text names a database, not a file."""
    return "://" in text


def parse_address(address: str) -> URL:
    """The address, with the driver that is used.

    Raises:
        InputError: it is none of PostgreSQL, or the driver is not installed.
    """
    import sqlalchemy

    example = "postgresql://user@host/database"
    try:
        url = sqlalchemy.make_url(address)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise InputError(f"--storage is an address such as {example}") from None
    if url.drivername.startswith("sqlite"):
        raise InputError(
            f"--storage {url.drivername}: a SQLite file loses data when several machines write it: name {example}, or --study FILE for one machine"
        )
    if url.drivername not in ("postgresql", "postgresql+psycopg", "postgres"):
        raise InputError(f"--storage {url.drivername}: studies of many machines lie in PostgreSQL, such as {example}")
    if not url.database:
        raise InputError(f"--storage names no database; it is an address such as {example}")
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise InputError("--storage needs the driver psycopg: pip install 'k3lab[postgres]'") from None
    return url.set(drivername="postgresql+psycopg")


def shown(address: str) -> str:
    """The address without its password."""
    return parse_address(address).set(drivername="postgresql").render_as_string(hide_password=True)


def is_lost(error: BaseException | None) -> bool:
    """Whether the connection is at fault, not what was asked for."""
    import sqlalchemy.exc

    while error is not None:
        if isinstance(error, (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError)):
            return True
        if isinstance(error, sqlalchemy.exc.DBAPIError) and error.connection_invalidated:
            return True
        error = error.__cause__ or error.__context__
    return False


class Patience:
    """Tries again what a lost database refuses.

    Args:
        rhythm: says how long.
        say: hears of a loss and of its end.
        stopped: whether the run was asked to end, which ends the waiting, too.
    """

    def __init__(
        self, rhythm: Rhythm, say: Callable[[str], None] | None = None, stopped: Callable[[], bool] | None = None
    ) -> None:
        self.rhythm = rhythm
        self._say = say or (lambda text: None)
        self._stopped = stopped or (lambda: False)
        self.patient = True
        """Whether to wait at all."""

    def __call__(self, what: Callable[[], T]) -> T:
        """What it returns once the database lets it.

        Raises:
            DatabaseLost: the database was away for too long.
        """
        begun, pause, lost = monotonic(), FIRST_PAUSE_S, False
        while True:
            try:
                done = what()
            except Exception as error:
                if not is_lost(error):
                    raise
                if not self.patient or self._stopped() or monotonic() - begun > self.rhythm.lost_s:
                    raise DatabaseLost(f"the database is away ({reason_of(error)})") from error
                if not lost:
                    self._say(f"the database is away ({reason_of(error)}): trying again for {self.rhythm.lost_s:g} s")
                lost = True
                sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if lost:
                self._say(f"the database is back after {monotonic() - begun:.1f} s")
            return done


def reason_of(error: BaseException) -> str:
    """The driver's own words, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(str(getattr(error, "orig", None) or error).split("\n", 1)[0])


def open_database(address: str, rhythm: Rhythm, patience: Patience | None = None) -> RDBStorage:
    """Optuna's storage in the database, whose tables are made if they are not there.

    Raises:
        InputError: no such address; or the server refuses it, at once or for as long as the patience lasts.
    """
    import sqlalchemy

    url = parse_address(address)
    limits = {"connect_timeout": CONNECT_S, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}

    def opened() -> RDBStorage:
        engine = sqlalchemy.create_engine(url, connect_args=limits)
        try:
            with engine.begin() as connection:  # two processes that make tables at once break each other
                connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
                made = _storage(url, rhythm, limits)
                with made.engine.begin() as own:
                    for table in TABLES:
                        own.execute(sqlalchemy.text(table))
            return made
        finally:
            engine.dispose()

    try:
        return patience(opened) if patience else opened()
    except RuntimeError as error:  # Optuna's own table version
        raise InputError(f"the database {shown(address)} is of another Optuna: {one_line(error)}") from error
    except InputError:
        raise
    except Exception as error:
        if is_lost(error) or isinstance(error, sqlalchemy.exc.SQLAlchemyError):
            raise InputError(f"the database {shown(address)} cannot be opened: {reason_of(error)}") from error
        raise


def _storage(url: URL, rhythm: Rhythm, limits: dict[str, Any]) -> RDBStorage:
    from optuna import storages
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():  # heartbeats have been called experimental for years
        warnings.simplefilter("ignore", ExperimentalWarning)
        return storages.RDBStorage(
            url.render_as_string(hide_password=False),
            engine_kwargs={"pool_pre_ping": True, "connect_args": limits},
            heartbeat_interval=rhythm.beat_s,
            grace_period=rhythm.grace_s,
            heartbeat_stale_trial_callback=storages.RetryHeartbeatStaleTrialCallback(max_retry=rhythm.retries),
        )
