"""A lock that is a file of this host. The system frees it when its holder ends, however that happens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO


class ProcessLock:
    """Held by one process at a time; the file names it.

    Args:
        path: of the file.
        everyone: other users' processes take it too.
    """

    def __init__(self, path: Path, *, everyone: bool = False) -> None:
        self.path, self._everyone = path, everyone
        self.holder = ""
        """Process that holds it, where :meth:`take` was refused."""
        self._file: IO[bytes] | None = None

    def take(self) -> bool:
        """Take the lock, at once or not at all; whether it was free.

        Raises:
            OSError: there can be no such file.
        """
        import fcntl

        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._everyone:
            with contextlib.suppress(OSError):  # another user's file: it is open already
                os.fchmod(handle, 0o666)
        file = os.fdopen(handle, "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.holder = file.read().decode(errors="replace").strip() or "unknown"
            file.close()
            return False
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name of its holder
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        self._file = file
        return True

    def release(self) -> None:
        """Give it back; the file stays (removing it would let two processes lock two files of one name)."""
        if self._file is not None:
            self._file.close()
            self._file = None
