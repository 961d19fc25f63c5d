"""A lock that is a file of this host. The system frees it when its holder ends, however that happens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

OPEN = os.O_RDWR | os.O_CLOEXEC
TRIES = 10
"""Between opening and making a file, which others make and remove."""


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

        handle = self._shared() if self._everyone else os.open(self.path, OPEN | os.O_CREAT, 0o666)
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

    def _shared(self) -> int:
        """The file in a folder where all users write: made anew or opened as it is, for Linux lets nobody ask to make another user's file.

        A link is not followed: whoever laid it would have a file of ours written and opened to all.
        """
        for _ in range(TRIES):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, OPEN | os.O_NOFOLLOW)
            with contextlib.suppress(FileExistsError):  # another process was quicker
                handle = os.open(self.path, OPEN | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(handle, 0o666)
                return handle
        return os.open(self.path, OPEN | os.O_NOFOLLOW)

    def release(self) -> None:
        """Give it back; the file stays (removing it would let two processes lock two files of one name)."""
        if self._file is not None:
            self._file.close()
            self._file = None
