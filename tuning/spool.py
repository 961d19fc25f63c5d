"""Outcomes that wait on this machine's disk while the database is away."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..kernels.errors import InputError


class Spool:
    """One file a study and worker; a line an outcome, on the disk before the next trial begins.

    Args:
        folder: where the files are kept: data, not cache.
        study: the study's name.
        worker: who writes.
    """

    def __init__(self, folder: Path, study: str, worker: str) -> None:
        self._folder, self._study = folder, study
        self.path = folder / f"{study}.{worker}.jsonl"

    def add(self, entry: Mapping[str, Any]) -> None:
        """Keep an outcome.

        Raises:
            InputError: it cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._mine() as file:
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"the database is away and {self.path} cannot be written ({error.strerror})") from error

    def merge(self, settle: Callable[[Mapping[str, Any]], bool]) -> tuple[int, int]:
        """Hand every kept outcome of the study to ``settle``, those of workers that died too; a file goes when all of it is settled.

        ``settle`` must know an outcome that it has seen: a process may die before its file is gone.

        Returns:
            How many were stored, and how many were there already.
        """
        stored = known = 0
        for path in sorted(self._folder.glob("*.jsonl")):
            if path.name.rsplit(".", 2)[0] != self._study:
                continue
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another worker here merges it, or writes it now
                for line in file.read().splitlines():
                    try:
                        entry = json.loads(line)
                    except ValueError:  # the machine went down while this line was written
                        continue
                    new = settle(entry)
                    stored, known = stored + new, known + (not new)
                path.unlink(missing_ok=True)
        return stored, known

    @contextlib.contextmanager
    def _mine(self) -> Iterator[IO[bytes]]:
        """The worker's file, which nobody merges meanwhile."""
        while True:
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:  # else it was merged between the two
                    yield file
                    return
