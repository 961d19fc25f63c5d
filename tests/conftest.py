"""What tests of all packages share."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from k3lab.kernels.device import Device, discover

STICKY = re.compile(
    r"CUDA error: (an illegal|unspecified launch failure|misaligned|device-side assert|the launch timed out)|"
    r"CUDA_ERROR_(ILLEGAL|LAUNCH_FAILED|MISALIGNED|ASSERT|LAUNCH_TIMEOUT|HARDWARE_STACK|INVALID_PC)"
)
POISONED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU of this host: tests marked ``gpu`` are skipped where there is none."""
    found = discover()
    if found is None:
        pytest.skip("no GPU here")
    return found


@pytest.fixture(scope="session")
def quick_studies() -> Iterator[None]:
    """Studies of this process skip what costs most of a small one's time: its flushes to the disk, since tests kill
    processes and no machines, and Optuna's reading of its own table versions, which are the same for every file.
    """
    from optuna.storages._rdb.storage import _VersionManager

    connect, read = sqlite3.connect, _VersionManager._create_alembic_script

    def unflushed(*args: Any, **options: Any) -> sqlite3.Connection:
        made = connect(*args, **options)
        if options.get("check_same_thread") is False:  # a study's
            with contextlib.suppress(sqlite3.Error):  # a damaged one is told by what comes after
                made.execute("PRAGMA synchronous=OFF")
        return made

    @lru_cache(1)
    def scripts() -> Any:
        return read(manager)

    manager: Any = _VersionManager.__new__(_VersionManager)
    manager.url = "sqlite://"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", unflushed)
        patch.setattr(_VersionManager, "_create_alembic_script", lambda self: scripts())
        yield


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> None:
    """Note an error of CUDA that every later call of the process repeats."""
    if call.excinfo is not None and STICKY.search(str(call.excinfo.value)):
        item.config.stash[POISONED] = True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A worker of pytest-xdist ends after such an error, once the report is on its way: another takes its place.

    Without workers the session stops: what follows would fail for the first test's fault.
    """
    yield
    if item.config.stash.get(POISONED, False):
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        pytest.exit("a CUDA error that only a new process ends", returncode=1)
