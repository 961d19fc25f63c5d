"""What tests of all packages share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

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
