"""What tests of all packages share."""

from __future__ import annotations

import pytest
from k3lab.kernels.device import Device, discover


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU of this host: tests marked ``gpu`` are skipped where there is none."""
    found = discover()
    if found is None:
        pytest.skip("no GPU here")
    return found
