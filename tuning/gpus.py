"""The GPUs of this host: which of them a run measures on, and the lock that keeps a second tuner off them.

Two processes that time kernels on one GPU both measure each other. The lock is a file of the host's temporary folder, named
after the GPU's UUID: a container's tuners see each other's locks where they share that folder.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.errors import InputError

MOST_GPUS = 16


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process sees it."""

    index: int
    uuid: str
    """As the driver and ``CUDA_VISIBLE_DEVICES`` name it, ``GPU-...``."""
    name: str


def visible() -> list[Gpu]:
    """The GPUs that this process sees; none where there is no driver or ``K3LAB_NO_GPU=1``."""
    from ..kernels.device import identities

    return [Gpu(*one) for one in identities()]


class GpuLock:
    """Keeps a second tuner off a GPU. The system frees it when its holder ends, however that happens."""

    def __init__(self, gpu: Gpu, folder: Path | None = None) -> None:
        self.gpu = gpu
        self.path = (folder or Path(tempfile.gettempdir())) / f"k3lab-{gpu.uuid}.lock"
        self.holder = ""
        """Process that holds it, where :meth:`take` was refused."""
        self._file: Any = None

    def take(self) -> bool:
        """Take the lock, at once or not at all.

        Raises:
            InputError: there can be no lock file.
        """
        import fcntl

        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(
                f"GPU {self.gpu.index} cannot be locked: {self.path} cannot be opened ({error.strerror}); remove it"
            ) from error
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


def take(count: int, gpus: Sequence[Gpu] | None = None, folder: Path | None = None) -> list[GpuLock]:
    """Locks of that many GPUs of one model, the first ones that no other tuner measures on.

    Args:
        count: how many.
        gpus: to choose from, by default those that are visible; where there are none the list is empty.
        folder: of the lock files.

    Raises:
        InputError: there are fewer, or other tuners hold them; nothing stays locked.
    """
    if not 1 <= count <= MOST_GPUS:
        raise InputError(f"gpus is {count}, must be 1 to {MOST_GPUS}")
    found = visible() if gpus is None else list(gpus)
    alike = [gpu for gpu in found if gpu.name == found[0].name]
    if count > max(len(alike), 1):
        raise InputError(f"{count} GPUs were asked for, {len(alike)} of one model are here")
    taken: list[GpuLock] = []
    held: list[str] = []
    for gpu in alike:
        if len(taken) == count:
            break
        lock = GpuLock(gpu, folder)
        try:
            if lock.take():
                taken.append(lock)
            else:
                held.append(f"GPU {gpu.index} (process {lock.holder})")
        except InputError:
            for one in taken:
                one.release()
            raise
    if len(taken) < count and alike:
        for one in taken:
            one.release()
        raise InputError(
            f"another tuner is measuring on {', '.join(held)}: two on one GPU would time each other; wait for it"
        )
    return taken
