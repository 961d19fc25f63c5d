"""The GPUs of this host: which of them a run measures on, and the lock that keeps a second tuner off them.

Two processes that time kernels on one GPU both measure each other. The lock is a file of the host's temporary folder, named
after the GPU's UUID: a container's tuners see each other's locks where they share that folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..kernels.errors import InputError
from .locks import ProcessLock

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


class GpuLock(ProcessLock):
    """Keeps a second tuner off a GPU."""

    def __init__(self, gpu: Gpu, folder: Path | None = None) -> None:
        super().__init__((folder or Path(tempfile.gettempdir())) / f"k3lab-{gpu.uuid}.lock", everyone=True)
        self.gpu = gpu


@contextmanager
def measuring(index: int, gpus: Sequence[Gpu] | None = None, folder: Path | None = None) -> Iterator[None]:
    """No tuner measures on a GPU meanwhile; nothing is locked where the driver does not name it.

    Args:
        index: of the GPU, as this process sees it.
        gpus: to choose from, by default those that are visible.
        folder: of the lock files.

    Raises:
        InputError: a tuner, or another such measurement, is at work on it.
    """
    found = [gpu for gpu in (visible() if gpus is None else gpus) if gpu.index == index]
    locks = take(1, found, folder) if found else []
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


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
        except OSError as error:
            for one in taken:
                one.release()
            raise InputError(
                f"GPU {gpu.index} cannot be locked: {lock.path} cannot be opened ({error.strerror}); remove it"
            ) from error
    if len(taken) < count and alike:
        for one in taken:
            one.release()
        raise InputError(
            f"another process is measuring on {', '.join(held)}: two on one GPU would time each other; wait for it"
        )
    return taken
