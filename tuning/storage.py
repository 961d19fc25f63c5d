"""The SQLite file of a study: where it may lie, what it must be, and who may write it."""

from __future__ import annotations

import contextlib
import glob
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels.errors import InputError
from .locks import ProcessLock
from .outcome import one_line

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

MAGIC = b"SQLite format 3\0"
MOUNTS = Path("/proc/self/mounts")
NETWORK_FILESYSTEMS = frozenset([
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "pvfs2", "orangefs", "panfs",
    "wekafs", "fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.s3fs", "fuse.juicefs", "fuse.gcsfuse",
])  # fmt: skip
"""Where file locks are unreliable, and SQLite databases get malformed."""
BUSY_S = 30.0
"""How long a read waits for the tuner's commit."""


def filesystem_type(path: Path) -> str:
    """File system type of an existing path, or an empty string where the system does not tell."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        _, point, this_kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best):  # of two mounts on one point the later one shows
            best, kind = point, this_kind
    return kind


def check_place(path: Path) -> Path:
    """Make sure a study can be written at the path; creates its folder.

    Returns:
        The file itself, links followed: a study has one lock, whatever name it is reached by.

    Raises:
        InputError: the path is a folder, a device or an address, cannot be written, or lies on a network file
            system.
    """
    if "://" in str(path) or ":/" in str(path):
        raise InputError(
            f"study {path} is an address; a study is a file, for example studies/{path.name or 'my'}.sqlite3"
        )
    if path.is_dir():
        raise InputError(f"study {path} is a folder; name a file, for example {path / 'study.sqlite3'}")
    _check_regular(path)
    try:
        place = Path(os.path.realpath(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            pass
        if place.exists():
            with place.open("r+b"):
                pass
    except OSError as error:
        raise InputError(
            f"study {path} cannot be written ({error.strerror}): name a file in a folder you can write"
        ) from error
    kind = filesystem_type(place.parent)
    if kind in NETWORK_FILESYSTEMS:
        raise InputError(
            f"study {path} lies on a network file system ({kind}), where SQLite loses data: name a file on a local disk"
        )
    return place


def _check_regular(path: Path) -> None:
    """Refuse a device, a pipe or a socket: opening one may hang, replacing one breaks the machine."""
    if path.exists() and not path.is_file():
        raise InputError(f"study {path} is no regular file; name one that `k3lab tune` wrote or may write")


def check_database(path: Path) -> None:
    """Make sure an existing file is an Optuna database.

    Raises:
        InputError: it is not.
    """
    _check_regular(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"study {path} cannot be read ({error.strerror})") from error
    if head != MAGIC:
        raise InputError(f"{path} is not a study: it is no SQLite database; name a file that `k3lab tune` wrote")
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message about damaged text may not be text itself
        raise InputError(
            f"study {path} is damaged ({one_line(error)}): restore a copy, or name another file"
        ) from error
    if verdict != "ok":
        raise InputError(f"study {path} is damaged ({one_line(verdict)}): restore a copy, or name another file")
    if not {"studies", "trials"} <= tables:
        raise InputError(f"{path} is not a study: this SQLite database holds no Optuna tables")


def open_storage(path: Path) -> RDBStorage:
    """Optuna's storage of an existing database.

    Raises:
        InputError: the file is no Optuna database, or one of another Optuna version.
    """
    check_database(path)
    return connect(path)


def connect(path: Path, study: Path | None = None) -> RDBStorage:
    """Optuna's storage of a database, created where there is none; errors name the study it is for."""
    import sqlalchemy.exc
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage

    def open_file() -> sqlite3.Connection:
        return sqlite3.connect(path.resolve(), timeout=BUSY_S, check_same_thread=False)

    try:
        # the file's name is kept out of the URL, in which ?, #, % and braces mean something
        return RDBStorage("sqlite:///study", engine_kwargs={"creator": open_file})
    except RuntimeError as error:  # Optuna's own table version
        raise InputError(
            f"study {study or path} was written by another Optuna: {' '.join(str(error).split())}"
        ) from error
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        raise InputError(f"study {study or path} cannot be opened: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what Optuna raises for a damaged file into the user's news.

    Raises:
        InputError: anything the file's content made Optuna or us raise.
    """
    import sqlalchemy.exc
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        first = one_line(str(error).split("\n", 1)[0])
        raise InputError(f"study {path} is damaged ({first}): restore a copy, or name another file") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, or a file taken away, into the user's news.

    Raises:
        InputError: the database refused to store something.
    """
    import sqlalchemy.exc
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (OSError, sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        first = one_line(str(error.__cause__ or error).split("\n", 1)[0])
        raise InputError(f"study {path} cannot be written any more ({first}); what it holds is kept") from error


@contextlib.contextmanager
def created_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside the path that takes its place at the end: nobody sees a half-made database.

    Only for the holder of the study's lock: what a killed process left of an earlier try is removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new*"):
        left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def lock_study(study: Path) -> ProcessLock:
    """Keep a second tuner off a study, at once or not at all.

    Raises:
        InputError: another process holds its lock, or there can be no lock file.
    """
    lock = ProcessLock(study.with_name(study.name + ".lock"))
    try:
        free = lock.take()
    except OSError as error:
        raise InputError(
            f"study {study} cannot be locked: {lock.path} cannot be opened "
            f"({error.strerror}); remove it, or give another --study path"
        ) from error
    if not free:
        raise InputError(
            f"another tuner (process {lock.holder}) is writing study {study}: wait for it, or give another --study path"
        )
    return lock
